"""The contract, where something goes wrong: what whoever launched sees of it, and that nothing runs on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    RankDiedError,
    UnsendableError,
)
from tests.contract import scenarios
from tests.contract.harness import all_said, none_alive

pytestmark = pytest.mark.contract


def notes_name_the_rank(launcher, told):
    """Whether the notes tell rank, node and host of the last rank; an inline rank raises where it is called."""
    if launcher.name == "inline":
        return not told.notes
    last = launcher.world_size - 1
    host = "node1" if launcher.name == "slurm" else os.uname().nodename
    return (
        f"raised in rank {last} of 4 (node {launcher.n_nodes - 1}, {host}); there:\n" in told.notes
        and "Traceback (most recent call last)" in told.notes
        and "scenarios.py" in told.notes
    )


@pytest.mark.parametrize(
    ("situation", "failure", "kind"),
    [("raised", scenarios.raise_key_error, KeyError), ("odd", scenarios.raise_odd_error, scenarios.OddError)],
)
def test_an_exception_arrives_while_others_are_blocked(launcher, seen_by_user, situation, failure, kind):
    """With its type, its arguments and what it keeps; the notes name the rank, its node and its line."""
    told = launcher.play(scenarios.fail_while_others_wait, failure).raised()
    seen_by_user(situation, told)
    assert told.kind is kind
    if kind is KeyError:
        assert told.args == ("weight", 7)
    else:
        assert (told.message, told.attributes) == ("code 5", {"code": 5, "detail": "why"})
    assert notes_name_the_rank(launcher, told), told


def test_the_earliest_failure_is_the_one_that_is_told(launcher, tmp_path):
    """All ranks fail, one soon after the other: the first of them is told, or where nobody watches, the first heard of."""
    told = launcher.play(scenarios.fail_everywhere, scenarios.raise_key_error, tmp_path, ipc_groups=None).raised()
    assert told.kind is KeyError
    if launcher.name == "torchrun":
        assert "raised in rank" in told.notes
        return
    assert notes_name_the_rank(launcher, told), told


DEATHS = [
    ("os._exit", scenarios.leave_at_once, None, 7, "left with exit code 7 and returned nothing"),
    ("killed", scenarios.kill_itself, signal.SIGKILL, None, "was killed by SIGKILL"),
    ("crash", scenarios.crash, signal.SIGSEGV, None, "was killed by SIGSEGV"),
]


@pytest.mark.parametrize(("situation", "failure", "number", "code", "text"), DEATHS, ids=[each[0] for each in DEATHS])
def test_a_rank_that_dies_is_told_with_how(launcher, seen_by_user, situation, failure, number, code, text):
    """RankDiedError has rank, signal and exit code; where nobody watches ranks but their starter, that ends with them."""
    if launcher.unable("survive a death"):
        options = {"dies": True} if launcher.name == "inline" else {}
        seen = launcher.play(scenarios.fail_while_others_wait, failure, **options)
        how = f"signal {number.name}" if number else f"exit code {code}"
        if launcher.name == "inline":
            assert seen.ended == (-number if number else code)
            seen_by_user(situation, f"the process ends: {how}")
        else:
            assert seen.ended == 1
            assert f"exitcode  : {-number if number else code}" in seen.shown
            seen_by_user(situation, f"torchrun ends all ranks, and says: {how}")
        return
    told = launcher.play(scenarios.fail_while_others_wait, failure).raised()
    seen_by_user(situation, told)
    assert told.kind is RankDiedError
    assert told.attributes == {"rank": 3, "signal": number, "exit_code": code}
    assert f"rank 3 of 4 {text} (node {launcher.n_nodes - 1}, " in told.message


def test_leaving_by_sys_exit_is_told(launcher, seen_by_user):
    """As a rank that returned nothing; inline it is what it always is."""
    told = launcher.play(scenarios.fail_while_others_wait, scenarios.exit_3).raised()
    seen_by_user("sys.exit", told)
    if launcher.name == "inline":
        assert (told.kind, told.args) == (SystemExit, (3,))
        return
    assert told.kind is RankDiedError
    assert (told.attributes["rank"], told.attributes["exit_code"]) == (3, 3)
    assert "rank 3 of 4 left by sys.exit(3) and returned nothing" in told.message


def test_an_argument_that_cannot_be_sent_is_named_by_its_address(launcher, seen_by_user):
    """Before any rank starts; where nothing is sent, any argument will do."""
    if launcher.unable("send") or launcher.unable("send arguments"):
        results = launcher.play(lambda: scenarios.take([1, threading.Lock()])).given()
        seen_by_user("argument", "nothing: no argument is sent")
        assert set(results) == {"taken"}
        return
    told = launcher.play(scenarios.take, {"schedule": [1, threading.Lock()]}).raised()
    seen_by_user("argument", told)
    assert told.kind is UnsendableError
    assert told.message.startswith("args[0]['schedule'][1] cannot be sent to another process: lock")


def test_a_result_that_cannot_be_sent_is_named_by_its_address(launcher, seen_by_user):
    """And by the rank that returned it; where nothing is sent, any result will do."""
    if launcher.unable("send"):
        seen = launcher.play(scenarios.give_a_lock)
        seen_by_user("result", "nothing: no result is sent")
        assert list(seen.given()[0]) == ["locks"]
        return
    told = launcher.play(scenarios.give_a_lock).raised()
    seen_by_user("result", told)
    assert told.kind is UnsendableError
    assert told.message.startswith("the result['locks'][1] cannot be sent to another process: lock"), told.message
    assert "rank 3 of 4" in told.notes


def test_a_rank_launches_nothing(launcher, seen_by_user):
    """A launch within a rank is refused there."""
    told = launcher.play(scenarios.fail_while_others_wait, scenarios.launch_more).raised()
    seen_by_user("nested", told)
    assert told.kind is LaunchError
    assert "a rank starts no ranks" in told.message


def test_who_is_left_in_a_collective_hears_of_it(launcher, seen_by_user):
    """Its connection breaks soon after another rank has returned, and a note says which."""
    limit = {"timeout_min": 0.2} if launcher.name == "torchrun" else {}  # an end, should it not hear of it
    seen = launcher.play(scenarios.leave_others_in_a_collective, **limit)
    if launcher.unable("several ranks"):
        assert list(seen.given()) == [None]
        return
    told = seen.raised()
    seen_by_user("left in a collective", told)
    assert told.kind is LaunchError
    if launcher.name != "torchrun":
        assert "rank 3 had returned already: in a collective, every rank of the group has to take part" in told.message


def test_who_is_left_where_no_connection_breaks_is_ended(launcher, seen_by_user, monkeypatch):
    """LaunchError says who had returned, and what the others wait in."""
    if launcher.unable("several ranks") or launcher.unable("watch for silence"):
        return
    monkeypatch.setattr("parawrap.launch.watch._launch.STUCK_S", 2.0)  # on nodes it is what it is
    told = launcher.play(scenarios.leave_others_with_a_new_group).raised()
    seen_by_user("left elsewhere", told)
    assert told.kind is LaunchError
    assert "rank(s) 3 have returned, and all others wait in torch.distributed" in told.message
    assert "leave_others_with_a_new_group" in told.message


LIMITS = [
    ("timeout", "limit time", {"timeout_min": 0.1}, "not done after timeout_min=0.1 minutes"),
    ("silence", "watch for silence", {"hang_timeout_s": 3}, "silent for hang_timeout_s=3"),
]


@pytest.mark.parametrize(("situation", "ability", "limit", "text"), LIMITS, ids=[each[0] for each in LIMITS])
def test_time_that_is_up_ends_in_the_stacks_of_every_rank(
    launcher, seen_by_user, tmp_path, situation, ability, limit, text
):
    """LaunchTimeoutError has them, ranks clean up, and nothing runs on; where nobody watches, there is no limit."""
    if reason := launcher.unable("limit time") or launcher.unable(ability):
        assert set(launcher.play(scenarios.take, 1, **limit).given()) == {"taken"}
        seen_by_user(situation, f"nothing: {reason}")
        return
    told = launcher.play(scenarios.wait_for_ever, tmp_path, **limit).raised()
    seen_by_user(situation, told)
    assert told.kind is LaunchTimeoutError
    assert text in told.message
    assert sorted(told.attributes["stacks"]) == [0, 1, 2, 3]
    assert all("wait_for_ever" in stack for stack in told.attributes["stacks"].values())
    all_said(tmp_path, "cleaned", 4)
    none_alive(tmp_path, 4)


def test_cancel_ends_the_ranks(launcher, seen_by_user, tmp_path):
    """They clean up, nothing runs on, results() raises, and before that stacks() tells what each does."""
    if launcher.name == "inline":
        seen_by_user("cancel", f"nothing to cancel: {launcher.unable('cancel')}")
        return
    stacks = {}

    def cancel(launch):
        all_said(tmp_path, "begun", 4)
        if not launcher.unable("tell of running ranks"):
            assert (launch.state, launch.done()) == ("running", False)
            stacks.update(launch.stacks())
        launch.cancel()

    seen = launcher.play(scenarios.wait_for_ever, tmp_path, do=cancel)
    none_alive(tmp_path, 4)
    if launcher.name == "torchrun":
        assert seen.ended
        seen_by_user(
            "cancel", f"nothing to cancel: {launcher.unable('cancel')}. SIGTERM to torchrun ends all ranks at once"
        )
        return
    seen_by_user("cancel", seen.raised())
    assert (seen.raised().kind, seen.state) == (LaunchCancelledError, "cancelled")
    all_said(tmp_path, "cleaned", 4)
    assert sorted(stacks) == [0, 1, 2, 3]
    assert all("wait_for_ever" in stack for stack in stacks.values())


def test_a_group_that_fails_is_started_anew(launcher):
    """With max_restarts=1 the second start returns; where somebody else starts ranks, the failure is told."""
    seen = launcher.play(scenarios.restart_after, scenarios.raise_key_error, max_restarts=1)
    if launcher.unable("restart"):
        assert seen.raised().kind is KeyError
        return
    assert list(seen.given()) == [1] * 4


def test_when_no_restart_is_left_the_failure_is_told(launcher, seen_by_user):
    """With what the starts before came to as notes."""
    told = launcher.play(scenarios.fail_while_others_wait, scenarios.raise_key_error, max_restarts=1).raised()
    seen_by_user("restarts", told)
    assert told.kind is KeyError
    if not launcher.unable("restart"):
        assert "attempt 0 failed: rank 3 raised KeyError: ('weight', 7)" in told.notes


def test_upon_finish_is_not_called_after_a_failure(launcher, tmp_path):
    """Nor are there results."""
    seen = launcher.play(scenarios.raise_key_error, ipc_groups=None, upon_finish=(tmp_path / "finished").touch)
    assert seen.raised().kind is KeyError
    assert seen.state in ("failed", "")
    assert not (tmp_path / "finished").exists()

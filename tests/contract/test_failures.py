"""Contract tests of failures: the error that the caller sees, and that no process survives."""

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
from tests.contract.harness import assert_no_survivors, wait_for_reports

pytestmark = pytest.mark.contract


def notes_name_last_rank(launcher, error):
    """True if the notes name rank, node, and host of the last rank. Inline errors have no notes."""
    if launcher.name == "inline":
        return not error.notes
    last = launcher.world_size - 1
    host = "node1" if launcher.name == "slurm" else os.uname().nodename
    return (
        f"raised in rank {last} of 4 (node {launcher.n_nodes - 1}, {host}), with this traceback:\n" in error.notes
        and "Traceback (most recent call last)" in error.notes
        and "scenarios.py" in error.notes
    )


@pytest.mark.parametrize(
    ("situation", "failure", "kind"),
    [("raised", scenarios.raise_key_error, KeyError), ("odd", scenarios.raise_odd_error, scenarios.OddError)],
)
def test_an_exception_arrives_while_others_are_blocked(launcher, note_for_page, situation, failure, kind):
    """The exception keeps its type, arguments, and attributes; its notes name the rank, its node, and the source file."""
    error = launcher.play(scenarios.fail_while_others_wait, failure).expect_error()
    note_for_page(situation, error)
    assert error.kind is kind
    if kind is KeyError:
        assert error.args == ("weight", 7)
    else:
        assert (error.message, error.attributes) == ("code 5", {"code": 5, "detail": "why"})
    assert notes_name_last_rank(launcher, error), error


def test_the_earliest_failure_is_raised(launcher, tmp_path):
    """If all ranks fail, the launch raises the earliest failure; under torchrun, it may raise any of them."""
    error = launcher.play(scenarios.fail_in_every_rank, scenarios.raise_key_error, tmp_path, ipc_groups=None).expect_error()
    assert error.kind is KeyError
    if launcher.name == "torchrun":
        assert "raised in rank" in error.notes
        return
    assert notes_name_last_rank(launcher, error), error


DEATHS = [
    ("os._exit", scenarios.exit_at_once, None, 7, "exited with code 7 and returned nothing"),
    ("killed", scenarios.kill_itself, signal.SIGKILL, None, "was killed by SIGKILL"),
    ("crash", scenarios.crash, signal.SIGSEGV, None, "was killed by SIGSEGV"),
]


@pytest.mark.parametrize(("situation", "failure", "number", "code", "text"), DEATHS, ids=[each[0] for each in DEATHS])
def test_a_dead_rank_raises_rank_died_error(launcher, note_for_page, situation, failure, number, code, text):
    """RankDiedError has the rank, signal, and exit code. Under torchrun and inline, the death ends the caller too."""
    if launcher.unable("survive a death"):
        options = {"dies": True} if launcher.name == "inline" else {}
        observation = launcher.play(scenarios.fail_while_others_wait, failure, **options)
        how = f"signal {number.name}" if number else f"exit code {code}"
        if launcher.name == "inline":
            assert observation.exit_code == (-number if number else code)
            note_for_page(situation, f"the process ends with {how}")
        else:
            assert observation.exit_code == 1
            assert f"exitcode  : {-number if number else code}" in observation.output
            note_for_page(situation, f"torchrun ends all ranks and reports {how}")
        return
    error = launcher.play(scenarios.fail_while_others_wait, failure).expect_error()
    note_for_page(situation, error)
    assert error.kind is RankDiedError
    assert error.attributes == {"rank": 3, "signal": number, "exit_code": code}
    assert f"rank 3 of 4 {text} (node {launcher.n_nodes - 1}, " in error.message


def test_sys_exit_in_a_rank_raises(launcher, note_for_page):
    """RankDiedError says that the rank returned nothing; inline, SystemExit passes through."""
    error = launcher.play(scenarios.fail_while_others_wait, scenarios.exit_3).expect_error()
    note_for_page("sys.exit", error)
    if launcher.name == "inline":
        assert (error.kind, error.args) == (SystemExit, (3,))
        return
    assert error.kind is RankDiedError
    assert (error.attributes["rank"], error.attributes["exit_code"]) == (3, 3)
    assert "rank 3 of 4 called sys.exit(3) and returned nothing" in error.message


def test_an_argument_that_cannot_be_sent_is_named_by_its_address(launcher, note_for_page):
    """UnsendableError has the address within the arguments. Launchers that send no arguments accept any."""
    if launcher.unable("send") or launcher.unable("send arguments"):
        results = launcher.play(lambda: scenarios.take([1, threading.Lock()])).expect_results()
        note_for_page("argument", "no error: arguments are not sent")
        assert set(results) == {"taken"}
        return
    error = launcher.play(scenarios.take, {"schedule": [1, threading.Lock()]}).expect_error()
    note_for_page("argument", error)
    assert error.kind is UnsendableError
    assert error.message.startswith("args[0]['schedule'][1] cannot be sent to another process: lock")


def test_a_result_that_cannot_be_sent_is_named_by_its_address(launcher, note_for_page):
    """UnsendableError has the address within the result, and its notes name the rank. Inline accepts any result."""
    if launcher.unable("send"):
        observation = launcher.play(scenarios.return_lock)
        note_for_page("result", "no error: results are not sent")
        assert list(observation.expect_results()[0]) == ["locks"]
        return
    error = launcher.play(scenarios.return_lock).expect_error()
    note_for_page("result", error)
    assert error.kind is UnsendableError
    assert error.message.startswith("the result['locks'][1] cannot be sent to another process: lock"), error.message
    assert "rank 3 of 4" in error.notes


def test_a_launch_within_a_rank_raises(launcher, note_for_page):
    """A rank that starts another launch gets LaunchError."""
    error = launcher.play(scenarios.fail_while_others_wait, scenarios.launch_from_rank).expect_error()
    note_for_page("nested", error)
    assert error.kind is LaunchError
    assert "a rank cannot launch ranks" in error.message


def test_ranks_left_in_a_collective_raise(launcher, note_for_page):
    """After a rank returns, the others' connections break, and LaunchError names the returned rank."""
    limit = {"timeout_min": 0.2} if launcher.name == "torchrun" else {}  # ends the test if no connection breaks
    observation = launcher.play(scenarios.leave_others_in_a_collective, **limit)
    if launcher.unable("several ranks"):
        assert list(observation.expect_results()) == [None]
        return
    error = observation.expect_error()
    note_for_page("left in a collective", error)
    assert error.kind is LaunchError
    if launcher.name != "torchrun":
        assert "rank 3 had returned already: in a collective, every rank of the group has to take part" in error.message


def test_ranks_left_without_a_broken_connection_are_ended(launcher, note_for_page, monkeypatch):
    """LaunchError names the ranks that returned, and says that the others wait in torch.distributed."""
    if launcher.unable("several ranks") or launcher.unable("watch for silence"):
        return
    # On Slurm and Ray the nodes keep the default.
    monkeypatch.setattr("parawrap.launch.coordinator._standstill.STUCK_S", 2.0)
    error = launcher.play(scenarios.leave_others_with_a_new_group).expect_error()
    note_for_page("left elsewhere", error)
    assert error.kind is LaunchError
    assert "rank(s) 3 have returned, and all others wait in torch.distributed" in error.message
    assert "leave_others_with_a_new_group" in error.message


LIMITS = [
    ("timeout", "limit time", "timeout_min", 0.1, "not done after timeout_min={:g} minutes"),
    ("silence", "watch for silence", "hang_timeout_s", 3, "silent for hang_timeout_s={:g}"),
]


@pytest.mark.parametrize(
    ("situation", "ability", "option", "limit", "text"), LIMITS, ids=[situation for situation, *_ in LIMITS]
)
def test_a_time_limit_raises_with_the_stacks_of_every_rank(
    launcher, note_for_page, tmp_path, situation, ability, option, limit, text
):
    """LaunchTimeoutError has every stack, ranks clean up, and no process survives. Unwatched ranks have no limit."""
    if reason := launcher.unable("limit time") or launcher.unable(ability):
        assert set(launcher.play(scenarios.take, 1, **{option: limit}).expect_results()) == {"taken"}
        note_for_page(situation, f"no error: {reason}")
        return
    error, limit, folder = end_by_limit(launcher, tmp_path, option, limit)
    note_for_page(situation, error)
    assert error.kind is LaunchTimeoutError
    assert text.format(limit) in error.message
    assert sorted(error.attributes["stacks"]) == [0, 1, 2, 3]
    assert all("wait_for_ever" in stack for stack in error.attributes["stacks"].values())
    wait_for_reports(folder, "cleaned", 4)
    assert_no_survivors(folder, 4)


def end_by_limit(launcher, folder, option, limit):
    """Let a limit end ranks that wait. If it ended them while they started, on a busy machine, take a longer limit."""
    for value in (limit, 10 * limit):
        attempt = folder / f"{value:g}"
        attempt.mkdir()
        error = launcher.play(scenarios.wait_for_ever, attempt, **{option: value}).expect_error()
        if len(list(attempt.glob("begun-*"))) == 4:
            break
    return error, value, attempt


def test_cancel_ends_the_ranks(launcher, note_for_page, tmp_path):
    """Ranks clean up, no process survives, and results() raises; before the cancel, stacks() shows every rank."""
    if launcher.name == "inline":
        note_for_page("cancel", f"nothing to cancel: {launcher.unable('cancel')}")
        return
    stacks = {}

    def cancel(launch):
        wait_for_reports(tmp_path, "begun", 4)
        if not launcher.unable("inspect running ranks"):
            assert (launch.state, launch.done()) == ("running", False)
            stacks.update(launch.stacks())
        launch.cancel()

    observation = launcher.play(scenarios.wait_for_ever, tmp_path, do=cancel)
    assert_no_survivors(tmp_path, 4)
    if launcher.name == "torchrun":
        assert observation.exit_code
        note_for_page(
            "cancel", f"nothing to cancel: {launcher.unable('cancel')}. SIGTERM to torchrun ends all ranks at once"
        )
        return
    note_for_page("cancel", observation.expect_error())
    assert (observation.expect_error().kind, observation.state) == (LaunchCancelledError, "cancelled")
    wait_for_reports(tmp_path, "cleaned", 4)
    assert sorted(stacks) == [0, 1, 2, 3]
    assert all("wait_for_ever" in stack for stack in stacks.values())


def test_a_failed_launch_restarts(launcher):
    """With max_restarts=1, the second start returns. Launchers that cannot restart raise the failure."""
    observation = launcher.play(scenarios.fail_in_first_start, scenarios.raise_key_error, max_restarts=1)
    if launcher.unable("restart"):
        assert observation.expect_error().kind is KeyError
        return
    assert list(observation.expect_results()) == [1] * 4


def test_the_last_failure_raises_after_all_restarts(launcher, note_for_page):
    """The notes of the error list the failures of earlier starts."""
    error = launcher.play(scenarios.fail_while_others_wait, scenarios.raise_key_error, max_restarts=1).expect_error()
    note_for_page("restarts", error)
    assert error.kind is KeyError
    if not launcher.unable("restart"):
        assert "attempt 0 failed: rank 3 raised KeyError: ('weight', 7)" in error.notes


def test_upon_finish_is_not_called_after_a_failure(launcher, tmp_path):
    """A failed launch does not call `upon_finish`."""
    observation = launcher.play(scenarios.raise_key_error, ipc_groups=None, upon_finish=(tmp_path / "finished").touch)
    assert observation.expect_error().kind is KeyError
    assert observation.state in ("failed", "")
    assert not (tmp_path / "finished").exists()

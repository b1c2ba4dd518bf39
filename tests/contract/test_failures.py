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
from tests.contract.table import check_cell
from tests.helpers.launches import assert_no_survivors, wait_for_reports

pytestmark = pytest.mark.contract

UNWATCHED = ("torchrun", "inline")
NOT_SUPERVISED = ("slurm", *UNWATCHED)


def test_an_exception_arrives(launcher, observed):
    """An exception arrives while other ranks wait, with its attributes, its rank, and its
    traceback, after as many failures as allowed.
    """
    found = observed["raised"]
    check_cell("raised", launcher.name, found.behavior)
    assert found.kind is scenarios.OddError
    assert (found.message, found.attributes) == ("code 5", {"code": 5, "detail": "why"})
    if launcher.name == "inline":
        assert found.notes == ""
        return
    host = "node1" if launcher.name == "slurm" else os.uname().nodename
    assert f"raised in rank 1 of 2 (node {launcher.n_nodes - 1}, {host})" in found.notes
    if launcher.name == "torchrun":  # each rank raises its own exception, with its own traceback
        return
    assert "Traceback (most recent call last)" in found.notes
    assert "scenarios.py" in found.notes
    if launcher.name not in UNWATCHED:  # they do not restart after a failure
        assert found.state == "failed"
        assert (
            "attempt 0 failed: rank 1 raised tests.contract.scenarios.OddError: code 5"
            in found.notes
        )


@pytest.mark.parametrize(
    ("situation", "number", "code", "text"),
    [
        ("sys.exit", None, 3, "called sys.exit(3) and returned nothing"),
        ("os._exit", None, 7, "exited with code 7 and returned nothing"),
        ("killed", signal.SIGKILL, None, "was killed by SIGKILL"),
    ],
)
def test_a_dead_rank_raises(launcher, observed, situation, number, code, text):
    """RankDiedError has the rank, signal, and exit code.

    Under torchrun and inline, a death ends the caller too.
    """
    found = observed[situation]
    how = f"signal {number.name}" if number else f"exit code {code}"
    if launcher.name == "inline" and situation == "sys.exit":
        check_cell(situation, launcher.name, found.behavior)
        assert (found.kind, found.message) == (SystemExit, "3")
    elif launcher.name == "inline":
        check_cell(situation, launcher.name, f"the process ends with {how}")
        assert found.exit_code == (-number if number else code)
    elif launcher.name == "torchrun" and situation != "sys.exit":
        check_cell(situation, launcher.name, f"torchrun ends all ranks and reports {how}")
        assert found.exit_code == 1
        assert f"exitcode  : {-number if number else code}" in found.output
    else:
        check_cell(situation, launcher.name, found.behavior)
        assert found.kind is RankDiedError
        assert found.attributes == {"rank": 1, "signal": number, "exit_code": code}
        assert f"rank 1 of 2 {text} (node {launcher.n_nodes - 1}, " in found.message


def test_an_unsendable_result_is_named(launcher, observed):
    """UnsendableError has the address within the result, and its notes name the rank.

    Inline accepts any result.
    """
    found = observed["result"]
    if launcher.name == "inline":
        assert list(found.expect_results()[0]) == ["locks"]
        return
    check_cell("result", launcher.name, found.behavior)
    assert found.kind is UnsendableError
    assert "rank 1 of 2" in found.notes


def test_bad_input_raises_before_any_rank(launcher, tmp_path):
    """Arguments that cannot be sent, and folders that cannot be written; unless the launcher sends
    and keeps nothing.
    """
    (tmp_path / "file").touch()
    logs = {"console_logs": tmp_path / "file" / "logs"}
    if launcher.name in UNWATCHED:
        # Also limits: these launchers do not watch the function.
        options = {"timeout_min": 0.1, "hang_timeout_s": 3, **logs}
        assert set(
            launcher.play(lambda: scenarios.take(threading.Lock()), **options).expect_results()
        ) == {"taken"}
        return
    found = launcher.play(scenarios.take, {"schedule": [1, threading.Lock()]})
    check_cell("argument", launcher.name, found.behavior)
    assert found.kind is UnsendableError
    found = launcher.play(scenarios.take, 1, **logs)
    check_cell("log folder", launcher.name, found.behavior)
    assert found.kind is LaunchError
    assert f"console_logs='{tmp_path}/file/logs' cannot be written to" in found.message


def test_ranks_left_in_a_collective(launcher, observed):
    """LaunchError names the returned rank, whether connections break or not."""
    if launcher.name == "inline":
        return
    found = observed["left in a collective"]
    check_cell("left in a collective", launcher.name, found.behavior)
    assert found.kind is LaunchError
    if launcher.name in NOT_SUPERVISED:
        return
    found = observed["left elsewhere"]
    check_cell("left elsewhere", launcher.name, found.behavior)
    assert found.kind is LaunchError


@pytest.mark.parametrize("situation", ["timeout", "silence"])
def test_a_time_limit_ends_the_ranks(launcher, observed, situation):
    """LaunchTimeoutError has every stack, ranks clean up, and no process survives."""
    if launcher.name in UNWATCHED or (launcher.name, situation) == ("slurm", "silence"):
        return
    found = observed[situation]
    check_cell(situation, launcher.name, found.behavior)
    assert found.kind is LaunchTimeoutError
    assert sorted(found.attributes["stacks"]) == [0, 1]
    assert all("wait_for_ever" in stack for stack in found.attributes["stacks"].values())
    wait_for_reports(observed.folder / situation, "cleaned", 2)
    assert_no_survivors(observed.folder / situation, 2)


def test_cancel_ends_the_ranks(launcher, observed):
    """Ranks clean up, no process survives, and results() raises.

    Before, stacks() shows every rank.
    """
    if launcher.name == "inline":
        return
    found, folder = observed["cancel"], observed.folder / "cancel"
    assert_no_survivors(folder, 2)
    if launcher.name == "torchrun":
        assert found.exit_code
        return
    check_cell("cancel", launcher.name, found.behavior)
    assert (found.kind, found.state) == (LaunchCancelledError, "cancelled")
    wait_for_reports(folder, "cleaned", 2)
    assert observed.stacks.pop("running") == ("running", False)
    assert sorted(observed.stacks) == [0, 1]
    assert all("wait_for_ever" in stack for stack in observed.stacks.values())

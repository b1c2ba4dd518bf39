"""Failed launches raise the right error, and end every rank."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchTimeoutError, RankDiedError, current_rank, wrapper
from tests.helpers.processes import SILENT_S, assert_gone, failure_of, notes_of, pids_in, ranks, report_pid_function
from tests.helpers.waiting import eventually

WAITS = {
    "recv": lambda: dist.recv(torch.ones(3), src=1 - dist.get_rank()),
    "lock": lambda: threading.Semaphore(0).acquire(),
    "child": lambda: subprocess.run(["sleep", "600"], check=True),
    "compute": lambda: [None for _ in iter(int, 1)],
    "hold_gil": lambda: ctypes.PyDLL(None).sleep(600),
}


# -- exceptions


@pytest.mark.parametrize("how", ["recv", "lock", "child", "compute"])
def test_an_error_ends_blocked_ranks(how, tmp_path):
    """They can clean up. The exception keeps its type, and its notes have place and traceback."""
    wait, failing = WAITS[how], int(how != "lock")

    def fails(begun, cleaned):
        if current_rank().global_rank == failing:
            eventually(begun.exists, "the wait of the other rank")
            raise KeyError("weight", 7)  # the user's line
        try:
            begun.touch()
            wait()
        finally:
            cleaned.touch()

    error, _ = failure_of(fails, tmp_path / "begun", tmp_path / "cleaned")
    assert (type(error), error.args) == (KeyError, ("weight", 7))
    note = error.__notes__[0]
    assert f"raised in rank {failing} of 2 (node 0, {os.uname().nodename})" in note
    assert "Traceback (most recent call last)" in note
    assert 'raise KeyError("weight", 7)  # the user\'s line' in note
    assert "parawrap/launch" not in note
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("how", ["deaf", "hold_gil", "stopped"])
def test_stubborn_rank_is_killed(how, tmp_path):
    """A rank that catches every exception, ignores signals, holds the GIL, or is stopped has ``grace_s`` to end."""
    report_pid, hold = report_pid_function(), WAITS["hold_gil"]

    def ignores(folder):
        if current_rank().global_rank == 1:
            eventually(lambda: list(folder.glob("*.pid")), "the other rank")
            raise ValueError
        if how == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report_pid(folder)
        while True:
            try:
                if how == "hold_gil":
                    hold()
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
            except BaseException:
                continue

    error, _ = failure_of(ignores, tmp_path, platform=ranks(grace_s=0.5))
    assert type(error) is ValueError
    assert_gone(pids_in(tmp_path, 1))


# -- deaths


def crash():
    print("before the crash", flush=True)
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("die", "number", "code", "texts"),
    [
        (crash, signal.SIGSEGV, None, ["before the crash", "Fatal Python error: Segmentation fault", "in crash"]),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), signal.SIGTERM, None, ["was killed by SIGTERM"]),
        (lambda: sys.exit("out of patience"), None, 1, ["called sys.exit(1)", "out of patience"]),
    ],
    ids=["SIGSEGV", "SIGTERM", "sys.exit"],
)
def test_dead_rank_is_named(die, number, code, texts):
    """The error has rank, signal, exit code, last output, and the Python stack of a crash in C."""

    def dies():
        if current_rank().global_rank == 1:
            die()
        dist.all_reduce(torch.ones(3))

    error, _ = failure_of(dies)
    assert type(error) is RankDiedError
    assert (error.rank, error.signal, error.exit_code) == (1, number, code)
    message = f"{error}\n{notes_of(error)}"
    assert [text for text in ["rank 1 of 2", *texts] if text not in message] == []


def test_no_rank_outlives_its_thread():
    """An error of a rank's control thread ends the rank and is shown. Nothing could end the rank otherwise."""

    def spoil():
        sys._current_frames = None
        threading.Event().wait()

    with pytest.raises(RankDiedError, match="is not callable"):
        wrapper(ranks(1))(spoil)()


# -- time limits


def test_a_time_limit_without_stacks():
    """LaunchTimeoutError names the limit, and has "no answer" for a rank that holds the GIL."""
    for limit_s in (SILENT_S, 20 * SILENT_S):  # on a busy machine, ranks may reach the first one while they start
        error, _ = failure_of(WAITS["hold_gil"], platform=ranks(grace_s=0.5, hang_timeout_s=limit_s))
        assert type(error) is LaunchTimeoutError
        if all("no answer" in stack for stack in error.stacks.values()):
            break
    assert "hang_timeout_s" in str(error)
    assert sorted(error.stacks) == [0, 1]
    for rank, stack in error.stacks.items():
        assert "no answer" in stack
        assert f"rank {rank}:\n{stack}" in str(error)


def test_active_rank_is_not_silent():
    """`hang_timeout_s` ends no rank that loops or computes. Its error has stacks of running ranks only."""

    def stay_active():
        end = time.monotonic() + 2 * SILENT_S
        while time.monotonic() < end:
            if current_rank().global_rank == 1:
                time.sleep(0.05)
        if current_rank().global_rank == 0:
            time.sleep(600)

    error, _ = failure_of(stay_active, platform=ranks(hang_timeout_s=SILENT_S, grace_s=1))
    assert type(error) is LaunchTimeoutError
    assert sorted(error.stacks) == [0]
    assert "these ranks had ended before the time limit: 1" in notes_of(error)


# -- values that cannot be read


class Unreadable:
    """A value that cannot be unpickled."""

    def __reduce__(self):
        return int, ("no number",)


def test_unreadable_values_are_named():
    """No rank runs with an argument that cannot be unpickled. The rank of such a result is named."""
    with pytest.raises(ValueError, match="no number") as caught:
        wrapper(ranks())(lambda _: os._exit(1))(Unreadable())
    assert "unpickled the function and its arguments" in notes_of(caught.value)
    error, _ = failure_of(lambda: Unreadable() if current_rank().global_rank == 1 else None)
    assert repr(error).startswith("ValueError")
    assert "rank 1 of 2" in notes_of(error)

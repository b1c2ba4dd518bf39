"""Restarts: if a rank fails, all ranks start again, at most `max_restarts` times."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchTimeoutError, Platform, RankDiedError, current_rank, wrapper
from tests.helpers.waiting import PATIENCE_S, eventually


def restarting(**fields):
    """Return a platform of two ranks with `max_restarts=1`."""
    return Platform(**{"device": "cpu", "n_cpus": 2, "max_restarts": 1} | fields)


@pytest.mark.parametrize(
    ("spawn_method", "count"), [("fork", 2), ("forkserver", 2), ("spawn", 1)]
)  # spawn: each rank is a slow new interpreter
def test_a_launch_that_fails_once_restarts_and_returns(spawn_method, count):
    """The second attempt has new process groups, and its ranks read `restart == 1`."""

    @wrapper(restarting(n_cpus=count, spawn_method=spawn_method))
    def train():
        value = torch.ones(1)
        dist.all_reduce(value)
        if current_rank().restart == 0 and current_rank().global_rank == count - 1:
            raise ValueError
        dist.all_reduce(value)
        return current_rank().restart, value.item()

    assert train() == ((1, float(count**2)),) * count


def test_a_killed_rank_raises_after_the_last_restart():
    """RankDiedError has the signal of the last attempt and a note about each earlier attempt."""

    @wrapper(restarting())
    def train():
        dist.all_reduce(torch.ones(1))
        if current_rank().global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed by SIGKILL") as caught:
        train()
    assert caught.value.signal is signal.SIGKILL
    assert any("attempt 0 failed: rank 1" in note for note in caught.value.__notes__)


def test_logs_have_the_output_of_all_attempts(tmp_path):
    """`launch.logs` and log files keep the output of earlier attempts."""

    @wrapper(restarting(console_logs=tmp_path / "logs", verbose=False))
    def train():
        print(f"attempt {current_rank().restart}", flush=True)
        dist.barrier()  # a failing rank ends the others, so wait until they have written
        if current_rank().restart == 0:
            raise ValueError

    launch = train.submit()
    launch.results()
    assert "attempt 0\n" in launch.logs(1)
    assert "attempt 1\n" in launch.logs(1)
    assert (launch.log_folder / "rank-1.log").read_text() == launch.logs(1)


def test_cancel_of_a_restarting_launch_leaves_nothing_behind(tmp_path, monkeypatch):
    """When `cancel` returns, the ranks have ended and their temporary folder is removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    begun = tmp_path / "begun"

    @wrapper(restarting())
    def train():
        Path(begun).touch()
        threading.Event().wait()

    before = set(psutil.Process().children(recursive=True))
    launch = train.submit()
    waiting = threading.Event()
    while not begun.exists():
        assert not launch.done()
        waiting.wait(0.02)
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results()
    assert launch.state == "cancelled"
    assert set(psutil.Process().children(recursive=True)) <= before
    assert [path.name for path in tmp_path.iterdir()] == ["begun"]


def test_cancel_between_two_attempts_prevents_the_restart(tmp_path):
    """A cancel while ranks of a failed attempt clean up waits for these ranks and prevents the next attempt."""

    @wrapper(restarting(verbose=False, grace_s=PATIENCE_S))
    def train():
        rank = current_rank()
        Path(tmp_path, f"begun-{rank.restart}-{rank.global_rank}").touch()
        if rank.global_rank == 0:
            while not Path(tmp_path, "begun-0-1").exists():
                time.sleep(0.01)
            raise ValueError
        try:
            threading.Event().wait()
        finally:
            Path(tmp_path, "cleaning").touch()
            while not Path(tmp_path, "cancelled").exists():
                time.sleep(0.01)

    launch: Any = train.submit()
    eventually((tmp_path / "cleaning").exists, "the clean-up of rank 1")
    launch.request_cancel()  # unlike `cancel`, does not wait for the ranks
    (tmp_path / "cancelled").touch()
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results(timeout=PATIENCE_S)
    assert launch.state == "cancelled"
    assert not (tmp_path / "begun-1-0").exists()


def test_the_last_failure_has_a_note_per_earlier_attempt():
    """The notes list the failures of earlier attempts in order."""

    @wrapper(restarting(max_restarts=2, verbose=False))
    def train():
        if current_rank().global_rank == 1:
            raise ValueError(current_rank().restart)
        dist.barrier()

    with pytest.raises(ValueError, match="2") as caught:
        train()
    assert [note for note in caught.value.__notes__ if note.startswith("attempt")] == [
        "attempt 0 failed: rank 1 raised ValueError: 0",
        "attempt 1 failed: rank 1 raised ValueError: 1",
    ]


def test_the_time_limit_spans_all_attempts():
    """`timeout_min` also ends a launch that would fail and restart forever."""

    @wrapper(restarting(max_restarts=10**6, timeout_min=1 / 60, ipc_groups=None, verbose=False))
    def train():
        raise ValueError

    with pytest.raises(LaunchTimeoutError, match="timeout_min"):
        train()

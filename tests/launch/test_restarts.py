"""Restarts: the whole group is started anew when a rank fails, as often as the platform allows."""

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
from tests.launch.processes import PATIENCE_S, eventually


def restarting(**fields):
    """A platform of two ranks that are started anew once."""
    return Platform(**{"device": "cpu", "n_cpus": 2, "max_restarts": 1} | fields)


@pytest.mark.parametrize(("spawn_method", "count"), [("fork", 2), ("forkserver", 2), ("spawn", 1)])  # an interpreter each
def test_a_group_that_fails_once_is_started_anew_and_returns(spawn_method, count):
    """The second attempt has fresh process groups, and its rank says that it is a restart."""

    @wrapper(restarting(n_cpus=count, spawn_method=spawn_method))
    def train():
        value = torch.ones(1)
        dist.all_reduce(value)
        if current_rank().restart == 0 and current_rank().global_rank == count - 1:
            raise ValueError
        dist.all_reduce(value)
        return current_rank().restart, value.item()

    assert train() == ((1, float(count**2)),) * count


def test_a_killed_rank_is_told_by_its_signal_when_no_restart_is_left():
    """After the last attempt comes the error, with how the attempts before it ended as notes."""

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


def test_what_all_attempts_wrote_is_in_the_logs(tmp_path):
    """Logs, shown and in files, go on over restarts."""

    @wrapper(restarting(console_logs=tmp_path / "logs", verbose=False))
    def train():
        print(f"attempt {current_rank().restart}", flush=True)
        dist.barrier()  # a rank that fails ends the others, also before they have written
        if current_rank().restart == 0:
            raise ValueError

    launch = train.submit()
    launch.results()
    assert "attempt 0\n" in launch.logs(1)
    assert "attempt 1\n" in launch.logs(1)
    assert (launch.log_folder / "rank-1.log").read_text() == launch.logs(1)


def test_a_cancelled_launch_that_would_restart_leaves_nothing_behind(tmp_path, monkeypatch):
    """Ranks are gone when cancel returns, and so is the folder they met in."""
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


def test_a_launch_that_is_cancelled_between_two_attempts_starts_none_anew(tmp_path):
    """While ranks of a failed attempt are still cleaning up, cancel waits for them, and that is the end."""

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
    eventually((tmp_path / "cleaning").exists, "the end of the rank that is not at fault")
    launch._request_cancel()  # which does not wait for the ranks, as `cancel` does
    (tmp_path / "cancelled").touch()
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results(timeout=PATIENCE_S)
    assert launch.state == "cancelled"
    assert not (tmp_path / "begun-1-0").exists()


def test_how_earlier_attempts_ended_is_told_with_the_last_failure():
    """One note an attempt, in their order."""

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
    """A group that would fail and be started anew for ever is ended when the time is up."""

    @wrapper(restarting(max_restarts=10**6, timeout_min=1 / 60, ipc_groups=None, verbose=False))
    def train():
        raise ValueError

    with pytest.raises(LaunchTimeoutError, match="timeout_min"):
        train()

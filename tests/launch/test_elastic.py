"""Restarts: the whole group is started anew by torch.distributed.elastic, as often as the platform allows."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchCancelledError, Platform, PlatformError, RankDiedError, current_rank, wrapper


def elastic(**fields):
    return Platform(device="cpu", n_cpus=2, **{"max_restarts": 1, **fields})


def test_a_group_that_fails_once_is_started_anew_and_returns():
    """The second attempt has fresh process groups, and its rank says that it is a restart."""

    @wrapper(elastic())
    def train():
        value = torch.ones(1)
        dist.all_reduce(value)
        if current_rank().restart == 0 and current_rank().global_rank == 1:
            raise ValueError
        dist.all_reduce(value)
        return current_rank().restart, value.item()

    assert train() == ((1, 4.0), (1, 4.0))


def test_a_killed_rank_is_told_by_its_signal_when_no_restart_is_left():
    """After the last attempt comes the error, with how the attempts before it ended as notes."""

    @wrapper(elastic())
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

    @wrapper(elastic(console_logs=tmp_path / "logs", verbose=False))
    def train():
        print(f"attempt {current_rank().restart}", flush=True)
        dist.barrier()  # a rank that fails ends the others, also before they have written
        if current_rank().restart == 0:
            raise ValueError

    launch = train.submit()
    launch.results()
    assert "attempt 0\n" in launch.logs(1)
    assert "attempt 1\n" in launch.logs(1)
    assert (tmp_path / "logs" / "rank-1.log").read_text() == launch.logs(1)


def test_a_cancelled_elastic_launch_leaves_nothing_behind(tmp_path, monkeypatch):
    """Agent and ranks are gone when cancel returns, and so is the folder they met in."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    begun = tmp_path / "begun"

    @wrapper(elastic())
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


def test_restarts_from_a_fork_of_this_process_are_refused():
    """The agent starts fresh interpreters: a platform that asks for forks is told so."""
    with pytest.raises(PlatformError, match="spawn_method='fork'"):
        elastic(spawn_method="fork")

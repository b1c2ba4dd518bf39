"""Attempts of a launch: restarts after failures, and their limits."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest
import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchTimeoutError, current_rank, wrapper
from parawrap.launch import Job, Launch
from parawrap.launch.attempts import Attempts, requests_restart, summary_of_attempt
from parawrap.launch.machines import Machines
from parawrap.processes.outcomes import Ended, Ending, Raised
from tests.helpers.launches import wait_for_reports
from tests.helpers.processes import failure_of, notes_of, ranks
from tests.helpers.waiting import PATIENCE_S


def test_restarts_up_to_max_restarts(caplog):
    """All ranks start again, with a line in the log.

    The last failure is raised, with a note for each earlier attempt.
    """

    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.global_rank == 0:
            os.kill(os.getpid(), signal.SIGSEGV)
        if rank.global_rank == 1:
            raise ValueError(rank.restart)
        time.sleep(600)

    error = failure_of(train, platform=ranks(max_restarts=2, grace_s=1))
    assert repr(error) == "ValueError(2)"
    notes = [note for note in notes_of(error).splitlines() if note.startswith("attempt")]
    assert len(notes) == 2
    assert notes[1] == "attempt 1 failed: rank 1 raised ValueError: 1"
    lines = [each.getMessage() for each in caplog.records if "start again" in each.getMessage()]
    assert [line.rpartition("(")[2] for line in lines] == ["restart 1)", "restart 2)"]


def test_a_cancel_prevents_a_restart(tmp_path):
    """A cancel prevents a restart if it arrives while the ranks of a failed attempt clean up."""

    def train():
        if current_rank().global_rank == 1:
            dist.barrier()
            raise ValueError
        try:
            dist.barrier()
            time.sleep(600)
        finally:
            from tests.contract.scenarios import report

            report(tmp_path, f"cleans-{current_rank().restart}")
            time.sleep(1)

    launch = wrapper(ranks(max_restarts=1, grace_s=60))(train).submit()
    wait_for_reports(tmp_path, "cleans-0", 1)
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results(PATIENCE_S)
    assert not (tmp_path / "cleans-1-0").exists()


def test_the_time_limit_of_restarts():
    def train():
        raise ValueError

    error = failure_of(
        train, platform=ranks(max_restarts=10**6, timeout_min=1 / 60, ipc_groups=None)
    )
    assert type(error) is LaunchTimeoutError
    assert "timeout_min" in str(error)


def test_time_in_a_queue_does_not_count(monkeypatch):
    """The time limit counts from the start of the ranks, after the wait for their machines."""

    class Busy(Machines):
        @contextlib.contextmanager
        def open(self, is_cancelled):
            clock = time.monotonic
            monkeypatch.setattr(time, "monotonic", lambda: clock() + 3600)
            with super().open(is_cancelled) as hosts:
                yield hosts

    platform = ranks(timeout_min=10)
    run = Attempts(Job(platform, len, ("word",)), Busy(platform))
    run.start()
    assert Launch(run).results() == (4, 4)


def test_a_late_rank_is_the_cause_of_its_restart():
    """The end of a rank that ignores a preemption breaks its connections: the other rank's error is
    no cause.
    """
    echo = Raised(5.1, "RuntimeError: connection closed by peer", "", is_echo=True, error=b"")
    ending = Ending({0: Ended(5.0), 1: echo})
    assert requests_restart(ending, is_preempted=True)
    summary = summary_of_attempt(ending, is_preempted=True)
    assert summary.startswith("was preempted, and rank 0 did not call requeue()")
    assert not requests_restart(ending, is_preempted=False)
    assert summary_of_attempt(ending, is_preempted=False).startswith("failed: rank 1 raised")

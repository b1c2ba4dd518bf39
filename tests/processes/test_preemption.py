"""Preemption: ranks save at the same step and the next start continues from it;
local and inline.
"""

from __future__ import annotations

import signal
import threading
import time
from itertools import count
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import current_rank, wrapper
from tests.contract.scenarios import report
from tests.helpers.launches import wait_for_reports
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S, eventually


def submit(function, **fields):
    return wrapper(ranks(**{"grace_s": 60} | fields))(function).submit()


def preempt_start(launch):
    """Preempt the ranks once their processes are forked, and before their set-up has ended."""
    while launch.state == "pending":
        time.sleep(0.001)
    launch.preempt()


# -- loops


def test_ranks_behind_catch_up(tmp_path):
    """Ranks behind continue to the step of the foremost rank, even if that rank has already saved
    and exited.
    """

    def train():
        rank = current_rank()
        saved = Path(tmp_path, f"{rank.global_rank}.saved")
        if rank.restart:
            return int(saved.read_text())
        for step in count():
            if rank.should_checkpoint():
                saved.write_text(str(step))
                rank.requeue()
            if step == (7 if rank.global_rank == 0 else 2):
                report(tmp_path, "waits")
                eventually((tmp_path / "go").exists, "go")
            if step == 4 and rank.global_rank == 1:
                eventually((tmp_path / "0.saved").exists, "the save of rank 0")
        raise AssertionError

    launch = submit(train)
    wait_for_reports(tmp_path, "waits", 2)
    launch.preempt()
    eventually(
        lambda: "no answer" not in str(launch.stacks()),
        "an answer of every rank, which proves that it knows",
    )
    (tmp_path / "go").touch()
    assert launch.results(timeout=PATIENCE_S) == (8, 8)


# -- functions that do not requeue, or without a preemption


def test_an_ignored_preemption(tmp_path, caplog):
    """A function without `should_checkpoint` ends after grace_s, with its finally blocks, and
    restarts.
    """

    def train():
        if current_rank().restart:
            return current_rank().restart
        try:
            report(tmp_path, "runs")
            threading.Event().wait()
        finally:
            report(tmp_path, "cleaned")

    launch = submit(train, grace_s=0.5)
    wait_for_reports(tmp_path, "runs", 2)
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (1, 1)
    wait_for_reports(tmp_path, "cleaned", 2)
    late = "was preempted, and ranks 0, 1 did not call requeue() within grace_s: what the function"
    assert late in caplog.text


def test_a_return_after_a_preemption(tmp_path):
    """If a preempted function returns without `requeue`, its results count; more preemptions change
    nothing.
    """

    def train():
        report(tmp_path, "runs")
        while not current_rank().should_checkpoint():
            dist.barrier()
        return current_rank().restart

    launch = submit(train)
    wait_for_reports(tmp_path, "runs", 2)
    launch.preempt()
    launch.preempt()
    assert launch.results(timeout=PATIENCE_S) == (0, 0)
    launch.preempt()
    assert (launch.results(), launch.state) == ((0, 0), "finished")


def test_a_preemption_during_the_start():
    """The function's first `should_checkpoint` returns True.

    A rank can be returned as a result, without its group.
    """

    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.should_checkpoint():
            rank.requeue()
        return rank

    preempt_start(launch := submit(train))
    for number, rank in enumerate(launch.results(timeout=PATIENCE_S)):
        assert (rank.global_rank, rank.restart, rank.group, rank.should_checkpoint()) == (
            number,
            1,
            None,
            False,
        )


# -- inline


def test_a_signal_preempts_inline():
    """SIGUSR2 preempts each start, `requeue` calls the function again in this thread, and an
    exception ends it.
    """
    steps, before = [], signal.getsignal(signal.SIGUSR2)

    def train():
        rank = current_rank()
        if rank.restart == 2:
            raise KeyError(threading.get_ident(), dist.get_world_size())
        for step in count():
            if rank.should_checkpoint():
                rank.requeue()
            steps.append(step)
            if step == 3:
                signal.raise_signal(signal.SIGUSR2)

    with pytest.raises(KeyError) as caught:
        wrapper(ranks(1))(train).inline()
    assert caught.value.args == (threading.get_ident(), 1)
    assert steps == [0, 1, 2, 3] * 2
    assert signal.getsignal(signal.SIGUSR2) is before


def test_inline_in_another_thread():
    """The call is never preempted; `requeue` works."""
    seen = []

    def train():
        rank = current_rank()
        seen.append((rank.restart, rank.should_checkpoint()))
        if rank.restart == 0:
            rank.requeue()

    thread = threading.Thread(target=wrapper(ranks(1))(train).inline)
    thread.start()
    thread.join()
    assert seen == [(0, False), (1, False)]

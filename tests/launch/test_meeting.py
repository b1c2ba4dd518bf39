"""Ranks of a torchrun world agree over its store on when to save, and restart together."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from parawrap import LaunchError, Platform, current_rank, wrapper
from parawrap.launch.meeting import Agreement
from tests.helpers.ranks import all_sum
from tests.helpers.torchrun_world import TorchrunWorld
from tests.helpers.waiting import eventually

CPU = Platform(device="cpu", grace_s=60, timeout_min=2)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two processes of torchrun. Call it with a function that each process shall run; it returns what they return."""
    started = TorchrunWorld(tmp_path_factory.mktemp("world"), 2)

    def call(function):
        started.begin(function)
        return eventually(started.endings, "the end of a call")

    yield call
    started.stop()


def test_a_signal_preempts_all_ranks(world):
    """All ranks save at the same step, though they loop alone. Finally blocks run, and nothing is left behind."""

    def own_handler(*_):
        raise AssertionError

    def call():
        signal.signal(signal.SIGUSR2, own_handler)
        saved = []

        def train():
            rank = current_rank()
            if rank.restart:
                return os.getpid(), rank.restart, saved
            while not rank.should_checkpoint():
                saved[:] = [saved[0] + 1 if saved else 1]
                if rank.global_rank == 1 and saved == [2]:
                    os.kill(os.getpid(), signal.SIGUSR2)
            try:
                rank.requeue()
            finally:
                saved.append("left")

        results = wrapper(CPU)(train)()
        is_restored = signal.getsignal(signal.SIGUSR2) is own_handler
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("parawrap")]
        return os.getpid(), list(results), is_restored, names

    (pid_0, results, *rest), (pid_1, others, *_) = world(call)
    assert results == others
    (_, _, (step, left)), _ = results
    assert step >= 2
    assert results == [(pid_0, 1, [step, left]), (pid_1, 1, [step, "left"])]
    assert rest == [True, []]


def test_a_rank_returns_before_a_signal(world):
    """The other rank saves, and all ranks start again."""

    def call():
        def train():
            rank = current_rank()
            if rank.restart == 0 and rank.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR2)
                while not rank.should_checkpoint():
                    time.sleep(0.01)
                rank.requeue()
            return "again"

        return list(wrapper(CPU)(train)())

    assert world(call) == [["again", "again"]] * 2


def test_one_rank_requeues_or_raises(world):
    """Broken collectives of others are not failures, but an exception is."""

    def call():
        def train(number):
            rank = current_rank()
            if number == rank.global_rank == 1:
                raise ValueError("own")
            if rank.restart == 0 and rank.global_rank == 0:
                rank.requeue()
            return rank.restart, all_sum()

        results = wrapper(CPU)(train)(0)
        try:
            wrapper(CPU)(train)(1)
        except Exception as error:
            return list(results), type(error)

    assert world(call) == [([(1, 2.0)] * 2, kind) for kind in (LaunchError, ValueError)]


def test_a_rank_ends_before_an_answer():
    """No thread waits for the other rank."""
    store = dist.HashStore()
    with Agreement(lambda: store, 0, 2) as agreement:
        agreement.request()
        eventually(lambda: store.check(["answered/0"]), "the answer of rank 0")
    assert not agreement._thread.is_alive()

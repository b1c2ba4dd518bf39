"""Ranks of a torchrun world agree over its store on when to save."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from parawrap import LaunchError, Platform, current_rank, wrapper
from parawrap.launch.worlds._preemption_store import StoreAgreement
from parawrap.launch.worlds._signed_values import SignedStore, Signer
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
    """Broken collectives of others are not failures, but an exception wins, and every process raises it."""

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
        except ValueError as error:
            return list(results), repr(error)

    assert world(call) == [([(1, 2.0)] * 2, "ValueError('own')")] * 2


def test_a_forged_result_is_refused(world):
    """A rank that unpickled it would run code of another user. Each call has its own keys."""

    def call():
        prefixes, errors = [], []

        def forge():
            if current_rank().global_rank == 0:
                address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(*address, is_master=False, wait_for_workers=False)
                (prefix,) = {key.removesuffix("/joined") for key in store.list_keys() if key.endswith("/joined")}
                prefixes.append(prefix)
                store.wait([f"{prefix}/1"])
                store.set(f"{prefix}/1", b"forged")

        for _ in range(2):
            try:
                wrapper(CPU)(forge)()
            except LaunchError as error:
                errors.append(str(error))
        return len({*prefixes}), ["the value of rank 1 in the world's store is not signed" in each for each in errors]

    assert world(call) == [(2, [True, True]), (0, [True, True])]


def test_a_rank_ends_before_an_answer():
    """No thread waits for the other rank."""
    store = SignedStore(dist.HashStore(), "test", Signer(b"secret"))
    with StoreAgreement(lambda: store, 0, 2) as agreement:
        agreement.request()
        eventually(lambda: store.check(["answered/0"]), "the answer of rank 0")
    assert not agreement._thread.is_alive()


def test_a_forged_preemption(caplog):
    """A request that is not signed with the ranks' secret is logged, and no rank saves."""
    store = dist.HashStore()
    store.set("test/requested", "forged")
    with StoreAgreement(lambda: SignedStore(store, "test", Signer(b"secret")), 0, 1) as agreement:
        eventually(lambda: "the ranks cannot agree on when to save" in caplog.text, "the message")
        assert not any(agreement.preemption.is_due() for _ in range(3))

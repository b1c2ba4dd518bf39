"""The script that test_preemption.py runs in each rank of a torchrun world. It records the result of each scenario."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper

CPU = Platform(device="cpu", grace_s=60, timeout_min=1)
SCENARIOS = {}
FOLDER = Path(sys.argv[1])


def scenario(function):
    """Register a scenario. Scenarios run in the order of this file."""
    SCENARIOS[function.__name__] = function
    return function


def main():
    """Run all scenarios and write the result or exception of each."""
    endings = {}
    for name, function in SCENARIOS.items():
        try:
            endings[name] = function()
        except Exception as error:  # the tests check it
            endings[name] = repr(error)
    (FOLDER / f"{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(endings))


def signal_rank(number):
    """Send SIGUSR2 to a rank, as a cluster would."""
    os.kill(int((FOLDER / f"{number}.pid").read_text()), signal.SIGUSR2)


def wait_for(name):
    while not (FOLDER / name).exists():
        time.sleep(0.01)


class TouchesFileWhenPickled:
    """Creates a file when it is pickled, which happens as a rank returns it."""

    def __init__(self, name):
        self.name = name

    def __reduce__(self):
        (FOLDER / self.name).touch()
        return str, (self.name,)


@scenario
def reporting_pids():
    (FOLDER / f"{os.environ['RANK']}.pid").write_text(str(os.getpid()))
    return wrapper(CPU)(dist.barrier)()


@scenario
def a_signal_to_one_rank():
    """Rank 1 gets a signal while both ranks loop without collectives."""
    signal.signal(signal.SIGUSR2, own_handler)
    saved = []

    def train():
        rank = current_rank()
        if rank.restart:
            return os.getpid(), rank.restart, saved
        while not rank.should_checkpoint():
            saved[:] = [saved[0] + 1 if saved else 1]
            if rank.global_rank == 1 and saved == [2]:
                signal_rank(1)
        saved.append(rank.should_checkpoint())
        try:
            rank.requeue()
        finally:
            saved.append("left")

    results = wrapper(CPU)(train)()
    kept = signal.getsignal(signal.SIGUSR2) is own_handler
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    return os.getpid(), results, kept, [thread.name for thread in threading.enumerate()]


def own_handler(*_):
    raise AssertionError


@scenario
def a_rank_that_ends_early():
    """Rank 0 returns early. Rank 1 is preempted alone, and both ranks start again."""

    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.global_rank == 0:
            return TouchesFileWhenPickled("returned")
        if rank.restart == 0:
            wait_for("returned")
            signal_rank(0)  # has returned: the signal must not harm it
            signal_rank(1)
            while not rank.should_checkpoint():
                time.sleep(0.01)
            rank.requeue()
        return "again"

    return list(wrapper(CPU)(train)())


@scenario
def a_failure_during_a_requeue():
    def train():
        rank = current_rank()
        if rank.global_rank == 1:
            raise ValueError("own")
        rank.requeue()

    return wrapper(CPU)(train)()


@scenario
def a_rank_that_requeues_alone():
    """Rank 0 requeues while rank 1 waits for it in a collective."""

    def train():
        rank = current_rank()
        if rank.restart == 0 and rank.global_rank == 0:
            rank.requeue()
        value = torch.ones(1)
        dist.all_reduce(value)
        return rank.restart, value.item()

    return list(wrapper(CPU)(train)())


if __name__ == "__main__":
    main()

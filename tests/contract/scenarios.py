"""Functions that ranks run in the contract suite. Ranks import this module, so it imports little."""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import signal
import socket
import sys
import time
from itertools import count
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREVER_S = 600.0
_held = []


class OddError(Exception):
    """An exception that pickle cannot rebuild: ``__init__`` has a required keyword argument."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def report(folder, topic, text=""):
    """Write a report for the test, in a file of this rank that appears only once it is complete."""
    path = Path(folder, f"{topic}-{current_rank().global_rank}")
    path.with_name(f".{path.name}").write_text(str(text))
    path.with_name(f".{path.name}").rename(path)


def hold_lock(folder):
    """Hold a file lock until this process ends; `harness.assert_no_survivors` waits for the lock."""
    file = Path(folder, f"life-{current_rank().global_rank}").open("w")  # noqa: SIM115 (open until the process ends)
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)


def is_last_rank():
    """True in the last rank, which fails in most scenarios."""
    return current_rank().global_rank == current_rank().world_size - 1


# -- scenarios that succeed


def describe_rank(a, *, b, folder):
    """Return nearly everything that a rank can find out about itself."""
    rank = current_rank()
    total = torch.tensor([10.0 + rank.global_rank])
    dist.all_reduce(total)
    print(f"out of {rank.global_rank}", flush=True)
    print(f"err of {rank.global_rank}", file=sys.stderr, flush=True)
    report(folder, "been")
    return {
        "place": (rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart, str(rank.device)),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "platform": (rank.platform.seed, rank.platform.world_size, rank.platform.n_nodes),
        "group": (rank.group.size(), rank.group.rank(), dist.get_rank()),
        "host": socket.gethostname(),
        "arguments": (a, b),
        "total": total,
        "drawn": (random.random(), torch.rand(3)),
        "tensor": torch.full((3, 2), rank.global_rank),
        "stdin": sys.stdin.read() if rank.world_size > 1 else "",
    }


def sum_in_group(value_of):
    """Sum `value_of(rank)` over the rank's own group."""
    rank = current_rank()
    total = torch.tensor(value_of(rank.global_rank))
    dist.all_reduce(total, group=rank.group)
    return rank.group.size(), rank.group.rank(), total.item()


def return_big_argument(big):
    """Change and return a big argument; also return two flags that are (True, False) without a process group."""
    rank = current_rank()
    big[0] += rank.global_rank  # the rank's own copy
    return rank.group is None, dist.is_initialized(), big


def fail_in_first_start(failure):
    """In the first start, the last rank fails while the others wait for it; in the next start, all ranks return."""
    if current_rank().restart == 0:
        if is_last_rank():
            failure()
        dist.barrier()
    dist.barrier()
    return current_rank().restart


def count_until_preempted(folder, further):
    """Count steps until preempted; the next start continues from the same step and counts `further` more."""
    rank, state = current_rank(), Path(folder, "state")
    begun = int(state.read_text()) if state.exists() else 0
    total = torch.tensor(0)
    for step in count(begun):
        if rank.restart and step == begun + further:
            return begun, step, rank.restart
        if rank.should_checkpoint():
            report(folder, "due", step)
            if rank.global_rank == 0:
                state.write_text(str(step))
            dist.barrier()
            rank.requeue()
        total += 1
        dist.all_reduce(total)
        if step == begun:
            report(folder, f"counting{rank.restart}")
    raise AssertionError


def requeue_once():
    """In the first start, call `requeue()` without a preemption; then return the number of the start."""
    if current_rank().restart == 0:
        current_rank().requeue()
    return current_rank().restart


def wait_for_other_launch(folder):
    """Wait until `release_other_launch` runs in another launch, then sum over this launch's ranks."""
    report(folder, "waiting")
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    total = torch.tensor(1)
    dist.all_reduce(total)
    return total.item()


def release_other_launch(folder):
    """Release `wait_for_other_launch` after a collective of all ranks of this launch."""
    total = torch.tensor(100)
    dist.all_reduce(total)
    Path(folder, "go").touch()
    return total.item()


# -- scenarios that fail


def raise_key_error():
    raise KeyError("weight", 7)


def raise_odd_error():
    raise OddError(5, detail="why")


def exit_3():
    sys.exit(3)


def exit_at_once():
    os._exit(7)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def launch_from_rank():
    wrapper(Platform(device="cpu", n_cpus=2, launcher="local"))(exit_3)()


def fail_while_others_wait(failure):
    """The last rank fails; all others are in a collective that cannot finish without it."""
    if is_last_rank():
        failure()
    dist.all_reduce(torch.ones(3))


def fail_in_every_rank(failure, folder):
    """Every rank fails, the last one first."""
    if not is_last_rank():
        while not Path(folder, "failing").exists():
            time.sleep(0.01)
        time.sleep(2.0)  # on a busy machine, the last rank may not have raised yet
    Path(folder, "failing").touch()
    failure()


def return_lock():
    return {"locks": [1, Lock()]} if is_last_rank() else None


def take(_anything):
    return "taken"


def wait_for_ever(folder):
    """Sleep until ended, and report the cleanup."""
    hold_lock(folder)
    report(folder, "begun")
    try:
        time.sleep(FOREVER_S)
    finally:
        report(folder, "cleaned")


def leave_others_in_a_collective():
    """The last rank returns; the connections of the others break."""
    if not is_last_rank():
        dist.all_reduce(torch.ones(3))


def leave_others_with_a_new_group():
    """The last rank returns; the others wait, and no connection breaks."""
    if not is_last_rank():
        dist.new_group(list(range(dist.get_world_size())))

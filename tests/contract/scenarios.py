"""Functions that ranks run in the contract suite.

Ranks import this module, so it imports little.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock

import torch
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
    """Hold a file lock until this process ends; `launches.assert_no_survivors`
    waits for the lock.
    """
    file = Path(folder, f"life-{current_rank().global_rank}").open("w")  # noqa: SIM115 (open until the process ends)
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)
    return file


def is_last_rank():
    """True in the last rank, which fails in most scenarios."""
    return current_rank().global_rank == current_rank().world_size - 1


def describe_rank(a, value_of, *, b, big):
    """Return nearly everything that a rank can find out about itself, and its own copy of a big
    argument.
    """
    rank = current_rank()
    total = torch.tensor([10.0 + rank.global_rank])
    dist.all_reduce(total, group=rank.group)
    print(f"out of {rank.global_rank}", flush=True)
    print(f"err of {rank.global_rank}", file=sys.stderr, flush=True)
    big[0] += rank.global_rank
    try:
        wrapper(Platform(device="cpu", n_cpus=2, launcher="local"))(take)(1)
    except Exception as error:
        refusal = error
    return {
        "place": (
            rank.global_rank,
            rank.local_rank,
            rank.node,
            rank.world_size,
            rank.restart,
            str(rank.device),
        ),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "platform": (rank.platform.seed, rank.platform.n_nodes),
        "group": (rank.group.size(), rank.group.rank(), dist.get_rank()),
        "host": socket.gethostname(),
        "arguments": (a, b),
        "value": value_of(rank.global_rank),
        "total": total,
        "drawn": (random.random(), torch.rand(3).tolist()),
        "stdin": sys.stdin.read() if rank.world_size > 1 else "",
        "big": big,
        "refusal": (type(refusal), str(refusal)),
    }


def live_through_restarts(folder, fails_first):
    """Fail in the first start, be preempted in the second and requeue, and return the steps in the
    last.
    """
    rank, state = current_rank(), Path(folder, "state")
    start = rank.restart + (not fails_first)
    if start == 0 and is_last_rank():
        raise KeyError
    dist.barrier()
    step = 0
    while start == 1:
        if rank.should_checkpoint():
            report(folder, "due", step)
            if rank.global_rank == 0:
                state.write_text(str(step))
            dist.barrier()
            rank.requeue()
        dist.all_reduce(torch.ones(1))
        note_step(folder, step)
        step += 1
        report(folder, "counting")
    saved = int(state.read_text())
    note_step(folder, saved)
    return saved, rank.restart


def note_step(folder, step):
    with Path(folder, f"steps-{current_rank().global_rank}").open("a") as file:
        file.write(f"{step}\n")


def raise_odd_error():
    raise OddError(5, detail="why")


def fail_while_others_wait(failure):
    """The last rank fails; all others are in a collective that cannot finish without it."""
    if is_last_rank():
        failure()
    dist.all_reduce(torch.ones(3))


def return_lock():
    return {"locks": [1, Lock()]} if is_last_rank() else None


def take(_anything):
    return "taken"


def wait_for_ever(folder):
    """Sleep until ended, and report the cleanup."""
    hold_lock(folder)
    try:
        report(folder, "begun")
        time.sleep(600)
    finally:
        report(folder, "cleaned")


def leave_daemon(folder):
    """Start a process that leaves the rank's process group, report both process ids, and wait to be
    ended.
    """
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    report(folder, "pids", f"{os.getpid()} {daemon.pid}")
    wait_for_ever(folder)


def leave_others_in_a_collective():
    """The last rank returns; the connections of the others break."""
    if not is_last_rank():
        dist.all_reduce(torch.ones(3))


def leave_others_with_a_new_group():
    """The last rank returns; the others wait, and no connection breaks."""
    if not is_last_rank():
        dist.new_group(list(range(dist.get_world_size())))

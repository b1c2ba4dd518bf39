"""What ranks do in the contract suite. Ranks import this module, so it imports little."""

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
NEVER_S = 600.0
_held = []


class OddError(Exception):
    """Cannot be pickled as it is: its ``__init__`` does not take what it keeps."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def say(folder, what, text=""):
    """Tell the test something, in a file of this rank that is there only once it is complete."""
    path = Path(folder, f"{what}-{current_rank().global_rank}")
    path.with_name(f".{path.name}").write_text(str(text))
    path.with_name(f".{path.name}").rename(path)


def hold(folder):
    """Hold a lock for as long as this process lives: whether it does is told to whoever asks for the same lock."""
    file = Path(folder, f"life-{current_rank().global_rank}").open("w")  # noqa: SIM115 (open until the process ends)
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(file)


def is_last():
    """Whether this rank is the one that the scenarios let fail."""
    return current_rank().global_rank == current_rank().world_size - 1


# -- what works


def about_itself(a, *, b, folder):
    """Nearly all that a rank can find out about itself."""
    rank = current_rank()
    total = torch.tensor([10.0 + rank.global_rank])
    dist.all_reduce(total)
    print(f"out of {rank.global_rank}", flush=True)
    print(f"err of {rank.global_rank}", file=sys.stderr, flush=True)
    say(folder, "been")
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


def in_its_group(value_of):
    """A sum over the rank's own group, of values by a function that was an argument."""
    rank = current_rank()
    total = torch.tensor(value_of(rank.global_rank))
    dist.all_reduce(total, group=rank.group)
    return rank.group.size(), rank.group.rank(), total.item()


def without_a_group(big):
    """A big argument comes, a big result goes, and no process group is there."""
    rank = current_rank()
    big[0] += rank.global_rank  # the rank's own copy
    return rank.group is None, dist.is_initialized(), big


def restart_after(failure):
    """In the first start, the last rank fails while the others wait for it; in the next, all return."""
    if current_rank().restart == 0:
        if is_last():
            failure()
        dist.barrier()
    dist.barrier()
    return current_rank().restart


def count_on(folder, further):
    """Count until preempted; the next start goes on from there, and counts this much further."""
    rank, state = current_rank(), Path(folder, "state")
    begun = int(state.read_text()) if state.exists() else 0
    total = torch.tensor(0)
    for step in count(begun):
        if rank.restart and step == begun + further:
            return begun, step, rank.restart
        if rank.should_checkpoint():
            say(folder, "due", step)
            if rank.global_rank == 0:
                state.write_text(str(step))
            dist.barrier()
            rank.requeue()
        total += 1
        dist.all_reduce(total)
        if step == begun:
            say(folder, f"counting{rank.restart}")
    raise AssertionError


def ask_to_be_requeued():
    """Once, without any preemption."""
    if current_rank().restart == 0:
        current_rank().requeue()
    return current_rank().restart


def wait_for_the_other(folder):
    """Return when another launch has said so."""
    say(folder, "waiting")
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    total = torch.tensor(1)
    dist.all_reduce(total)
    return total.item()


def let_the_other_go(folder):
    """Say so, once all ranks of this launch have met."""
    total = torch.tensor(100)
    dist.all_reduce(total)
    Path(folder, "go").touch()
    return total.item()


# -- what fails


def raise_key_error():
    raise KeyError("weight", 7)


def raise_odd_error():
    raise OddError(5, detail="why")


def exit_3():
    sys.exit(3)


def leave_at_once():
    os._exit(7)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def launch_more():
    wrapper(Platform(device="cpu", n_cpus=2, launcher="local"))(exit_3)()


def fail_while_others_wait(failure):
    """One rank fails; all others are in a collective that never ends without it."""
    if is_last():
        failure()
    dist.all_reduce(torch.ones(3))


def fail_everywhere(failure, folder):
    """Every rank fails, the last one first."""
    if not is_last():
        while not Path(folder, "failing").exists():
            time.sleep(0.01)
    Path(folder, "failing").touch()
    failure()


def give_a_lock():
    return {"locks": [1, Lock()]} if is_last() else None


def take(_anything):
    return "taken"


def wait_for_ever(folder):
    """Clean up, when told to end."""
    hold(folder)
    say(folder, "begun")
    try:
        time.sleep(NEVER_S)
    finally:
        say(folder, "cleaned")


def leave_others_in_a_collective():
    """The last rank returns; for the others, a connection breaks."""
    if not is_last():
        dist.all_reduce(torch.ones(3))


def leave_others_with_a_new_group():
    """The last rank returns; for the others, nothing breaks."""
    if not is_last():
        dist.new_group(list(range(dist.get_world_size())))

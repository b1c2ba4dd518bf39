"""Ranks that stay: calls of two live ranks, and tensors that travel there and back.

The peers are a warm ``torch.multiprocessing.Pool(2)`` with one task per process, and Monarch's
process mesh, if the package torchmonarch is installed.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from benchmarks._measure import Result, Row, Work, arm_of, ratio_of, take_turns, times_in_turn
from parawrap import Platform, Ranks

_OURS, _POOL, _MONARCH = "parawrap", "torch.multiprocessing.Pool(2).map", "Monarch"
_PLATFORM = Platform(device="cpu", n_cpus=2, verbose=False)
_ALONE = Platform(device="cpu", n_cpus=8, verbose=False, ipc_groups=None)
_MOST_US, _MOST_OF_POOL = 500, 1.0
_MOST_OF_ONE = 1.1
_MOST_OPEN_MS = 150
_MOST_OF_COPIES = 2.2
_MANY = 10_000
_SIZES = {1: 30, 16: 15, 64: 9}  # MiB, and rounds


def rows() -> list[Row]:
    """Measure calls, openings, tensors, and what 10,000 calls leave behind."""
    return [_call_row(), _one_row(), _open_row(), *map(_tensor_row, _SIZES), _many_row()]


def nothing(_: object = None) -> None:
    """Return at once."""


def same(value: Any) -> Any:
    """Return the argument."""
    return value


def _call_row(rounds: int = 30, calls: int = 50) -> Row:
    with ExitStack() as stack:
        ranks = stack.enter_context(_PLATFORM.open())
        pool = stack.enter_context(mp.get_context("forkserver").Pool(2))
        arms: dict[str, Work] = {
            _OURS: lambda: ranks(nothing),
            _POOL: lambda: pool.map(nothing, (0, 1), chunksize=1),
        }
        if importlib.util.find_spec("monarch") is not None:
            arms[_MONARCH] = stack.enter_context(_monarch())
        times = times_in_turn(arms, rounds=rounds, calls=calls, settle=20)
    ours = arm_of(times[_OURS])
    return Row(
        "staying: call of two live ranks, without arguments",
        {name: arm_of(values) for name, values in times.items()},
        [
            Result("a call, parawrap", ours.median_us, "us", ours.low_us, ours.high_us).held_to(
                "at most", _MOST_US
            ),
            *(
                Result(
                    f"time of parawrap divided by that of {name}",
                    ratio.median,
                    "ratio",
                    ratio.low,
                    ratio.high,
                ).held_to("at most", _MOST_OF_POOL if name == _POOL else 1)
                for name in times
                if name != _OURS
                for ratio in [ratio_of(times[_OURS], times[name])]
            ),
        ],
        peers=f"torch {torch.__version__}",
    )


@contextmanager
def _monarch() -> Iterator[Work]:
    from monarch.actor import Actor, endpoint, this_host

    class Worker(Actor):
        @endpoint
        def nothing(self) -> None:
            """Return at once."""

    mesh = this_host().spawn_procs({"gpus": 2})
    worker = mesh.spawn("worker", Worker)
    yield lambda: worker.nothing.call().get()
    mesh.stop().get()


def _open_row(rounds: int = 15) -> Row:
    def open_and_close() -> None:
        with _PLATFORM.open() as ranks:
            ranks(nothing)

    arms = take_turns({_OURS: open_and_close}, rounds=rounds)
    times = arms[_OURS]
    result = Result(
        "open, first call, close",
        times.median_us / 1e3,
        "ms",
        times.low_us / 1e3,
        times.high_us / 1e3,
    )
    return Row("staying: open, first call, close", arms, [result.held_to("at most", _MOST_OPEN_MS)])


def _one_row(rounds: int = 30, calls: int = 50) -> Row:
    """Compare a call of one of eight ranks with a call of one of two."""
    with _PLATFORM.open() as two, _ALONE.open() as eight:
        arms: dict[str, Work] = {
            "one of 8": lambda: eight[3](nothing),
            "one of 2": lambda: two[1](nothing),
        }
        times = times_in_turn(arms, rounds=rounds, calls=calls, settle=20)
    ratio = ratio_of(times["one of 8"], times["one of 2"])
    result = Result(
        "time of one of 8 divided by that of one of 2", ratio.median, "ratio", ratio.low, ratio.high
    )
    return Row(
        "staying: call of one rank",
        {name: arm_of(values) for name, values in times.items()},
        [result.held_to("at most", _MOST_OF_ONE)],
    )


def _tensor_row(mib: int) -> Row:
    tensor = torch.rand(mib << 18)
    target = torch.empty_like(tensor)

    def copy() -> None:  # once to each rank, and once back from each
        for _ in range(4):
            target.copy_(tensor)

    with _PLATFORM.open() as ranks:
        times = times_in_turn(
            {_OURS: lambda: ranks(same, tensor), "four copies": copy}, rounds=_SIZES[mib]
        )
    ratio = ratio_of(times[_OURS], times["four copies"])
    result = Result(
        "time divided by that of four copies", ratio.median, "ratio", ratio.low, ratio.high
    )
    return Row(
        f"staying: {mib} MiB to each of two ranks and back",
        {name: arm_of(values) for name, values in times.items()},
        [result.held_to("at most", _MOST_OF_COPIES) if mib > 1 else result],
    )


def _many_row() -> Row:
    with _PLATFORM.open() as ranks:
        for _ in range(_MANY // 10):
            ranks(nothing)
        before = _kept(ranks)
        began = time.perf_counter()
        for _ in range(_MANY):
            ranks(nothing)
        took_us = 1e6 * (time.perf_counter() - began) / _MANY
        after = _kept(ranks)
    growth = {name: after[name] - before[name] for name in before}
    return Row(
        "staying: 10,000 calls",
        {_OURS: arm_of([took_us])},
        [
            Result(
                "growth of memory, this process and two ranks", growth["memory"] / 2**20, "MiB"
            ).held_to("at most", 2),
            Result("growth of open files", growth["files"], "count").held_to("exactly", 0),
            Result("growth of threads", growth["threads"], "count").held_to("exactly", 0),
        ],
    )


def _kept(ranks: Ranks) -> dict[str, int]:
    """Return memory in bytes, open files, and threads of this process and its ranks."""
    each = [kept_here(), *ranks(kept_here)]
    return {name: sum(kept[name] for kept in each) for name in each[0]}


def kept_here() -> dict[str, int]:
    """Return memory in bytes, open files, and threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "files": len(os.listdir("/proc/self/fd")),  # noqa: PTH208 (as cheap as possible)
        "threads": threading.active_count(),
    }

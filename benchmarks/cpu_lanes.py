"""Lanes of one thread each on the CPU, compared with a plain call on as many of torch's own
threads.

Both arms have the same number of cores: plain operators use k threads, and k lanes use one thread
each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks._measure import Arm, Result, Row, take_turns, threads
from benchmarks.nets import Net, encoder, mlp, plain_attention, resnet18
from parawrap import parallel
from parawrap.backends.cores import usable_cores

__all__ = ["LANES", "cores_limit", "interpreter_limit", "lanes_row", "rows"]

LANES = (1, 2, 4, 8, 16)
NETS = (
    Net("MLP of 3 x 1024", mlp, (1024,), usual=512),
    Net("ResNet-18 shape, 64x64 images", resnet18, (3, 64, 64), usual=32),
    Net("encoder of 12 x 768, 16 tokens", encoder, (16, 768), usual=16),
)


def rows(
    nets: Sequence[Net] = NETS,
    lanes: Sequence[int] = LANES,
    rounds: int = 9,
    cores: int | None = None,
) -> list[Row]:
    """Measure one row per net.

    Lane counts above the usable cores are skipped, and the row names them.
    """
    cores = usable_cores() if cores is None else cores
    with torch.no_grad(), plain_attention():
        return [_row(net, lanes, rounds, cores) for net in nets]


def _row(net: Net, lanes: Sequence[int], rounds: int, cores: int) -> Row:
    model, ours, x = net.make().eval(), net.make().eval(), net.batch(net.usual)
    pairs = {count: _pair(model, ours, x, count, rounds) for count in lanes if count <= cores}
    row = lanes_row(
        f"CPU lanes: {net.name}, {net.usual} rows", pairs, [n for n in lanes if n > cores], cores
    )
    with threads(1):
        one_row = take_turns({"one row": partial(model, net.batch(1))}, rounds=rounds, settle=1)[
            "one row"
        ]
    return replace(row, results=[*row.results, *_limits(pairs, one_row.median_us)])


def _pair(
    model: nn.Module, ours: nn.Module, x: torch.Tensor, count: int, rounds: int
) -> tuple[Arm, Arm]:
    """Time the plain call on `count` threads and the call over `count` lanes of one thread."""
    with threads(count), parallel(ours, ["cpu"] * count, out_dims=0):
        arms = take_turns(
            {"torch": partial(model, x), "lanes": partial(ours, x)}, rounds=rounds, settle=1
        )
    return arms["torch"], arms["lanes"]


def _limits(pairs: Mapping[int, tuple[Arm, Arm]], one_row_us: float) -> list[Result]:
    """Return the best possible speed-up over torch's threads for each number of lanes."""
    if 1 not in pairs:
        return []
    one_thread_us = pairs[1][0].median_us
    limits: list[Result] = []
    for count, (plain, _) in pairs.items():
        by_cores = cores_limit(plain.median_us, one_thread_us, count)
        by_interpreter = interpreter_limit(plain.median_us, one_thread_us, one_row_us, count)
        limits.append(Result(f"limit by the cores, lanes: {count}", by_cores, "ratio"))
        limits.append(Result(f"limit by the interpreter, lanes: {count}", by_interpreter, "ratio"))
    return limits


def cores_limit(plain: float, one_thread: float, cores: int) -> float:
    """Return the speed-up if all cores share the work of one thread without loss.

    >>> cores_limit(plain=3.0, one_thread=4.0, cores=2)
    1.5
    """
    return plain / (one_thread / cores)


def interpreter_limit(plain: float, one_thread: float, one_row: float, lanes: int) -> float:
    """Return the speed-up if lanes share one interpreter lock.

    The time of one row approximates the fixed cost of a call: Python and dispatch. Lanes pay it one
    after the other. Each lane then runs its share of the rest.

    >>> interpreter_limit(plain=4.0, one_thread=4.0, one_row=1.0, lanes=2)
    1.6
    >>> interpreter_limit(plain=4.0, one_thread=4.0, one_row=3.0, lanes=2)
    0.6666666666666666
    """
    rest = max(0.0, one_thread - one_row)
    return plain / max(lanes * one_row, one_row + rest / lanes)


def lanes_row(
    name: str, pairs: Mapping[int, tuple[Arm, Arm]], skipped: Sequence[int], cores: int
) -> Row:
    """Return the row for the times of torch's threads and of the lanes, by their number."""
    arms: dict[str, Arm] = {}
    for count, (plain, lanes) in pairs.items():
        arms |= {f"torch's threads: {count}": plain, f"lanes: {count}": lanes}
    results = [
        Result(f"speed-up, lanes: {count}", plain.median_us / lanes.median_us, "ratio")
        for count, (plain, lanes) in pairs.items()
    ]
    note = (
        f"skipped: {', '.join(map(str, skipped))} lanes (the process may use {cores} cores)"
        if skipped
        else ""
    )
    return Row(
        name, arms, results, peers=f"the intra-op threads of torch {torch.__version__}", note=note
    )

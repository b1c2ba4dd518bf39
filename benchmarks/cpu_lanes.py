"""So many lanes of one thread on the CPU, against one plain call whose operators use so many threads of torch's own.

Both arms have the same number of cores at any time, `torch.set_num_threads(k)`: plain operators then use k threads, and k
lanes one each. The suite must therefore run with as many threads allowed as there are cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from benchmarks._limits import cores_limit, interpreter_limit
from benchmarks._measure import Arm, Row, take_turns
from benchmarks.cuda_nets import Net, encoder, mlp, plain_attention, resnet18
from parawrap import parallel
from parawrap.backends.cpu import usable_cores

__all__ = ["LANES", "lanes_row", "rows"]

LANES = (1, 2, 4, 8, 16)
NETS = (
    Net("MLP of 3 x 1024", mlp, (1024,), small=16, usual=512),
    Net("ResNet-18 shape, 64x64 images", resnet18, (3, 64, 64), small=16, usual=32),
    Net("encoder of 12 x 768, 16 tokens", encoder, (16, 768), small=16, usual=16),
)


def rows(nets: Sequence[Net] = NETS, lanes: Sequence[int] = LANES, rounds: int = 9, cores: int | None = None) -> list[Row]:
    """One row a net; lanes beyond the cores that the process may use are left out, and the row says so."""
    cores = usable_cores() if cores is None else cores
    with plain_attention():
        return [_row(net, lanes, rounds, cores) for net in nets]


def _row(net: Net, lanes: Sequence[int], rounds: int, cores: int) -> Row:
    model, x = net.make().eval(), net.batch(net.usual)
    pairs = {count: _pair(model, x, count, rounds) for count in lanes if count <= cores}
    row = lanes_row(f"CPU lanes: {net.name}, {net.usual} rows", pairs, [n for n in lanes if n > cores], cores)
    return replace(row, extra={**row.extra, "limits": _limits(pairs, _one_row(model, net, rounds))})


def _one_row(model: nn.Module, net: Net, rounds: int) -> float:
    """Microseconds for a plain call of one row at one thread."""
    x = net.batch(1)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return take_turns({"one row": partial(model, x)}, rounds=rounds, settle=1)["one row"].median_us
    finally:
        torch.set_num_threads(before)


def _limits(pairs: Mapping[int, tuple[Arm, Arm]], one_row_us: float) -> dict[str, float]:
    """How many times as fast as torch's threads so many lanes could be."""
    if 1 not in pairs:
        return {}
    one_thread_us = pairs[1][0].median_us
    limits: dict[str, float] = {}
    for count, (threads, _) in pairs.items():
        limits[f"cores, {count}"] = cores_limit(threads.median_us, one_thread_us, count)
        limits[f"interpreter, {count}"] = interpreter_limit(threads.median_us, one_thread_us, one_row_us, count)
    return limits


def _pair(model: nn.Module, x: torch.Tensor, count: int, rounds: int) -> tuple[Arm, Arm]:
    """The plain call on that many threads, and the call over that many lanes of one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    mine = deepcopy(model)  # the block rewrites it in place
    try:
        with torch.no_grad(), parallel(mine, ["cpu"] * count, plan="lanes"):
            # A team of OpenMP threads spins on after its last operator: each turn outlasts it before its clock starts.
            arms = take_turns({"torch": partial(model, x), "lanes": partial(mine, x)}, rounds=rounds, settle=1)
    finally:
        torch.set_num_threads(before)
    return arms["torch"], arms["lanes"]


def lanes_row(name: str, pairs: Mapping[int, tuple[Arm, Arm]], skipped: Sequence[int], cores: int) -> Row:
    """The row for these times of torch's threads and of the lanes, by their number."""
    arms: dict[str, Arm] = {}
    for count, (threads, lanes) in pairs.items():
        arms |= {f"torch's threads: {count}": threads, f"lanes: {count}": lanes}
    gains = {count: threads.median_us / lanes.median_us for count, (threads, lanes) in pairs.items()}
    verdict = "times as fast as torch's threads: " + ", ".join(f"{count}: {gain:.2f}" for count, gain in gains.items())
    if skipped:
        verdict += f"; {', '.join(map(str, skipped))} left out: the process may use {cores} cores"
    peers = f"the intra-op threads of torch {torch.__version__}"
    extra = {"gains": gains, "skipped": list(skipped), "cores": cores}
    return Row(name, arms, verdict, "reported", held=True, peers=peers, extra=extra)

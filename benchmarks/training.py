"""A training step (forward, backward, SGD) of small nets on the CPU: plain, and over one lane per
core.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from benchmarks._measure import Result, Row, arm_of, ratio_of, threads, times_in_turn
from benchmarks.nets import SMALL_ENCODER, Lstm, Net, conv, mlp
from parawrap import parallel
from parawrap.backends.cores import usable_cores

__all__ = ["rows"]

NETS = (
    Net("MLP of 3 x 512", partial(mlp, 512), (512,), usual=256),
    Net("conv 3-16-32, 32x32 images", conv, (3, 32, 32), usual=64),
    SMALL_ENCODER,
    Net("LSTM 64-128, 32 steps", Lstm, (32, 64), usual=64),
)


def rows(nets: Sequence[Net] = NETS, rounds: int = 40, lanes: int | None = None) -> list[Row]:
    """Measure one row per net. The plain arm uses as many threads as the other arm has lanes."""
    return [_row(net, rounds, lanes or usable_cores()) for net in nets]


def _row(net: Net, rounds: int, lanes: int) -> Row:
    plain, ours, x = net.make().train(), net.make().train(), net.batch(net.usual)
    with threads(lanes), parallel(ours, ["cpu"] * lanes, out_dims=0):
        steps = {
            "plain": partial(_step, plain, _sgd(plain), x),
            "lanes": partial(_step, ours, _sgd(ours), x),
        }
        times = times_in_turn(steps, rounds=rounds, settle=1)
    gain = ratio_of(times["plain"], times["lanes"])
    return Row(
        f"training step: {net.name}, {net.usual} rows, {lanes} lanes",
        {arm: arm_of(values) for arm, values in times.items()},
        [Result("speed-up of lanes", gain.median, "ratio", gain.low, gain.high)],
        peers=f"torch {torch.__version__}, {lanes} threads",
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()

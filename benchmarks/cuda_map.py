"""`map` over batches on the host, compared with the plain loop and with the machine's limits.

Two limits take turns with the arms. The first copies the same batches from pinned memory into one
buffer on the device. The second runs the same kernels on a batch that is already on the device. The
device's clock times the limits. The wall clock times the arms until the device is idle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks._measure import Arm, Result, Row, Work, arm_of, in_turn, wall_us
from benchmarks.cuda_target import Target
from parawrap import parallel

__all__ = [
    "COPIES",
    "KERNELS",
    "LOOP",
    "MAPS",
    "MatmulChain",
    "RowMean",
    "Stream",
    "rows",
    "streamed_row",
]

COPIES, KERNELS, LOOP = "copies alone", "kernels alone", "plain loop"
MAPS = {"map, 1 lane": 1, "map, 2 lanes": 2}
LEAST_SHARE = 0.9


class Stream(NamedTuple):
    """A model and its input: one pass reads the `distinct` batches on the host `times` times."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    dtype: torch.dtype
    distinct: int
    times: int

    @property
    def bytes_per_batch(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RowMean(nn.Module):
    """A model that reads its whole input and returns little.

    It has a parameter, so that it has a device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1) * self.scale


class MatmulChain(nn.Module):
    """A chain of equal large matrix products."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.length = length
        self.weight = nn.Parameter((torch.randn(width, width) / width**0.5).to(torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.length):
            x = x @ self.weight
        return x.mean(1)


TRANSFER = Stream(
    "transfer-bound, batches of 64 MiB", RowMean, (16384, 1024), torch.float32, distinct=8, times=4
)
COMPUTE = Stream(
    "compute-bound, batches of 16 MiB",
    partial(MatmulChain, 4096, 64),
    (2048, 4096),
    torch.bfloat16,
    distinct=8,
    times=4,
)


def rows(
    target: Target, transfer: Stream = TRANSFER, compute: Stream = COMPUTE, rounds: int = 9
) -> list[Row]:
    """Measure both models, from pinned and from pageable memory."""
    return [*_transfer_bound(transfer, target, rounds), *_compute_bound(compute, target, rounds)]


def _transfer_bound(stream: Stream, target: Target, rounds: int) -> list[Row]:
    pinned, pageable = _batches(stream, target)
    buffer = torch.empty_like(pinned[0], device=target.device)

    def copies() -> None:
        for batch in pinned:
            buffer.copy_(batch, non_blocking=True)

    return [
        _row(stream, "pinned", pinned, (COPIES, copies), target, rounds, LEAST_SHARE),
        _row(stream, "pageable", pageable, (COPIES, copies), target, rounds),
    ]


def _compute_bound(stream: Stream, target: Target, rounds: int) -> list[Row]:
    pinned, pageable = _batches(stream, target)
    model, batch = stream.make().to(target.device), pinned[0].to(target.device)

    def kernels() -> None:
        for _ in pinned:
            model(batch)

    return [
        _row(stream, "pinned", pinned, (KERNELS, kernels), target, rounds),
        _row(stream, "pageable", pageable, (KERNELS, kernels), target, rounds),
    ]


def _batches(
    stream: Stream, target: Target
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Return the batches of one pass in pinned and in pageable memory, with equal values."""
    pageable = [torch.randn(stream.shape).to(stream.dtype) for _ in range(stream.distinct)]
    pinned = [target.pin(batch) for batch in pageable]
    return pinned * stream.times, pageable * stream.times


def _row(
    stream: Stream,
    memory: str,
    batches: Sequence[torch.Tensor],
    limit: tuple[str, Work],
    target: Target,
    rounds: int,
    least: float | None = None,
) -> Row:
    """Time a pass of each arm, and divide by the number of batches."""
    model = stream.make().eval().to(target.device)
    with torch.no_grad(), ExitStack() as blocks:
        passes: dict[str, Callable[[], float]] = {limit[0]: partial(target.elapsed_us, limit[1])}
        passes[LOOP] = partial(_until_idle, target, partial(_loop, model, batches, target.device))
        for name, lanes in MAPS.items():
            block = blocks.enter_context(parallel(deepcopy(model), target.lanes(lanes)))
            passes[name] = partial(_until_idle, target, partial(_exhaust, block.map, batches))
        for one_pass in passes.values():  # warm up
            one_pass()
            target.synchronize()
        times = in_turn(passes, rounds)
    arms = {name: arm_of([us / len(batches) for us in values]) for name, values in times.items()}
    return streamed_row(f"map: {stream.name}, {memory}", arms, stream.bytes_per_batch, least)


def _until_idle(target: Target, work: Work) -> float:
    def all_of_it() -> None:
        work()
        target.synchronize()

    return wall_us(all_of_it)


def _loop(model: nn.Module, batches: Sequence[torch.Tensor], device: str) -> None:
    for batch in batches:
        model(batch.to(device, non_blocking=True))


def _exhaust(
    stream: Callable[[Sequence[torch.Tensor]], Iterable[Any]], batches: Sequence[torch.Tensor]
) -> None:
    for _ in stream(batches):
        pass


def streamed_row(
    name: str, arms: Mapping[str, Arm], bytes_per_batch: int, least: float | None = None
) -> Row:
    """Return the row for these times per batch.

    The first arm is the limit. `least` is map's goal, as a share of it.
    """
    limit, *others = arms
    results = [
        Result(f"rate, {arm}", bytes_per_batch / times.median_us / 1e3, "GB/s")
        for arm, times in arms.items()
    ]
    for arm in others:
        share = Result(
            f"rate, {arm}, as a share of {limit}",
            100 * arms[limit].median_us / arms[arm].median_us,
            "%",
        )
        results.append(
            share if least is None or arm not in MAPS else share.held_to("at least", 100 * least)
        )
    return Row(name, arms, results)

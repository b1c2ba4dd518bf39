"""Lanes with and without the interpreter lock: streams and cut calls of nets that run much Python.

Each net runs a number of batches in these ways, each with its own copy of the model:

- a plain loop on one thread, and one on as many threads as there are cores;
- bare threads, each with a replica over shared parameters and an equal part of the batches: what
  somebody who needs no order, no errors, and no options would write by hand;
- `map` over lanes, and `map` over workers;
- cut calls, each of as many batches as there are lanes, joined; next to them plain calls of the
  same.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from benchmarks._measure import Result, Row, arm_of, ratio_of, threads, times_in_turn
from benchmarks._python import build
from parawrap import parallel
from parawrap.backends.cores import usable_cores

__all__ = ["JOBS", "Job", "rows"]

_ONE, _BARE, _MAP, _WORKERS, _CUT = (
    "loop, one thread",
    "bare threads",
    "map",
    "map, workers",
    "cut calls",
)
_WHOLE = "plain calls of the cut batches"


class Job(NamedTuple):
    """A net, its batches, and the goals on two lanes without the lock: of `map` and cut calls over
    the best loop.
    """

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    count: int
    map_over_loop: float
    cut_over_loop: float


class Operators(nn.Module):
    """160 operators on a small tensor, in a loop."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(80):
            x = x * 1.0001 + 0.1
        return x


class Recurrent(nn.Module):
    """A GRU cell in a loop over the steps of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


def _linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)])


JOBS = (
    Job("160 operators", Operators, (32, 64), 240, 1.7, 1.5),
    Job("GRU loop", Recurrent, (16, 30, 32), 60, 1.6, 1.5),
    Job("encoder of 3 layers", _encoder, (8, 32, 64), 80, 1.05, 1.0),
    Job("60 Linears", _linears, (8, 64), 240, 1.5, 1.3),
)


def rows(jobs: Sequence[Job] = JOBS, lanes: Sequence[int] = (2, 4), rounds: int = 15) -> list[Row]:
    """Measure each net on each number of lanes."""
    return [_row(job, count, rounds) for count in lanes for job in jobs]


def _row(job: Job, lanes: int, rounds: int) -> Row:
    cores = usable_cores()
    loop = f"loop, {cores} threads"
    model = job.make().eval()
    batches = [torch.randn(job.shape) for _ in range(job.count)]
    joined = [torch.cat(batches[at : at + lanes]) for at in range(0, job.count, lanes)]
    replicas = [replica_of(model) for _ in range(lanes)]
    with torch.inference_mode(), threads(cores), ExitStack() as blocks:
        stream = blocks.enter_context(parallel(copy.deepcopy(model), ["cpu"] * lanes))
        workers = blocks.enter_context(
            parallel(copy.deepcopy(model), ["cpu"] * lanes, workers="process")
        )
        cut = blocks.enter_context(parallel(copy.deepcopy(model), ["cpu"] * lanes, out_dims=0))

        def loop_on_one_thread() -> None:
            with threads(1):
                _loop(model, batches)

        arms = {
            _ONE: loop_on_one_thread,
            loop: lambda: _loop(model, batches),
            _BARE: lambda: in_threads(replicas, batches),
            _MAP: lambda: deque(stream.map(batches), 0),
            _WORKERS: lambda: deque(workers.map(batches), 0),
            _CUT: lambda: _loop(cut, joined),
            _WHOLE: lambda: _loop(model, joined),
        }
        times = times_in_turn(arms, rounds=rounds, settle=1)

    medians = {arm: arm_of(values).median_us for arm, values in times.items()}
    best = min((_ONE, loop), key=medians.__getitem__)
    results = []
    for one, other, goal in (
        (_MAP, _BARE, 1.0),
        (_MAP, best, job.map_over_loop),
        (_CUT, best, job.cut_over_loop),
        (_CUT, _WHOLE, None),
        (_MAP, _WORKERS, None),
    ):
        ratio = ratio_of(times[other], times[one])
        name = f"speed-up of {one} over {'the best loop' if other == best else other}"
        result = Result(name, ratio.median, "ratio", ratio.low, ratio.high)
        is_judged = goal is not None and lanes == 2 and build().endswith("t")
        results.append(
            result.held_to("at least", goal) if is_judged and goal is not None else result
        )
    return Row(
        f"lanes: {job.name}, {job.count} batches, {lanes} lanes",
        {arm: arm_of(values) for arm, values in times.items()},
        results,
        peers=f"threading, Python {build()}; torch {torch.__version__}",
        note=f"the best loop is the {best.removeprefix('loop, ')} one",
    )


def replica_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model with the parameters of the model itself."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def in_threads(replicas: Sequence[nn.Module], batches: Sequence[torch.Tensor]) -> None:
    """Run an equal part of the batches in a thread per replica, with one thread of torch each."""

    def run(replica: nn.Module, part: Sequence[torch.Tensor]) -> None:
        torch.get_num_threads()  # torch drops the setting of a thread that has not read it once
        torch.set_num_threads(1)
        with torch.inference_mode():
            _loop(replica, part)

    count = len(replicas)
    parts = [batches[at::count] for at in range(count)]
    running = [
        threading.Thread(target=run, args=pair) for pair in zip(replicas, parts, strict=True)
    ]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _loop(model: Callable[[torch.Tensor], object], batches: Sequence[torch.Tensor]) -> None:
    for batch in batches:
        model(batch)

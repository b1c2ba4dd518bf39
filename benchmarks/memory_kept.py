"""`parawrap.cpu.keep_freed_memory`: a convolution with and without it.

Each arm runs in its own processes.

Without it, glibc returns the convolution's buffers to the kernel after each call, and the next call
takes page faults.
"""

from __future__ import annotations

import resource
import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from benchmarks._measure import Result, Row, arm_of, in_turn, ratio_of, wall_us
from benchmarks._process import ALLOCATOR, in_process
from benchmarks.nets import conv

__all__ = ["burst", "kept_row", "rows"]

_DEFAULT, _KEPT = "default", "keep_freed_memory"
_LEAST_GAIN = 1.5


def rows(rounds: int = 5, calls: int = 60) -> list[Row]:
    """Measure `rounds` processes of each arm, in turn."""
    env = dict.fromkeys([*ALLOCATOR, "GLIBC_TUNABLES"])
    arms = {
        arm: partial(in_process, f"{__name__}:burst", env, kept=arm == _KEPT, calls=calls)
        for arm in (_DEFAULT, _KEPT)
    }
    return [kept_row(in_turn(arms, rounds))]


def burst(*, kept: bool, calls: int, size: int = 64) -> dict[str, Any]:
    """Return the microseconds of each call and the page faults per call, in this process."""
    from parawrap.cpu import keep_freed_memory

    torch.manual_seed(0)
    model, x = conv().eval(), torch.randn(size, 3, 32, 32)
    with torch.no_grad(), keep_freed_memory() if kept else nullcontext():
        for _ in range(5):
            model(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        times = [wall_us(partial(model, x)) for _ in range(calls)]
        faults = (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / calls
    return {"us": times, "faults": faults}


def kept_row(bursts: dict[str, list[dict[str, Any]]]) -> Row:
    """Return the row of these bursts, one per process."""
    medians = {
        arm: [statistics.median(each["us"]) for each in given] for arm, given in bursts.items()
    }
    faults = {
        arm: statistics.median(each["faults"] for each in given) for arm, given in bursts.items()
    }
    gain = ratio_of(medians[_DEFAULT], medians[_KEPT])
    return Row(
        "memory_kept: conv 3-16-32, 64 images of 32x32",
        {arm: arm_of(values) for arm, values in medians.items()},
        [
            Result("speed-up", gain.median, "ratio", gain.low, gain.high).held_to(
                "at least", _LEAST_GAIN
            ),
            *(
                Result(f"page faults, {arm}", count, "count per call")
                for arm, count in faults.items()
            ),
        ],
        peers=f"torch {torch.__version__} with glibc's defaults",
    )

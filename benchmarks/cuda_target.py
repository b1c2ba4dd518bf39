"""The one GPU that the CUDA suite runs on: how to wait for it, how to time it, and who does the same there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks._measure import Work

__all__ = ["Target", "missing", "the_gpu"]


@dataclass(frozen=True)
class Target:
    """All that the suite asks of a device, so that its arithmetic can be tested where there is no GPU.

    `elapsed_us` times work by the device's own clock; `pin` gives a host tensor that the device can read by itself;
    `peer` wraps a module over so many lanes on the device, as torch.nn.DataParallel does.
    """

    device: str
    synchronize: Work
    elapsed_us: Callable[[Work], float]
    pin: Callable[[torch.Tensor], torch.Tensor]
    peer: Callable[[torch.nn.Module, int], torch.nn.Module]

    def lanes(self, count: int) -> list[str]:
        """The device, named so many times."""
        return [self.device] * count


def missing() -> str | None:
    """Why the CUDA suite cannot run here."""
    if torch.cuda.is_available():
        return None
    built = f"is built for CUDA {torch.version.cuda} and sees no GPU" if torch.version.cuda else "is built without CUDA"
    return f"there is no GPU to measure: torch {torch.__version__} {built}"


def the_gpu() -> Target:
    """The first GPU. Kernels are chosen by rule, not by trial, in every arm alike."""
    torch.backends.cudnn.benchmark = False
    return Target(
        device="cuda:0",
        synchronize=partial(torch.cuda.synchronize, "cuda:0"),
        elapsed_us=_between_events,
        pin=torch.Tensor.pin_memory,
        peer=lambda module, lanes: torch.nn.DataParallel(module, device_ids=[0] * lanes),
    )


def _between_events(work: Work) -> float:
    """Microseconds between two marks in the device's queue, one before what `work` queues and one after."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3

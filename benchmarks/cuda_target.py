"""The GPU of the CUDA suite: its synchronization, its clock, and the peer that runs on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks._measure import Work

__all__ = ["Target", "missing", "the_gpu"]


@dataclass(frozen=True)
class Target:
    """Functions of the device that the suite uses. Tests replace them on machines without a GPU.

    `elapsed_us` times work by the device's clock. `pin` copies a tensor to pinned memory. `peer`
    wraps a module over a number of lanes on the device, as torch.nn.DataParallel does.
    """

    device: str
    synchronize: Work
    elapsed_us: Callable[[Work], float]
    pin: Callable[[torch.Tensor], torch.Tensor]
    peer: Callable[[torch.nn.Module, int], torch.nn.Module]

    def lanes(self, count: int) -> list[str]:
        """Return `count` entries of the device."""
        return [self.device] * count


def missing() -> str | None:
    """Return the reason that the CUDA suite cannot run here, or None."""
    if torch.cuda.is_available():
        return None
    built = (
        f"is built for CUDA {torch.version.cuda} and sees no GPU"
        if torch.version.cuda
        else "is built without CUDA"
    )
    return f"no GPU is available: torch {torch.__version__} {built}"


def the_gpu() -> Target:
    """Return the first GPU, with cuDNN's autotuning off in every arm."""
    torch.backends.cudnn.benchmark = False
    return Target(
        device="cuda:0",
        synchronize=partial(torch.cuda.synchronize, "cuda:0"),
        elapsed_us=_between_events,
        pin=torch.Tensor.pin_memory,
        peer=lambda module, lanes: torch.nn.DataParallel(module, device_ids=[0] * lanes),
    )


def _between_events(work: Work) -> float:
    """Return the microseconds between two events in the device's queue, before and after `work`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3

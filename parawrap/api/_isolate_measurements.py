"""Isolate the ways of `compare` from each other, and measure memory and page faults."""

from __future__ import annotations

import contextlib
import ctypes
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from parawrap.backends import backend_of

if sys.platform != "win32":
    import resource

__all__ = ["memory_growth", "page_faults", "turn"]


@contextlib.contextmanager
def turn(name: str, module: torch.nn.Module, leaves: list[torch.Tensor], devices: list[torch.device]) -> Iterator[None]:
    """Restore the state of the model and torch's random state at the end. Add a note with the way's name to errors."""
    owners = [(owner, owner.training) for owner in module.modules()]
    buffers = [(owner, key, old, old.clone()) for owner, _ in owners for key, old in owner.named_buffers(recurse=False)]
    gradients = [leaf.grad for leaf in leaves]
    try:
        with backend_of(devices[0].type if devices else "cpu").forked_rng(devices):
            yield
    except Exception as error:
        error.add_note(f"raised in the way {name!r} of parawrap.compare")
        raise
    finally:
        with torch.no_grad():
            for owner, key, old, value in buffers:
                setattr(owner, key, old.copy_(value))
        for owner, training in owners:
            owner.training = training
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient


def memory_growth(devices: list[torch.device]) -> Callable[[], int | None]:
    """Return a function that returns the peak growth of memory since this call, on the device with the largest growth."""
    module = torch.get_device_module(devices[0].type) if devices else None
    if module is not None and hasattr(module, "max_memory_allocated"):
        before = {device: module.memory_allocated(device) for device in devices}
        for device in devices:
            module.reset_peak_memory_stats(device)
        return lambda: max(module.max_memory_allocated(device) - size for device, size in before.items())
    with contextlib.suppress(OSError, AttributeError, TypeError):  # no /proc, or a C library without malloc_trim
        if module is None:
            ctypes.CDLL(None).malloc_trim(0)  # otherwise this turn reuses pages that the previous one freed
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, the peak of VmRSS
            resident = _status("VmRSS")
            return lambda: _status("VmHWM") - resident
    return lambda: None


def _status(field: str) -> int:
    (kibibytes,) = re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(kibibytes) * 1024


def page_faults() -> int:
    """Return the number of minor page faults of the process so far."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_minflt

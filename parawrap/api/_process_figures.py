"""Isolate the ways of `compare` from each other, and measure memory, page faults, and the load of other processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from parawrap.backends import backend_of
from parawrap.errors import add_note

if sys.platform != "win32":
    import resource

__all__ = ["cores_of_others", "isolate_turn", "memory_growth", "page_faults"]

_PROC = Path("/proc")
_SHORTEST_S = 0.3  # 30 ticks of the kernel's clock per core; a shorter time looks like an idle one


@contextlib.contextmanager
def isolate_turn(
    name: str, module: torch.nn.Module, leaves: list[torch.Tensor], devices: list[torch.device]
) -> Iterator[None]:
    """Restore the state of the model and torch's random state at the end. Add a note with the way's name to errors."""
    owners = [(owner, owner.training) for owner in module.modules()]
    buffers = [(owner, key, old, old.clone()) for owner, _ in owners for key, old in owner.named_buffers(recurse=False)]
    gradients = [leaf.grad for leaf in leaves]
    try:
        with backend_of(devices[0].type if devices else "cpu").fork_rng(devices):
            yield
    except Exception as error:
        add_note(error, f"raised in the way {name!r} of parawrap.compare")
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
            (_PROC / "self/clear_refs").write_text("5")  # resets VmHWM, the peak of VmRSS
            resident = _status("VmRSS")
            return lambda: _status("VmHWM") - resident
    return lambda: None


def _status(field: str) -> int:
    (kibibytes,) = re.findall(rf"{field}:\s+(\d+)", (_PROC / "self/status").read_text())
    return int(kibibytes) * 1024


def page_faults() -> int:
    """Return the number of minor page faults of the process so far."""
    return 0 if sys.platform == "win32" else resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def cores_of_others() -> Callable[[], float | None]:
    """Return a function that returns the average number of cores that other processes used since this call.

    Only cores that this process may use count. Descendants of this process, such as workers, are not others. The function
    waits until the time is long enough to measure. It returns None without /proc.
    """
    start, before = time.monotonic(), _ticks_of_others()

    def used() -> float | None:
        time.sleep(max(0.0, start + _SHORTEST_S - time.monotonic()))
        after, seconds = _ticks_of_others(), time.monotonic() - start
        if before is None or after is None:
            return None
        return max(0.0, (after - before) / os.sysconf("SC_CLK_TCK") / seconds)

    return used


def _ticks_of_others() -> int | None:
    """Return the ticks that the cores of this process spent on other processes so far, including stolen ticks."""
    try:
        cores = [f"cpu{index}" for index in os.sched_getaffinity(0)]
        lines = [line.split() for line in (_PROC / "stat").read_text().splitlines()]
    except (OSError, AttributeError):  # not Linux
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal: proc(5)
    busy = [sum(map(int, words[1:9])) - int(words[4]) - int(words[5]) for words in lines if words[0] in cores]
    return sum(busy) - _count_own_ticks()


def _count_own_ticks() -> int:
    """Return the ticks of this process, its descendants, and their children that have ended."""
    parents, ticks = {}, {}
    for path in _PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            words = path.read_text().rpartition(")")[2].split()
            pid = int(path.parent.name)
            parents[pid], ticks[pid] = int(words[1]), sum(map(int, words[11:15]))  # utime, stime, cutime, cstime
    own, found = {os.getpid()}, 0
    while len(own) > found:
        found = len(own)
        own |= {pid for pid, parent in parents.items() if parent in own}
    return sum(ticks.get(pid, 0) for pid in own)

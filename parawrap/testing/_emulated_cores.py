"""An emulated NeuronCore. It runs one inference at a time, takes at least `latency_s` for each, and counts them.

A program is any callable here: this file has no code for shapes or models.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Core", "CoreStats", "Run"]

Run = Callable[..., Sequence[torch.Tensor]]


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Counters of one emulated core since the last reset, and its current memory use.

    Attributes:
        inferences: the number of inferences that the core ran.
        busy_s: the seconds that it spent on them, including the emulated latency.
        loads: the number of programs that were loaded onto it.
        memory_bytes: the bytes of its memory that the currently loaded programs use.
    """

    inferences: int
    busy_s: float
    loads: int
    memory_bytes: int


_cores: weakref.WeakSet[Core] = weakref.WeakSet()


class Core:
    """One core, by its index within the process. Thread-safe; lives as long as its host."""

    def __init__(self, index: int, latency_s: float) -> None:
        self.index = index
        self.inferences = 0
        self.busy_s = 0.0
        self.loads = 0
        self._latency_s = latency_s
        self._done = 0.0  # the time at which the last inference ends
        self._free = threading.Lock()
        _cores.add(self)

    def __str__(self) -> str:
        return f"nc:{self.index}"

    def infer(self, run: Run, staged: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Wait until the core is free, and run a program on inputs that are already in its memory."""
        arrived = time.perf_counter()
        with self._free:
            start = max(arrived, self._done)  # a real core starts staged work before this thread wakes up
            try:
                return run(*staged)
            finally:
                now = time.perf_counter()
                self._done = max(now, start + self._latency_s)
                self.inferences += 1
                self.busy_s += self._done - start
                if self._done > now:
                    time.sleep(self._done - now)

    def reset_counters(self) -> None:
        with self._free:
            self.inferences, self.busy_s, self.loads = 0, 0.0, 0

    def after_fork(self) -> None:
        """Renew the lock in a forked child: a thread that held it does not exist there."""
        self._free = threading.Lock()


def _after_fork() -> None:
    for core in list(_cores):
        core.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

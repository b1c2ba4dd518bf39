"""An emulated NeuronCore: runs one inference at a time, takes at least so long for each, and counts.

Knows programs as something to call; refuses to know shapes and models.
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
    """What one emulated core did since the counters were last reset, and what it holds now.

    Attributes:
        inferences: how many it ran.
        busy_s: for how many seconds it ran them, the emulated latency included.
        loads: how many programs were loaded onto it.
        memory_bytes: what the programs that are loaded now take of its memory.
    """

    inferences: int
    busy_s: float
    loads: int
    memory_bytes: int


_cores: weakref.WeakSet[Core] = weakref.WeakSet()


class Core:
    """One core, by its index within the process. Lives as long as its host; any number of threads may use it.

    A plain lock says who has the core, not a Condition: lanes take a thread inside of threading's own Python code for one
    that waits for another thread (see lanes/_lane.py), and would let others have its lane.
    """

    def __init__(self, index: int, latency_s: float) -> None:
        self.index = index
        self.inferences = 0
        self.busy_s = 0.0
        self.loads = 0
        self._latency_s = latency_s
        self._done = 0.0  # when it is through with the last inference
        self._free = threading.Lock()
        _cores.add(self)

    def __str__(self) -> str:
        return f"nc:{self.index}"

    def infer(self, run: Run, staged: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Wait for the core and run a program on inputs that lie in its memory already."""
        came = time.perf_counter()
        with self._free:
            start = max(came, self._done)  # a core takes up what is staged by itself, before this thread has woken up
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
        """In a forked child: whichever thread had the core did not come along."""
        self._free = threading.Lock()


def _after_fork() -> None:
    for core in list(_cores):
        core.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

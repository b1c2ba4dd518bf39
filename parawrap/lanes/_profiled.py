"""Work in lanes while a profiler watches the caller.

A torch profiler records the thread that started it, and its state cannot be set from Python. TorchScript's fork hands
the whole thread-local state of the caller, the profiler's included, to a thread of torch's own inter-op pool; so while
a profiler is on, a lane's work runs there. It is slower than a lane's own thread, which nobody minds under a profiler.
"""

# TorchScript reads this file's source: no postponed annotations, and no comments for checkers beside `return`.
# mypy: disable-error-code="no-any-return, no-untyped-call"
# pyright: reportReturnType=false

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["fork", "is_profiling"]

_C: Any = torch._C
_waiting: dict[int, Callable[[], object]] = {}
_tickets = itertools.count()


def is_profiling() -> bool:
    """Whether a profiler records the calling thread."""
    return bool(_C._autograd._profiler_enabled())


def fork(work: Callable[[], object]) -> None:
    """Start `work` in a thread that shares the caller's profiler; it must not raise."""
    ticket = next(_tickets)
    _waiting[ticket] = work
    _compiled_start()(ticket)


@torch.jit.ignore  # type: ignore[untyped-decorator]
def _run(ticket: int) -> int:
    _waiting.pop(ticket)()
    return ticket


def _lane(ticket: int) -> int:
    return _run(ticket)


def _start(ticket: int) -> torch.jit.Future[int]:
    return torch.jit.fork(_lane, ticket)


@functools.cache
def _compiled_start() -> Any:
    """Compiled when the first profiled call is made: a few milliseconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is frozen upstream, not removed
        return torch.jit.script(_start)

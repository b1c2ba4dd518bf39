"""Carry torch's thread-local modes from the caller into a lane for one task.

A new thread starts with torch's defaults: gradients on, no inference mode, no autocast, no default device, an empty
context. The number of threads that an operator may use is a mode of a thread too.
"""

from __future__ import annotations

import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import repeat
from typing import NamedTuple, TypeVar

import torch

from parawrap.lanes._private_names import (
    DeviceContext,
    dispatch_modes,
    forward_ad_level,
    function_modes,
    functorch_level,
    profiler_runs,
    saved_tensor_hooks,
)

__all__ = ["Modes", "intra_op_threads", "sees_only_its_own_thread", "settle"]

T = TypeVar("T")


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype


class Modes(NamedTuple):
    """The modes of one thread at one moment. Immutable; any number of threads may run under them at once.

    `profiling` is True if a profiler records the thread. It cannot be carried: it records the thread that started it.
    """

    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]  # empty when it is off for every kind
    autocast_cache: bool
    default_device: torch.device | None
    context: contextvars.Context
    profiling: bool
    kinds: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]  # of autocast by kind, which a model may switch on itself; empty for torch's defaults

    @classmethod
    def capture(cls, kind: str) -> Modes:
        """Return the calling thread's modes; autocast for the CPU and for that kind of device."""
        kinds, defaults = _kinds_with_autocast(kind)
        dtypes = tuple(map(torch.get_autocast_dtype, kinds))
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            _autocast(kinds) if any(map(torch.is_autocast_enabled, kinds)) else (),
            torch.is_autocast_cache_enabled(),
            _default_device(),
            contextvars.copy_context(),
            profiler_runs(),
            kinds,
            () if dtypes == defaults else dtypes,
        )

    def run(self, work: Callable[[], T], device: torch.device, home: torch.device | None) -> T:
        """Run `work` in this thread under these modes, and restore the thread's own.

        If the default device is the model's home, it means "where the model is", which in a lane is the lane's device. No
        default device is the CPU, so the same holds for a model on the CPU.
        """
        default_device = self.default_device
        if device != home and home is not None:
            default_device = _default_in_lane(default_device, device, home)
        if self.inference != torch.is_inference_mode_enabled():
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                return self._run_with_autocast(work, default_device)
        with torch.set_grad_enabled(self.grad):
            if not self.autocast and default_device is None and not self.dtypes:
                return self.context.copy().run(work)  # a context can be entered by one thread at a time
            return self._run_with_autocast(work, default_device)

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        """Run the block, in the thread of these modes, without autocast."""
        with ExitStack() as stack:
            for each in self.autocast:
                if each.enabled:
                    stack.enter_context(torch.autocast(each.kind, enabled=False))
            yield

    def _run_with_autocast(self, work: Callable[[], T], default_device: torch.device | None) -> T:
        context = self.context.copy()
        states = self.autocast or tuple(map(_Autocast, self.kinds, repeat(False), self.dtypes))
        before = _autocast(self.kinds)
        cache_before = torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(states, cache=self.autocast_cache)
            return _run_with_device(context, work, default_device)
        finally:
            # The casts that this lane cached belong to this call: the last one out of the nest clears them.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            _set_autocast(before, cache=cache_before)


def sees_only_its_own_thread() -> bool:
    """True if something watches the calling thread and cannot follow into a lane: the call must then run plainly.

    Tracers and compilers record what one thread does. A dispatch mode (a FLOP counter, fake tensors), a function mode, and
    a functorch transform live in one thread. Copies of parameters lose the tangents of forward-mode autograd. Hooks on
    saved tensors depend on the order of their calls.
    """
    functions = function_modes()
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or dispatch_modes() > 0
        or saved_tensor_hooks(False) is not None
        or functorch_level() is not None
        or forward_ad_level() >= 0
        or (functions and not all(isinstance(mode, DeviceContext) for mode in functions))
    )


def _default_in_lane(default: torch.device | None, device: torch.device, home: torch.device) -> torch.device | None:
    return device if (torch.device("cpu") if default is None else default) == home else default


def _default_device() -> torch.device | None:
    """The innermost default device, of ``torch.set_default_device`` or of ``with torch.device(...)``."""
    modes = function_modes()
    devices = [mode.device for mode in modes if isinstance(mode, DeviceContext)] if modes else []
    return devices[-1] if devices else None


def _run_with_device(context: contextvars.Context, work: Callable[[], T], device: torch.device | None) -> T:
    if device is None:
        return context.run(work)
    with device:
        return context.run(work)


@functools.cache
def _kinds_with_autocast(kind: str) -> tuple[tuple[str, ...], tuple[torch.dtype, ...]]:
    """The CPU and that kind if they have autocast, and the dtypes that a new thread finds for them."""
    kinds = tuple(each for each in dict.fromkeys(("cpu", kind)) if torch.amp.is_autocast_available(each))
    found: list[torch.dtype] = []
    thread = threading.Thread(target=lambda: found.extend(map(torch.get_autocast_dtype, kinds)))
    thread.start()
    thread.join()
    return kinds, tuple(found)


def _autocast(kinds: Iterable[str]) -> tuple[_Autocast, ...]:
    return tuple(_Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(states: Iterable[_Autocast], *, cache: bool) -> None:
    for state in states:
        torch.set_autocast_enabled(state.kind, state.enabled)
        torch.set_autocast_dtype(state.kind, state.dtype)
    torch.set_autocast_cache_enabled(cache)


# Threads of operators

_counting = threading.Lock()
_inside = 0
_outside = 0
_seen = threading.local()


def settle(threads: int) -> None:
    """Set the calling thread's count of intra-op threads for good; the first thing that a lane's thread does.

    A new thread must read its count before it sets one, or its first parallel operator undoes the setting.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)
    _seen.yes = True


class intra_op_threads:  # noqa: N801
    """Let operators of the calling thread use that many threads inside the ``with`` block (None: as many as before).

    torch.set_num_threads sets the calling thread's count, and also the count that a thread takes when it runs its first
    operator. A caller that lowers its count must therefore restore it. A caller that runs its first operator while another
    one has lowered the count would take the lowered one for its own; it gets back the count from before.
    """

    __slots__ = ("_before", "_threads")

    def __init__(self, threads: int | None) -> None:
        self._threads = threads
        self._before = 0  # 0: nothing was changed

    def __enter__(self) -> None:
        global _inside, _outside
        count = torch.get_num_threads()
        if self._threads is None or (count == self._threads and getattr(_seen, "yes", False)):
            return
        with _counting:
            if _inside == 0:
                _outside = count
            elif not getattr(_seen, "yes", False):
                count = _outside
            _inside += 1
        _seen.yes = True
        self._before = count
        torch.set_num_threads(self._threads)

    def __exit__(self, *error: object) -> None:
        global _inside
        if self._before:
            with _counting:
                _inside -= 1
            torch.set_num_threads(self._before)

"""torch's thread-local modes: read in the caller, set in the lane for one piece of work, and put back.

A new thread starts with torch's defaults: gradients on, no inference mode, no autocast, no default device, an empty
context. What a caller has switched on must therefore be carried. A profiler cannot be carried by setting a flag:
``_profiled.py`` does it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

__all__ = ["Modes", "sees_only_its_own_thread"]

T = TypeVar("T")

_C: Any = torch._C  # what torch tells of the thread's state has no public name and no types
# torch has it since 2.8; before that, hooks on saved tensors are not seen here.
_top_hooks: Callable[[bool], object] = getattr(_C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
_set_grad_enabled: Callable[[bool], None] = _C._set_grad_enabled  # what torch.set_grad_enabled makes an object for


class _Autocast(NamedTuple):
    kind: str
    enabled: bool
    dtype: torch.dtype


class Modes(NamedTuple):
    """The modes of one thread at one moment. Immutable; may be applied in any number of threads at once."""

    grad: bool
    inference: bool
    autocast: tuple[_Autocast, ...]  # empty when it is off for every kind
    autocast_cache: bool
    default_device: torch.device | None
    context: contextvars.Context

    @classmethod
    def capture(cls, kind: str) -> Modes:
        """The calling thread's modes; autocast is read for the CPU and for that kind of device."""
        kinds = _kinds_with_autocast(kind)
        autocast = _autocast(kinds) if any(map(torch.is_autocast_enabled, kinds)) else ()
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            autocast,
            torch.is_autocast_cache_enabled(),
            _default_device(),
            contextvars.copy_context(),
        )

    def run(self, work: Callable[[], T], device: torch.device, home: torch.device | None) -> T:
        """Run `work` in this thread under these modes, and leave the thread as it was.

        A default device that is the model's home stands for "where the model is": in a lane that is the lane's device.
        So does none at all, which is the CPU, for a model whose home is the CPU.
        """
        default_device = _default_in_lane(self.default_device, device, home)
        if self.inference != torch.is_inference_mode_enabled():
            with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad):
                return self._run_with_autocast(work, default_device)
        before = torch.is_grad_enabled()
        _set_grad_enabled(self.grad)
        try:
            if not self.autocast and default_device is None:
                return self._own_context().run(work)
            return self._run_with_autocast(work, default_device)
        finally:
            _set_grad_enabled(before)

    def _own_context(self) -> contextvars.Context:
        return self.context.copy()  # one can be entered by one thread at a time

    def _run_with_autocast(self, work: Callable[[], T], default_device: torch.device | None) -> T:
        context = self._own_context()
        if not self.autocast:
            return _run_with_device(context, work, default_device)
        before = _autocast(state.kind for state in self.autocast)
        cache_before = torch.is_autocast_cache_enabled()
        torch.autocast_increment_nesting()
        try:
            _set_autocast(self.autocast, cache=self.autocast_cache)
            return _run_with_device(context, work, default_device)
        finally:
            # The casts that this lane cached belong to this call: the last one out of the nest clears them.
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            _set_autocast(before, cache=cache_before)


def sees_only_its_own_thread() -> bool:
    """Whether something watches the calling thread that cannot follow into a lane: the call must then run plainly.

    Tracers and compilers record what one thread does; a dispatch mode (a FLOP counter, fake tensors), a function mode
    and a functorch transform live in one thread; hooks on saved tensors count on the order in which they are called.
    """
    return (
        torch.compiler.is_compiling()
        or _C._get_tracing_state() is not None
        or _C._len_torch_dispatch_stack() > 0
        or _top_hooks(False) is not None
        or _C._functorch.peek_interpreter_stack() is not None
        or (_C._len_torch_function_stack() > 0 and not _only_default_devices())
    )


def _default_in_lane(default: torch.device | None, device: torch.device, home: torch.device | None) -> torch.device | None:
    if home is None or device == home:
        return default
    return device if (torch.device("cpu") if default is None else default) == home else default


def _only_default_devices() -> bool:
    return all(isinstance(mode, DeviceContext) for mode in _function_modes())


def _default_device() -> torch.device | None:
    """The innermost default device, of ``torch.set_default_device`` or of ``with torch.device(...)``."""
    if _C._len_torch_function_stack() == 0:
        return None
    devices = [mode.device for mode in _function_modes() if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else None


def _run_with_device(context: contextvars.Context, work: Callable[[], T], device: torch.device | None) -> T:
    if device is None:
        return context.run(work)
    with device:
        return context.run(work)


@functools.cache
def _kinds_with_autocast(kind: str) -> tuple[str, ...]:
    return tuple(each for each in dict.fromkeys(("cpu", kind)) if torch.amp.is_autocast_available(each))


def _autocast(kinds: Iterable[str]) -> tuple[_Autocast, ...]:
    return tuple(_Autocast(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(states: Iterable[_Autocast], *, cache: bool) -> None:
    for state in states:
        torch.set_autocast_enabled(state.kind, state.enabled)
        torch.set_autocast_dtype(state.kind, state.dtype)
    torch.set_autocast_cache_enabled(cache)

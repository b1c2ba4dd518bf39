"""Replace methods of one module while a block is open."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from parawrap.engine._lane_calls import Entry
from parawrap.replicas import COMPILED_CALL, PlainView, StandIn, compiler, put, restore

__all__ = ["Caller", "PatchedMethods"]

_rewriting = threading.RLock()


class Caller(Protocol):
    """The session that runs the calls of the replaced methods."""

    def call(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class PatchedMethods:
    """Puts stand-ins into the module's ``__dict__`` and removes them again. The class never changes.

    Several blocks may be open on one module, in any threads; a global lock serializes the changes. Stand-ins send calls
    to the caller that `send_to` sets, and hold only a weak reference to it.
    """

    def __init__(self, module: torch.nn.Module, methods: Sequence[str]) -> None:
        self._module = module
        self._methods = methods
        self._route = _Route()
        self._view = PlainView()
        self._running = _Running()
        self._stand_ins: dict[str, StandIn] = {}  # reused when the block is entered again

    def send_to(self, caller: Caller | None) -> None:
        """Send later calls to `caller`; if it is None, run them plainly."""
        self._route.caller = _no_caller if caller is None else weakref.ref(caller)

    def make_plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one. The stand-ins call plainly inside it."""
        return functools.partial(_plainly, self._running, function)

    def install(self) -> None:
        """Send every call of the methods to the caller, through any reference to the module."""
        with _rewriting:
            for name in dict.fromkeys(self._methods):
                plain = getattr(self._module, name)
                if name not in self._stand_ins or self._stand_ins[name].__wrapped__ != plain:
                    self._stand_ins[name] = self._stand_in(name, plain)
            # module.compile() would trace through the stand-in and run the batch as one.
            put(self._module, self._view, self._stand_ins, hidden=(COMPILED_CALL,))

    def _stand_in(self, name: str, plain: Callable[..., Any]) -> StandIn:
        entry = Entry(self.make_plain(plain), name, plain)
        is_outside = functools.partial(_is_outside, self._running)
        return StandIn(plain, _make_stand_in(self._route, entry), _exclude_from_compile(is_outside))

    def uninstall(self) -> None:
        """Restore the module. Other blocks on it go on."""
        with _rewriting:
            restore(self._module, self._stand_ins)


def _no_caller() -> None:
    """Return None, before a block opens and after it ends: stand-ins that are still referenced call plainly."""


class _Route:
    """The current target of the calls of one module's stand-ins."""

    def __init__(self) -> None:
        self.caller: Callable[[], Caller | None] = _no_caller


class _Running(threading.local):
    """True in a thread that runs the module plainly."""

    plain: bool = False


def _plainly(running: _Running, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, running.plain = running.plain, True
    try:
        return method(*args, **kwargs)
    finally:
        running.plain = before


def _is_outside(running: _Running) -> bool:
    """True if a call must go through its block. A call inside a plain call goes straight to the method."""
    return not running.plain


def _make_stand_in(route: _Route, entry: Entry) -> Callable[..., Any]:
    """Return the function behind a stand-in."""

    def called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return wrapped(*args, **kwargs)
        caller = route.caller()
        return entry.plain(*args, **kwargs) if caller is None else caller.call(entry, args, kwargs)

    return _exclude_from_compile(called)


def _exclude_from_compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude the function, and everything that it calls, from torch.compile, if torch.compile is loaded.

    Loading it takes a second. If it is loaded later, a call that it compiles runs plainly, as part of the graph.
    """
    return function if compiler() is None else torch.compiler.disable(function)

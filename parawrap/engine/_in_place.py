"""The methods of one module, rewritten for as long as a block is open."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch

from parawrap.engine._entry import Entry
from parawrap.replicas import StandIn, put, restore, without_stand_ins

__all__ = ["InPlace", "Owner"]

_rewriting = threading.RLock()


class Owner(Protocol):
    """Whose block it is: what calls of the rewritten methods go through."""

    def call_through(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class InPlace:
    """Puts stand-ins into the module's ``__dict__`` and takes them out again; the class is never touched.

    Any number of them may be open on one module, in any threads; one lock for all keeps their order.
    """

    def __init__(self, module: torch.nn.Module, methods: Sequence[str], owner: Owner) -> None:
        self._module = module
        self._methods = methods
        self._owner = weakref.ref(owner)  # one that nobody has any more is not kept by what it rewrote
        self._replaced: list[tuple[str, Any, Any]] = []

    def install(self) -> None:
        """Every call of one of the methods goes through the owner from now on, by whichever reference it comes."""
        with _rewriting:
            self._install()

    def _install(self) -> None:
        if getattr(self._module, "_compiled_call_impl", None) is not None:
            # module.compile() would trace through the stand-in and run the batch as one.
            self._replace("_compiled_call_impl", None)
        for name in dict.fromkeys(self._methods):
            plain = getattr(self._module, name)
            self._replace(name, StandIn(plain, partial(_called, self._owner, Entry(plain, name))))
        # copy, deepcopy and pickle take a module's state from this: theirs is a plain module.
        self._replace("__getstate__", StandIn(self._module.__getstate__, _state))

    def uninstall(self) -> None:
        """Put everything back.

        Raises:
            SessionError: another block, opened later on the module, is still open; nothing was changed then.
        """
        with _rewriting:
            restore(self._module, self._replaced)
            self._replaced = []

    def _replace(self, name: str, value: Any) -> None:
        self._replaced.append((name, value, put(self._module, name, value)))


def _state(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    state = wrapped(*args, **kwargs)
    return without_stand_ins(state) if isinstance(state, dict) else state


def _called(owner: weakref.ref[Owner], entry: Entry, wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    alive = owner()
    return entry.plain(*args, **kwargs) if alive is None else alive.call_through(entry, args, kwargs)

"""The methods of one module, rewritten for as long as a block is open."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from parawrap.engine._entry import Entry, Spared
from parawrap.lanes import current_lane
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
        may_spare = hasattr(self._module, "training")  # by which such calls are told apart; a frozen module has lost it
        for name in dict.fromkeys(self._methods):
            plain = getattr(self._module, name)
            entry = Entry(plain, name, Spared() if may_spare else None)
            self._replace(name, StandIn(plain, _through(self._owner, entry, self._module)))
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


def _through(owner: weakref.ref[Owner], entry: Entry, module: torch.nn.Module) -> Callable[..., Any]:
    """What a stand-in calls: the owner's way for the call, or the plain method where there is no owner any more."""
    # First of all, and here: a small model's call takes a few microseconds, and this less than one.
    tickets = {} if entry.spared is None else entry.spared.tickets
    tensor, is_grad_enabled = torch.Tensor, torch.is_grad_enabled

    def called(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        if tickets and not kwargs and len(args) == 1:
            (x,) = args
            if type(x) is tensor and x.is_cpu:
                left = tickets.get((x.shape, is_grad_enabled(), module.training))
                if left is not None and current_lane() is None and next(left, None) is not None:
                    return wrapped(x)
        alive = owner()
        return entry.plain(*args, **kwargs) if alive is None else alive.call_through(entry, args, kwargs)

    return called

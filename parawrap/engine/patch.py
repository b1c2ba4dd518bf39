"""Replace methods of one module while a block is open.

The class never changes, and the block leaves no trace.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from parawrap._private_names import COMPILED_CALL
from parawrap.engine.call import NOWHERE, Entry, Stub
from parawrap.tree import ABSENT

# It protects the stubs of all modules. Calls do not take it: each line below leaves a ``__dict__``
# that another thread may call through. Reentrant: a finalizer or a signal handler may close another
# block in this thread meanwhile.
_rewriting = threading.RLock()


class PlainView(dict[str, Any]):
    """The ``__dict__`` of a module inside a block.

    Attribute lookup, which is C code, finds the stubs. Python code that reads or copies the dict
    finds what was there before, so copies, clones, and pickles of the module are plain modules.
    """

    # A subclass of dict, because an object takes no other ``__dict__``. C code reads the entries of
    # the dict itself, past the methods below; `dict.get(view, name)` does the same.

    def __init__(self, before: dict[str, Any], entries: dict[str, Any]) -> None:
        super().__init__(entries)
        self._before = before
        self._entries = entries  # of `before` when the view took its place
        # A compiled call would trace through the stub and run the batch as one.
        self._compiled = dict.get(self, COMPILED_CALL)
        if self._compiled is not None:
            dict.__setitem__(self, COMPILED_CALL, None)

    @classmethod
    def open(cls, module: torch.nn.Module) -> None:
        """Put a view into the place of the module's ``__dict__``."""
        before = vars(module)
        # The list is a copy, which is one step: other threads may set attributes.
        entries = dict([*dict.items(before)])
        view = cls(before, entries)
        # One step: other threads see the dict or the view.
        object.__setattr__(module, "__dict__", view)
        _bring_late_writes(before, entries, view)

    def close(self, module: torch.nn.Module) -> None:
        """Give the module its own ``__dict__`` back, with all that was set in the meantime."""
        seen = self.plain()
        now = dict(seen)
        # None is what the view has put there; another value was set inside the block.
        if self._compiled is not None and now.get(COMPILED_CALL) is None:
            now[COMPILED_CALL] = self._compiled
        # Only what the block has changed: a thread that took the dict before the block, and reads
        # or writes it still, finds each attribute that stays at any moment, and keeps its writes.
        # New entries come before old ones go
        for name, value in now.items():
            if value is not self._entries.get(name, ABSENT):
                dict.__setitem__(self._before, name, value)
        for name in self._entries:
            if name not in now:
                dict.pop(self._before, name, None)
        # One step: other threads see the view or the finished dict.
        object.__setattr__(module, "__dict__", self._before)
        _bring_late_writes(self.plain(), seen, self._before)

    def names_of_stubs(self) -> set[str]:
        """Return the names of the entries that are stubs."""
        # The list is a copy, which is one step: other threads may set attributes.
        return {name for name, value in [*dict.items(self)] if type(value) is Stub}

    def plain(self) -> dict[str, Any]:
        """Return the items with what lies under the stubs."""
        found: dict[str, Any] = {}
        # The list is a copy, which is one step: other threads may set attributes.
        for name, value in [*dict.items(self)]:
            under = _under(value, name)
            if under is not ABSENT:
                found[name] = under
        return found

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        under = _under(value, name)
        # A method of the class has no entry to return. A reader that found its name gets the stub.
        return value if under is ABSENT else under

    def __iter__(self) -> Iterator[str]:
        return iter(self.plain())

    def keys(self) -> Any:
        return self.plain().keys()

    def values(self) -> Any:
        return self.plain().values()

    def items(self) -> Any:
        return self.plain().items()

    copy = __copy__ = plain

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.plain(),)


class PatchedMethods:
    """Puts stubs into the module's ``__dict__``, and removes them again.

    Several blocks may be open on one module, in any threads; a global lock serializes the changes.
    """

    def __init__(self, module: torch.nn.Module, methods: Sequence[str]) -> None:
        self._module = module
        self._methods = methods
        self._stubs: dict[str, Stub] = {}

    # No loop of Python in the two blocks below: see `Lanes.send`

    def install(self, calls: Any) -> None:
        """Send every call of the methods to the `call` of a session.

        This includes calls through any other reference to the module.
        """
        with _rewriting:
            self._install(calls)

    def uninstall(self) -> None:
        """Restore the module.

        Other blocks on it go on, and what other code has put over a stub stays.
        """
        with _rewriting:
            self._uninstall()

    def _install(self, calls: Any) -> None:
        module = self._module
        # Blocks on one module share one view, which the last of them closes.
        if not isinstance(vars(module), PlainView):
            PlainView.open(module)
        own = vars(module)
        # The module does not keep the session alive. Without a session, stubs call plainly.
        find_calls = weakref.ref(calls)
        for name in dict.fromkeys(self._methods):
            plain = getattr(module, name)
            stub = Stub(plain, dict.get(own, name, ABSENT), name)
            of_class = getattr(type(module), name, None)
            entry = Entry(partial(_call_plainly, module, stub, name, of_class), name)
            # The stub has its route before another thread can call it.
            stub._self_route = find_calls, entry
            # Noted first: an interrupt after the second line must leave no stub that `uninstall`
            # does not know.
            self._stubs[name] = stub
            dict.__setitem__(own, name, stub)

    def _uninstall(self) -> None:
        own = vars(self._module)
        for name, stub in self._stubs.items():
            # First: a thread that still holds the stub, or a wrapper over it, calls plainly.
            stub._self_route = NOWHERE
            _remove_stub(own, name, stub)
        self._stubs = {}
        if isinstance(own, PlainView) and not own.names_of_stubs():
            own.close(self._module)


def _remove_stub(own: dict[str, Any], name: str, stub: Stub) -> None:
    """Remove a stub from the ``__dict__`` of a module, wherever it lies."""
    top, under = dict.get(own, name), stub._self_under
    if top is stub and under is ABSENT:
        dict.pop(own, name)
    elif top is stub:
        dict.__setitem__(own, name, under)
    # Blocks may close in any order. A stub over this one now lies over what was under this one.
    # This one keeps its own `under`, for a call that is walking the chain.
    while type(top) is Stub:
        if top._self_under is stub:
            top._self_under = under
        top = top._self_under
    # Under the names that other code has given the stub, the plain method stays. The list is a
    # copy, which is one step: other threads may set attributes.
    for other, value in [*dict.items(own)]:
        if value is stub:
            dict.__setitem__(own, other, stub.__wrapped__)


def _bring_late_writes(old: dict[str, Any], seen: dict[str, Any], new: dict[str, Any]) -> None:
    """Bring what other threads have written into a dict between its copy and the end of its use.

    `seen` is the copy, and `new` the dict that has taken the place of `old`. Python has no step
    that compares and writes: if a thread writes an attribute twice while a block opens or closes,
    and the second write comes between the two halves of the line below, the first one stays.
    """
    entries = dict([*dict.items(old)])
    changed = []
    for name in {**seen, **entries}:
        then, now = seen.get(name, ABSENT), entries.get(name, ABSENT)
        if now is not then:
            changed.append((name, then, now))
    for name, then, now in changed:
        if now is ABSENT:
            dict.pop(new, name, None)
        elif dict.get(new, name, ABSENT) is then:  # else another write came later
            dict.__setitem__(new, name, now)


def _call_plainly(
    module: torch.nn.Module, stub: Stub, name: str, of_class: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call the method that a stub stands for.

    If the method of the class was replaced while the block is open, call the new one.
    """
    now = getattr(type(module), name, None)
    # An attribute of the instance comes before the class, so a new method of the class is not used.
    if now is of_class or stub._self_under is not ABSENT:
        return stub.__wrapped__(*args, **kwargs)
    return now.__get__(module)(*args, **kwargs)  # type: ignore[union-attr]


def _under(value: Any, name: str) -> Any:
    """Return the value that was in the place of a stub before the first one.

    Other code may have stored the stub under another name, as `accelerate` does: that entry is the
    method itself. Return any other value as it is.
    """
    if type(value) is Stub and value._self_name != name:
        return original_method(value)
    while type(value) is Stub:
        value = value._self_under
    return value


def original_method(value: Any) -> Any:
    """Return the method under all stubs."""
    while type(value) is Stub:
        value = value.__wrapped__
    return value

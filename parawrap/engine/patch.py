"""Replace methods of one module while a block is open.

The class never changes, and the block leaves no trace. Inside the block, the ``__dict__`` of the
module is a `PlainView`. It has a stub (`Stub` in `call.py`) for each replaced method. A stub sends
a call to the block, or calls the plain method.
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

# Protects the stubs of all modules while blocks open and close. Calls do not take it: after each
# line below, another thread may call the module. Reentrant, since a finalizer or a signal handler
# may close another block in this thread meanwhile
_rewriting = threading.RLock()


class PlainView(dict[str, Any]):
    """The ``__dict__`` of a module inside a block.

    Attribute lookup, which is C code, finds the stubs. Python code that reads or copies the dict
    finds what was there before, so copies, clones, and pickles of the module are plain modules.
    """

    # A subclass of dict, because Python refuses any other ``__dict__``. C code reads the entries of
    # the dict itself, past the methods below. So does `dict.get(view, name)`.

    def __init__(self, before: dict[str, Any], entries: dict[str, Any]) -> None:
        super().__init__(entries)
        # The module's own ``__dict__``, and a copy of its entries from when the block opened
        self._before = before
        self._entries = entries
        # torch would call the compiled code instead of the stub, and run the batch whole
        self._compiled = dict.get(self, COMPILED_CALL)
        if self._compiled is not None:
            dict.__setitem__(self, COMPILED_CALL, None)

    @classmethod
    def open(cls, module: torch.nn.Module) -> None:
        """Replace the module's ``__dict__`` by a view with the same entries."""
        before = vars(module)
        # The list, here and below, is made in one step: other threads may set attributes
        entries = dict([*dict.items(before)])
        view = cls(before, entries)
        # One step: other threads see the dict or the view
        object.__setattr__(module, "__dict__", view)
        _move_late_writes(before, entries, view)

    def close(self, module: torch.nn.Module) -> None:
        """Give the module its own ``__dict__`` back, with all attributes set inside the block."""
        seen = self.make_plain()
        now = dict(seen)
        # The view has put None there. Another value was set inside the block, and stays
        if self._compiled is not None and now.get(COMPILED_CALL) is None:
            now[COMPILED_CALL] = self._compiled
        # Another thread may still hold this dict from before the block, and read or write it. So
        # only entries that have changed are written, and new ones come before old ones go: at each
        # moment, the thread finds all attributes that stay
        for name, value in now.items():
            if value is not self._entries.get(name, ABSENT):
                dict.__setitem__(self._before, name, value)
        for name in self._entries:
            if name not in now:
                dict.pop(self._before, name, None)
        # One step: other threads see the view or the finished dict
        object.__setattr__(module, "__dict__", self._before)
        _move_late_writes(self.make_plain(), seen, self._before)

    def names_of_stubs(self) -> set[str]:
        """Return the names of the entries that are stubs."""
        return {name for name, value in [*dict.items(self)] if type(value) is Stub}

    def make_plain(self) -> dict[str, Any]:
        """Return a dict of the entries, with the values that the stubs replace."""
        found: dict[str, Any] = {}
        for name, value in [*dict.items(self)]:
            replaced = _replaced_value(value, name)
            if replaced is not ABSENT:
                found[name] = replaced
        return found

    def __getitem__(self, name: str) -> Any:
        value = dict.__getitem__(self, name)
        replaced = _replaced_value(value, name)
        # ABSENT: a method of the class, which had no entry. A reader that finds its name in another
        # way gets the stub
        return value if replaced is ABSENT else replaced

    def __iter__(self) -> Iterator[str]:
        return iter(self.make_plain())

    def keys(self) -> Any:
        return self.make_plain().keys()

    def values(self) -> Any:
        return self.make_plain().values()

    def items(self) -> Any:
        return self.make_plain().items()

    copy = __copy__ = make_plain

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.make_plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.make_plain(),)


class PatchedMethods:
    """The stubs of one block in the module's ``__dict__``.

    Several blocks may be open on one module, in any threads; a global lock serializes the changes.
    """

    def __init__(self, module: torch.nn.Module, methods: Sequence[str]) -> None:
        self._module = module
        self._methods = methods
        self._stubs: dict[str, Stub] = {}

    # The loops are in other functions. Directly in the block of a lock, Ctrl-C in the jump backward
    # could keep the lock: see `Lanes.send`

    def install(self, calls: Any) -> None:
        """Put a stub over each method, which sends calls to `calls.call`.

        This includes calls through any other reference to the module.
        """
        with _rewriting:
            self._install(calls)

    def uninstall(self) -> None:
        """Remove the stubs of this block.

        Stubs of other blocks stay, and so does a wrapper that other code has put over a stub.
        """
        with _rewriting:
            self._uninstall()

    def _install(self, calls: Any) -> None:
        module = self._module
        # Blocks on one module share one view, which the last of them closes
        if not isinstance(vars(module), PlainView):
            PlainView.open(module)
        view = vars(module)
        # The module does not keep the session alive. Without a session, stubs call plainly
        find_calls = weakref.ref(calls)
        for name in dict.fromkeys(self._methods):  # each name once
            plain = getattr(module, name)
            stub = Stub(plain, dict.get(view, name, ABSENT), name)
            of_class = getattr(type(module), name, None)
            entry = Entry(partial(_call_plainly, module, stub, name, of_class), name)
            # Before another thread can call the stub
            stub._self_route = find_calls, entry
            # In this order: after Ctrl-C in between, `uninstall` finds each stub of the view here
            self._stubs[name] = stub
            dict.__setitem__(view, name, stub)

    def _uninstall(self) -> None:
        view = vars(self._module)
        for name, stub in self._stubs.items():
            # First: a thread that still holds the stub, or a wrapper over it, calls plainly
            stub._self_route = NOWHERE
            _remove_stub(view, name, stub)
        self._stubs = {}
        # Ctrl-C at the beginning of `install` may have left the module without a view
        if isinstance(view, PlainView) and not view.names_of_stubs():
            view.close(self._module)


def _remove_stub(view: dict[str, Any], name: str, stub: Stub) -> None:
    """Remove a stub from the ``__dict__`` of a module, also from under other stubs."""
    top, under = dict.get(view, name), stub._self_under
    if top is stub and under is ABSENT:
        dict.pop(view, name)
    elif top is stub:
        dict.__setitem__(view, name, under)
    # Blocks may close in any order. A stub over this one gets the value that was under this one.
    # This one keeps the value too, for a call that is going through the stubs
    while type(top) is Stub:
        if top._self_under is stub:
            top._self_under = under
        top = top._self_under
    # Other code may have stored the stub under other names. The plain method takes its place
    for other, value in [*dict.items(view)]:
        if value is stub:
            dict.__setitem__(view, other, stub.__wrapped__)


def _move_late_writes(old: dict[str, Any], seen: dict[str, Any], new: dict[str, Any]) -> None:
    """Repeat in `new` what other threads have written into `old` after it was copied.

    `seen` is the copy, and `new` has replaced `old` as the module's ``__dict__``. Python has no
    step that compares and writes. So if a thread writes an attribute twice while a block opens or
    closes, and the second write comes between the comparison and the write below, the attribute
    keeps the first value.
    """
    entries = dict([*dict.items(old)])
    for name in {**seen, **entries}:
        before, now = seen.get(name, ABSENT), entries.get(name, ABSENT)
        if now is before:
            continue
        if now is ABSENT:
            dict.pop(new, name, None)
        elif dict.get(new, name, ABSENT) is before:  # else another thread has written `new` since
            dict.__setitem__(new, name, now)


def _call_plainly(
    module: torch.nn.Module, stub: Stub, name: str, of_class: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Call the method that a stub stands for.

    `of_class` is the method of the class when the block opened. If the class has another method
    now, call that one.
    """
    now = getattr(type(module), name, None)
    # An attribute of the instance hides the method of the class, also a new one
    if now is of_class or stub._self_under is not ABSENT:
        return stub.__wrapped__(*args, **kwargs)
    return now.__get__(module)(*args, **kwargs)  # type: ignore[union-attr]


def _replaced_value(value: Any, name: str) -> Any:
    """Return the value that an entry had before the first stub; ABSENT if it had none.

    If other code has stored a stub under another name, as `accelerate` does, return the method
    itself. Return a value that is not a stub as it is.
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

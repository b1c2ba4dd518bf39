"""Functions that ranks keep between calls, so that a later call brings only its arguments.

::

    launching process                                       rank
    KeptFunctions: function and its parts ── key ──► KeptCall: the call that brought the function

A kept function behaves as if each call had brought it: the rank makes it again for each call, and
the launching process compares its parts before each.
"""

from __future__ import annotations

import sys
import types
from itertools import count
from operator import is_
from pkgutil import resolve_name
from typing import Any, NamedTuple

from parawrap.tree import PLAIN

UNASSIGNED = types.CellType()
"""Equals the cell of a variable that is not assigned yet."""

_LARGEST_KEPT = 4096  # bytes of a text in a closure; a guess: longer ones rarely come twice
_MOST_FUNCTIONS = 32  # a guess: a loop of training and evaluation calls a few


# -- in the launching process


class KeptFunction(NamedTuple):
    """A function that the ranks keep under a key, and the parts that it had when it was sent."""

    key: int
    function: Any  # alive, so that no other function gets its id
    parts: list[Any]


class KeptFunctions:
    """The functions that the ranks keep.

    Each gets a key of its own, also when it comes again: a call whose function has not arrived can
    never find another.
    """

    def __init__(self) -> None:
        self._keys = count()
        self._kept: dict[int, KeptFunction] = {}  # by the id of the function
        self._gone: list[int] = []  # keys that the ranks may forget, and have not been told

    def find(self, function: Any, parts: list[Any]) -> KeptFunction | None:
        """Return the function if the ranks have it as it is now."""
        kept = self._kept.get(id(function))
        if kept is None or len(parts) != len(kept.parts):
            return None
        return kept if all(map(is_, parts, kept.parts)) else None

    def make(self, function: Any, parts: list[Any]) -> KeptFunction:
        """Return a function with a new key, for a call that brings it. `note` keeps it."""
        return KeptFunction(next(self._keys), function, parts)

    def gone_with(self, function: Any) -> list[int]:
        """Return the keys that the ranks may forget if they get this function."""
        gone = list(self._gone)
        if id(function) in self._kept:
            gone.append(self._kept[id(function)].key)
        elif len(self._kept) >= _MOST_FUNCTIONS:
            oldest = next(iter(self._kept.values()))
            gone.append(oldest.key)
        return gone

    def note(self, kept: KeptFunction) -> None:
        """Note that the ranks get a function or have it already, and that it was called last."""
        before = self._kept.pop(id(kept.function), None)
        if before is None or before.key != kept.key:
            self._gone.clear()  # the call that brings the function brings these keys too
            if len(self._kept) >= _MOST_FUNCTIONS:
                # A dict keeps the order of entry, which is that of the last calls here
                oldest = next(iter(self._kept))
                del self._kept[oldest]
        self._kept[id(kept.function)] = kept

    def drop(self, function: Any) -> None:
        """Forget a function that did not reach all ranks."""
        before = self._kept.pop(id(function), None)
        if before is not None:
            self._gone.append(before.key)

    def drop_all(self) -> None:
        """Forget all functions: the ranks may have them otherwise than they would be sent now."""
        self._gone += [kept.key for kept in self._kept.values()]
        self._kept.clear()


def parts_of(function: Any) -> list[Any] | None:
    """Return the parts of a function that its pickle has. They are compared by identity.

    None if the function is not kept: a part may change in place, such as a list in a closure.
    """
    if isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        is_of_module = owner is None or isinstance(owner, types.ModuleType)
        return [] if is_of_module else None
    if type(function) is not types.FunctionType or function.__dict__:
        return None
    by_key = function.__kwdefaults__ or {}
    defaults = [*(function.__defaults__ or ()), *by_key, *by_key.values()]
    values = [*defaults, *_contents_of_cells(function)]
    # Others may change in place. A variable may also be assigned later: `UNASSIGNED` is not plain
    if not all(type(each) in PLAIN for each in values):
        return None
    if any(isinstance(each, (str, bytes)) and len(each) > _LARGEST_KEPT for each in values):
        return None
    annotations = [*function.__annotations__, *function.__annotations__.values()]
    if not all(isinstance(each, (*PLAIN, type)) for each in annotations):
        return None
    names = [function.__name__, function.__qualname__, function.__module__, function.__doc__]
    # The ranks find such a function in their `__main__`, and must not find one that has gone
    is_in_main = vars(sys.modules["__main__"]).get(function.__qualname__) is function
    return [function.__code__, *names, *values, *annotations, is_in_main]


def _contents_of_cells(function: Any) -> list[Any]:
    """Return what the variables of a closure hold; `UNASSIGNED` for those without a value."""
    # Two cells with a value are compared by these, but `UNASSIGNED` has none
    cells = function.__closure__ or ()
    return [UNASSIGNED if cell == UNASSIGNED else cell.cell_contents for cell in cells]


# -- in the rank


class KeptCall:
    """A call without arguments, whose function stays in the rank.

    `call` is the dict that `SentScript` packs.
    """

    def __init__(self, call: dict[str, Any]) -> None:
        self._call = call
        self._function = function = call["the function"]
        # As they are now: the function may change its own attributes when it runs
        if call["is_by_value"]:
            self._cells = _contents_of_cells(function)
            self._defaults = function.__defaults__
            self._by_key = dict(function.__kwdefaults__ or {})
            self._annotations = dict(function.__annotations__)
            self._code = function.__code__
            self._names = function.__name__, function.__qualname__, function.__module__
            self._doc = function.__doc__

    def call_with(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the call with its arguments, and a function in the state in which it was sent."""
        function = self._copy() if self._call["is_by_value"] else self._look_up()
        notes = self._call["notes"]
        main = {
            name: function if value is self._function else value
            for name, value in notes["main"].items()
        }
        changed = {"the function": function, "args": args, "kwargs": kwargs}
        return {**self._call, **changed, "notes": {**notes, "main": main}}

    def _copy(self) -> Any:
        """Return a new function: an earlier call may have kept the last one."""
        closure = tuple(map(types.CellType, self._cells)) or None
        name, qualname, module = self._names
        globals_ = self._function.__globals__
        function = types.FunctionType(self._code, globals_, name, self._defaults, closure)
        function.__kwdefaults__ = dict(self._by_key) or None
        function.__annotations__ = dict(self._annotations)
        function.__qualname__, function.__module__ = qualname, module
        function.__doc__ = self._doc
        return function

    def _look_up(self) -> Any:
        """Return a function that the rank imports: a call may have put another one in its place."""
        function = self._function
        try:
            return resolve_name(f"{function.__module__}:{function.__qualname__}")
        except (ImportError, AttributeError, ValueError):  # such as that of a module without a name
            return function

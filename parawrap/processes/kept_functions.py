"""Functions that ranks keep between calls, so that a later call brings only its arguments.

::

    launching process                                       rank
    KeptFunctions: function and its parts ── key ──► KeptCall: the call that brought the function

A kept function behaves as if each call had brought it. For each call, the rank makes a new function
from the parts, and the launching process compares the parts before.

Keys that the ranks may forget travel with the next call that brings a function.
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

# Length of a text in a closure: a function with a longer one is not kept. A guess
_LARGEST_TEXT = 4096
_MOST_FUNCTIONS = 32  # a guess: a loop of training and evaluation calls a few


# -- in the launching process


class KeptFunction(NamedTuple):
    """A function that the ranks keep under a key, and the parts that it had when it was sent."""

    key: int
    function: Any  # alive, so that no other function gets its id
    parts: list[Any]


class KeptFunctions:
    """The functions that the ranks keep, as the launching process knows them.

    A function gets a new key each time it is sent. So a call whose function has not arrived in a
    rank never finds an older function there.

    One thread at a time uses it: `SentScript` says which.
    """

    def __init__(self) -> None:
        self._keys = count()
        self._kept: dict[int, KeptFunction] = {}  # by the id of the function, the oldest call first
        self._gone: list[int] = []  # keys that the ranks may forget, and have not been told

    def find(self, function: Any, parts: list[Any]) -> KeptFunction | None:
        """Return the function if the ranks have it as it is now, and None otherwise."""
        kept = self._kept.get(id(function))
        if kept is None or len(parts) != len(kept.parts):
            return None
        return kept if all(map(is_, parts, kept.parts)) else None

    def make(self, function: Any, parts: list[Any]) -> KeptFunction:
        """Return a function with a new key, for a call that brings it. `note` keeps it."""
        return KeptFunction(next(self._keys), function, parts)

    def gone_with(self, function: Any) -> list[int]:
        """Return the keys that the ranks may forget once they get this function."""
        gone = list(self._gone)
        replaced = self._kept.get(id(function))
        if replaced is None and len(self._kept) >= _MOST_FUNCTIONS:
            replaced = next(iter(self._kept.values()))  # the oldest, which `note` removes
        if replaced is not None:
            gone.append(replaced.key)
        return gone

    def note(self, kept: KeptFunction) -> None:
        """Note that the ranks get a function or have it already, and that it was called last."""
        before = self._kept.pop(id(kept.function), None)
        if before is None or before.key != kept.key:
            self._gone.clear()  # the call that brings the function brings these keys too
            if len(self._kept) >= _MOST_FUNCTIONS:
                del self._kept[next(iter(self._kept))]  # the oldest
        # As the last entry, whose call is the newest
        self._kept[id(kept.function)] = kept

    def drop(self, function: Any) -> None:
        """Forget a function that did not reach all ranks."""
        before = self._kept.pop(id(function), None)
        if before is not None:
            self._gone.append(before.key)

    def drop_all(self) -> None:
        """Forget all functions: from now on they travel in another way, by value or by name."""
        self._gone += [kept.key for kept in self._kept.values()]
        self._kept.clear()


def parts_of(function: Any) -> list[Any] | None:
    """Return the parts of a function that its pickle contains. They are compared by identity.

    Return None if the function cannot be kept, because a part may change in place, such as a list
    in a closure.
    """
    if isinstance(function, types.BuiltinFunctionType):
        owner = function.__self__
        is_of_module = owner is None or isinstance(owner, types.ModuleType)
        return [] if is_of_module else None
    if type(function) is not types.FunctionType or function.__dict__:
        return None
    by_key = function.__kwdefaults__ or {}
    in_order = function.__defaults__ or ()
    defaults = [len(in_order), *in_order, len(by_key), *by_key, *by_key.values()]
    values = [*defaults, *_contents_of_cells(function)]
    for value in values:
        # Others may change in place. `UNASSIGNED` is not plain: the variable may get a value later
        if type(value) not in PLAIN:
            return None
        if isinstance(value, (str, bytes)) and len(value) > _LARGEST_TEXT:
            return None
    try:
        annotations = [*function.__annotations__, *function.__annotations__.values()]
    except Exception:  # noqa: BLE001 (from Python 3.14 on, this evaluates code of the user's)
        return None
    if not all(isinstance(each, (*PLAIN, type)) for each in annotations):
        return None
    names = [function.__name__, function.__qualname__, function.__module__, function.__doc__]
    # A rank that makes a kept call again also binds the function's name in `__main__`, unless the
    # name had another object here. So this is a part: if it changes, the function is sent again
    is_in_main = vars(sys.modules["__main__"]).get(function.__qualname__, function) is function
    return [function.__code__, *names, *values, *annotations, is_in_main]


def _contents_of_cells(function: Any) -> list[Any]:
    """Return the values of the variables of a closure; `UNASSIGNED` for those without a value."""
    cells = function.__closure__ or ()
    # Two cells are equal if their values are, or if neither has one, as `UNASSIGNED`
    return [UNASSIGNED if cell == UNASSIGNED else cell.cell_contents for cell in cells]


# -- in the rank


class KeptCall:
    """A call without arguments, whose function stays in the rank.

    `call` is the dict that `SentScript` packs.
    """

    def __init__(self, call: dict[str, Any]) -> None:
        # Without the arguments: their memory would stay as long as the function
        self._call = {**call, "args": (), "kwargs": {}}
        self._function = call["the function"]
        # A copy, which is made before the first run, and which no code of the user gets: the
        # function may change its own attributes. None for a function that the rank imports
        self._unused = _copy_of(self._function) if call["is_by_value"] else None

    def call_with(self, args: Any, kwargs: Any) -> dict[str, Any]:
        """Return the call with its arguments, and a function in the state in which it was sent."""
        # A new function for each call: the user's code may keep it
        function = self._look_up() if self._unused is None else _copy_of(self._unused)
        notes = self._call["notes"]
        # `__main__` of the rank gets the function alone. Other names, such as that of a class in an
        # annotation, may have got newer objects since
        main = {name: function for name, each in notes["main"].items() if each is self._function}
        changed = {"the function": function, "args": args, "kwargs": kwargs}
        return {**self._call, **changed, "notes": {**notes, "main": main}}

    def _look_up(self) -> Any:
        """Return the function that has the name now: a call may have replaced it in its module."""
        function = self._function
        try:
            return resolve_name(f"{function.__module__}:{function.__qualname__}")
        except (ImportError, AttributeError, ValueError):  # such as a function without a module
            return function


def _copy_of(function: Any) -> Any:
    """Return a new function with the same parts, and cells of its own."""
    cells = [types.CellType(value) for value in _contents_of_cells(function)]
    copy = types.FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        tuple(cells) or None,
    )
    copy.__kwdefaults__ = dict(function.__kwdefaults__ or {}) or None
    copy.__annotations__ = dict(function.__annotations__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__doc__ = function.__doc__
    return copy

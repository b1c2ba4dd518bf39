"""What the containers of a model or of a replica hold, compared by identity in a few C calls.

A model with a hundred layers has a thousand containers: ``__dict__`` of each module, its tables of parameters, buffers,
submodules, and hooks, and the lists and dicts among its attributes. Their contents are laid out flat once. A look then is
one call of the garbage collector's `get_referents` and one comparison of memory: about 30 us for 100 layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from gc import get_referents
from itertools import accumulate, chain, compress, count, repeat
from operator import is_not
from types import CellType
from typing import Any, NamedTuple

from parawrap.tree import names_of_slots

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "absent"})()
LISTS = (list, deque, set)
_BORDER = ((),)  # between two containers, so that an object that moves from one to the next is noticed


def _addresses(things: list[Any]) -> Any:
    """Return the addresses of the items of a list, as its memory has them.

    Comparing two results compares identities, forty times as fast as a loop with ``is``.
    """
    if not things:
        return b""
    return string_at(_address_at(id(things) + _ITEMS).value or 0, len(things) * _WORD)


def _addresses_anywhere(things: list[Any]) -> Any:
    """Return the same on an interpreter with another layout of lists."""
    return [*map(id, things)]


_address_at, string_at = ctypes.c_void_p.from_address, ctypes.string_at
_WORD = ctypes.sizeof(ctypes.c_void_p)
_ITEMS = object.__basicsize__ + _WORD  # CPython keeps the address of a list's items after its length
_trial = [object(), "some", None]
_has_layout = sys.implementation.name == "cpython" and _addresses(_trial) == b"".join(
    id(each).to_bytes(_WORD, sys.byteorder) for each in _trial
)
addresses = _addresses if _has_layout else _addresses_anywhere


class Place(NamedTuple):
    """One container of a model: the object that has it, its kind, and the path to it.

    Kinds: "vars" is the ``__dict__`` of an object, "items" a dict, "list" a list, deque, or set, "slots" the slots of an
    object, and "cell" a closure cell. Any other kind is the name of a table of a module, such as ``_buffers``.
    """

    owner: Any
    kind: str
    path: str

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the place."""
        return id(self.owner), self.kind

    def name(self, key: Any) -> str:
        """Return how Python code names an entry of the container."""
        if key is None:
            return self.path
        return f"{self.path}[{key!r}]" if self.kind == "items" else f"{self.path}.{key}".lstrip(".")

    @property
    def module_path(self) -> str:
        """The path of the module that the container belongs to."""
        if self.kind == "vars" or self.kind.startswith("_"):
            return self.path
        return self.path.partition("[")[0].rpartition(".")[0]

    def container(self, owner: Any) -> Any:
        """Return the container of the owner, or of a copy of it. `Slots` and `Cell` make lists of what is none."""
        match self.kind:
            case "vars":
                return owner.__dict__
            case "items" | "list":
                return owner
            case "slots":
                return Slots(owner)
            case "cell":
                return Cell(owner)
        return owner.__dict__[self.kind]


class Slots:
    """The slots of an object, read and written like a list."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.names = names_of_slots(type(value))

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        return iter([getattr(self.value, name, ABSENT) for name in self.names])

    def __setitem__(self, index: int, part: Any) -> None:
        object.__setattr__(self.value, self.names[index], part)

    def clear(self) -> None:
        for name in self.names:
            with contextlib.suppress(AttributeError):
                object.__delattr__(self.value, name)

    def extend(self, parts: list[Any]) -> None:
        for name, part in zip(self.names, parts, strict=True):
            if part is not ABSENT:
                object.__setattr__(self.value, name, part)


class Cell(Slots):
    """A closure cell, read and written like a list of one item."""

    def __init__(self, cell: CellType) -> None:
        self.value = cell
        self.names = ["cell_contents"]

    def __iter__(self) -> Iterator[Any]:
        try:
            return iter([self.value.cell_contents])
        except ValueError:  # it is empty
            return iter([ABSENT])


class Change(NamedTuple):
    """An entry of a container that holds another object. `key` is None for a whole list."""

    place: Place
    key: Any
    before: Any
    now: Any


class Holdings:
    """The objects that the containers of one model or replica hold.

    `copy_of` returns the copy of an owner of containers; None to leave the owner out. With `owns_dicts`, an
    object whose ``__dict__`` was replaced gets its own back; without, such a change has no entries.
    """

    def __init__(self, places: Iterable[Place], copy_of: Callable[[Any], Any], *, owns_dicts: bool = False) -> None:
        self._owns_dicts = owns_dicts
        owners = ((place, copy_of(place.owner)) for place in places)
        pairs = [(place, None if owner is None else place.container(owner)) for place, owner in owners]
        dicts = [(place, each) for place, each in pairs if isinstance(each, dict)]
        lists = [(place, each) for place, each in pairs if each is not None and not isinstance(each, dict)]
        self._dict_places = [place for place, _ in dicts]
        self._list_places = [place for place, _ in lists]
        self._dicts = [each for _, each in dicts]
        self._lists = [each for _, each in lists]
        self._copy_of = copy_of  # the garbage collector finds the class and the ``__dict__`` of an object
        self._at = {place.key: (each, index) for index, (place, each) in enumerate(dicts)}
        self._at |= {place.key: (each, index) for index, (place, each) in enumerate(lists)}
        self.accept()

    def accept(self) -> None:
        """Take what is held now for what must be held."""
        self._dicts_before = [dict([*dict.items(each)]) for each in self._dicts]  # other threads may write the model's
        self._lists_before = [[*each] for each in self._lists]
        self._filled = [index for index, each in enumerate(self._dicts_before) if each]
        self._hollow = [index for index, each in enumerate(self._dicts_before) if not each]
        self._full = [self._dicts[index] for index in self._filled]
        self._full_before = [self._dicts_before[index] for index in self._filled]
        plain = [each for each in self._lists if isinstance(each, LISTS)]
        self._empty = [*[self._dicts[index] for index in self._hollow], *[each for each in plain if not each]]
        self._views = [each for each in self._lists if not isinstance(each, LISTS)]
        owners = [place.owner for place in self._dict_places if place.kind == "vars"]
        roots = [*self._full, *[each for each in plain if each], *map(self._copy_of, owners)]
        self._roots: list[Any] = [*chain.from_iterable(zip(roots, repeat(_BORDER), strict=False))]
        self.note()

    def note(self) -> None:
        """Note the objects that are held now."""
        self._held = self.read_held()
        self._known = addresses(self._held)

    def is_same(self) -> bool:
        """True if the containers hold the very same objects."""
        now = get_referents(*self._roots)
        if self._views:
            now += chain.from_iterable(self._views)
        if not _has_layout:
            return bool(_addresses_anywhere(now) == self._known and not any(self._empty))
        items = _address_at(id(now) + _ITEMS).value
        return string_at(items or 0, len(now) * _WORD) == self._known and not any(self._empty)

    def changes(self) -> list[Change]:
        """Return the entries that differ from those accepted."""
        if self._has_other_dicts() and not self._owns_dicts:
            return []
        self._return_dicts()
        found: list[Change] = []
        for index in self._find_changed():
            own, old = self._dicts[index], self._dicts_before[index]
            for key in dict.fromkeys([*old, *dict.keys(own)]):
                before, now = old.get(key, ABSENT), dict.get(own, key, ABSENT)
                if before is not now:
                    found.append(Change(self._dict_places[index], key, before, now))
        for index, (each, parts) in enumerate(zip(self._lists, self._lists_before, strict=True)):
            if _differ(each, parts):
                found.append(Change(self._list_places[index], None, parts, [*each]))
        return found

    def restore(self) -> None:
        """Put back what was accepted."""
        self._return_dicts()
        for index in self._find_changed():
            kind: Any = OrderedDict if isinstance(self._dicts[index], OrderedDict) else dict
            kind.clear(self._dicts[index])
            kind.update(self._dicts[index], self._dicts_before[index])
        for own, old in zip(self._lists, self._lists_before, strict=True):
            if _differ(own, old):
                own.clear()
                if isinstance(own, set):
                    own.update(old)
                else:
                    own.extend(old)
        self.note()

    def read_held(self) -> list[Any]:
        """Return the objects that are held now."""
        now = get_referents(*self._roots)
        now += chain.from_iterable(self._views)
        return now

    def accept_changes(self, changes: Iterable[Change], held: list[Any]) -> None:
        """Accept entries of dicts that `changes` has returned, after `held` was read: a later write is another change."""
        for place, key, _, now in changes:
            self._dicts_before[self._at[place.key][1]][key] = now
        self._held, self._known = held, addresses(held)

    def read(self, place: Place) -> Any:
        """Return the container at a place."""
        return self._at[place.key][0]

    def has(self, place: Place, key: Any) -> bool:
        """True if the container at a place is a dict that must hold the key."""
        found, index = self._at.get(place.key, (None, 0))
        return isinstance(found, dict) and key in self._dicts_before[index]

    def put(self, place: Place, key: Any, value: Any) -> None:
        """Set an entry that exists, and accept it once `note` is called."""
        found, index = self._at[place.key]
        if isinstance(found, dict):
            dict.__setitem__(found, key, value)
            self._dicts_before[index][key] = value
        else:
            found[key] = value
            self._lists_before[index][key] = value

    def clear(self) -> None:
        """Empty the containers and these lists, so that cycles among them keep nothing alive."""
        for own in (*self._dicts, *self._lists):
            own.clear()
        self.__dict__.clear()

    def _has_other_dicts(self) -> bool:
        """True if an object has another ``__dict__``."""
        pairs = zip(self._dict_places, self._dicts, strict=True)
        return any(place.kind == "vars" and self._copy_of(place.owner).__dict__ is not own for place, own in pairs)

    def _return_dicts(self) -> None:
        """Give each object its own ``__dict__`` back. The items of a dict that a call put in its place are kept."""
        for place, own in zip(self._dict_places, self._dicts, strict=True):
            owner = self._copy_of(place.owner) if place.kind == "vars" else None
            if owner is not None and owner.__dict__ is not own:
                now = owner.__dict__
                dict.clear(own)
                dict.update(own, now)
                object.__setattr__(owner, "__dict__", own)

    def _find_changed(self) -> list[int]:
        """Return the indices of the dicts that hold other objects."""
        found = [*compress(self._hollow, [self._dicts[index] for index in self._hollow])]
        if [*map(dict.__len__, self._full)] == [*map(len, self._full_before)]:
            now = chain.from_iterable([[*dict.values(each)] for each in self._full])
            before = chain.from_iterable(map(dict.values, self._full_before))
            positions = [*compress(count(), map(is_not, now, before))]
            if positions:
                ends = [*accumulate(map(len, self._full_before))]
                found += dict.fromkeys(self._filled[bisect_right(ends, position)] for position in positions)
            return found
        return found + [
            index
            for index, own, old in zip(self._filled, self._full, self._full_before, strict=True)
            if _differ([*dict.values(own)], [*old.values()])
        ]


def _differ(now: Any, before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(is_not, now, before))

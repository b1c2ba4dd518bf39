"""What the containers of a model or of a replica hold, compared by identity in a few C calls.

A model with a hundred layers has a thousand containers: ``__dict__`` of each module, its tables of parameters, buffers,
submodules, and hooks, and the lists and dicts among its attributes. Their contents are laid out flat once. A look then is
one call of the garbage collector's `get_referents` and one comparison of memory: about 30 us for 100 layers.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from gc import get_referents
from itertools import chain, compress, repeat
from operator import is_not
from typing import Any, NamedTuple

from parawrap._private_names import PARAMETERS
from parawrap.tree import names_of_slots

ABSENT: Any = type("Absent", (), {"__repr__": lambda _: "absent"})()
LISTS = (list, deque, set)
_BORDER = ((),)  # between two containers, so that an object that moves from one to the next is noticed
_keys, _last_key_first, _NO_KEY = dict.keys, dict.__reversed__, repeat(None)


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
        if self.kind == "slots":
            key = names_of_slots(type(self.owner))[key]
        return f"{self.path}[{key!r}]" if self.kind in ("items", "list") else f"{self.path}.{key}".lstrip(".")

    @property
    def module_path(self) -> str:
        """The path of the module that the container belongs to."""
        if self.kind == "vars" or self.kind.startswith("_"):
            return self.path
        return self.path.partition("[")[0].rpartition(".")[0]

    def container(self, owner: Any) -> Any:
        """Return the container of the owner, or of a copy of it."""
        match self.kind:
            case "vars":
                return owner.__dict__
            case "items" | "list":
                return owner
            case "slots":
                return Slots(owner, names_of_slots(type(owner)))
            case "cell":
                return Slots(owner, ["cell_contents"])
        return owner.__dict__[self.kind]


class Slots:
    """The slots of an object, or the contents of a closure cell, read and written like a list."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        self.owner = owner
        self.names = names

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Any]:
        return iter([read_slot(self.owner, name) for name in self.names])

    def __setitem__(self, index: int, part: Any) -> None:
        object.__setattr__(self.owner, self.names[index], part)

    def clear(self) -> None:
        for name in self.names:
            with contextlib.suppress(AttributeError):
                object.__delattr__(self.owner, name)

    def extend(self, parts: list[Any]) -> None:
        for name, part in zip(self.names, parts, strict=True):
            if part is not ABSENT:
                object.__setattr__(self.owner, name, part)


def read_slot(owner: Any, name: str = "cell_contents") -> Any:
    """Return the value of a slot, or the contents of a closure cell; ABSENT if it has none."""
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):
        return ABSENT


class Change(NamedTuple):
    """An entry of a container that holds another object. `key` is None for a whole list."""

    place: Place
    key: Any
    before: Any
    now: Any


class _Container:
    """A container, its owner, and what it must hold."""

    __slots__ = ("before", "own", "owner", "place")

    def __init__(self, place: Place, owner: Any) -> None:
        self.place = place
        self.owner = owner
        self.own = place.container(owner)
        # A copy first: other threads may write the model's
        self.before: Any = dict([*dict.items(self.own)]) if isinstance(self.own, dict) else [*self.own]

    def has_other_dict(self) -> bool:
        """True if its owner has got another ``__dict__``."""
        return self.owner.__dict__ is not self.own


class Holdings:
    """The objects that the containers of one model or replica hold.

    `copy_of` returns the copy of an owner of containers; None to leave the owner out. With `compares_names`, an object that
    gets another name in its container is a change too, and a look takes 1.4 times as long.
    """

    def __init__(self, places: Iterable[Place], copy_of: Callable[[Any], Any], *, compares_names: bool = False) -> None:
        owners = [(place, copy_of(place.owner)) for place in places]
        found = [_Container(place, owner) for place, owner in owners if owner is not None]
        self._at = {each.place.key: each for each in found}
        dicts = [each for each in found if isinstance(each.own, dict)]
        self._full = [each for each in dicts if each.before]
        self._hollow = [each for each in dicts if not each.before]
        self._owned = [each for each in dicts if each.place.kind == "vars"]
        self._lists = [each for each in found if not isinstance(each.own, dict)]
        plain = [each.own for each in self._lists if isinstance(each.own, LISTS)]
        self._views = [each.own for each in self._lists if not isinstance(each.own, LISTS)]
        self._empty = [*[each.own for each in self._hollow], *[each for each in plain if not each]]
        # The garbage collector may leave out keys. A new attribute of a module is its last one
        named = self._full if compares_names else []
        of_modules = [each.place.kind == "vars" and PARAMETERS in each.before for each in named]
        self._modules = [each.own for each in compress(named, of_modules)]
        self._named = [each.own for each, is_module in zip(named, of_modules, strict=True) if not is_module]
        # The garbage collector finds the class and the ``__dict__`` of an owner
        roots = [each.own for each in self._full] + [each for each in plain if each] + [each.owner for each in self._owned]
        self._roots: list[Any] = [*chain.from_iterable(zip(roots, repeat(_BORDER), strict=False))]
        self.note()

    def note(self) -> None:
        """Note the objects that are held now."""
        self._held = self.read_held()
        self._known = addresses(self._held)

    def is_same(self) -> bool:
        """True if the containers hold the very same objects. It reads them in place, without a call of `read_held`."""
        now = get_referents(*self._roots)
        if self._named or self._modules:
            now += chain.from_iterable(map(_keys, self._named))
            now += map(next, map(_last_key_first, self._modules), _NO_KEY)
        if self._views:
            now += chain.from_iterable(self._views)
        if not _has_layout:
            return bool(_addresses_anywhere(now) == self._known and not any(self._empty))
        items = _address_at(id(now) + _ITEMS).value
        return string_at(items or 0, len(now) * _WORD) == self._known and not any(self._empty)

    def changes(self) -> list[Change]:
        """Return the entries that differ from those that must be held. A replaced ``__dict__`` is an entry."""
        others = [each for each in self._owned if each.has_other_dict()]
        found = [Change(each.place, "__dict__", each.own, each.owner.__dict__) for each in others]
        for each in self._find_changed():
            if isinstance(each.before, list):
                found.append(Change(each.place, None, each.before, [*each.own]))
                continue
            for key in dict.fromkeys([*each.before, *dict.keys(each.own)]):
                before, now = each.before.get(key, ABSENT), dict.get(each.own, key, ABSENT)
                if before is not now:
                    found.append(Change(each.place, key, before, now))
        return found

    def restore(self) -> None:
        """Put back what must be held."""
        for each in self._owned:
            if each.has_other_dict():
                object.__setattr__(each.owner, "__dict__", each.own)
        for each in self._find_changed():
            own, before = each.own, each.before
            if isinstance(own, dict):
                kind: Any = OrderedDict if isinstance(own, OrderedDict) else dict
                kind.clear(own)
                kind.update(own, before)
                continue
            own.clear()
            if isinstance(own, set):
                own.update(before)
            else:
                own.extend(before)
        self.note()

    def read_held(self) -> list[Any]:
        """Return the objects that are held now."""
        now = get_referents(*self._roots)
        now += chain.from_iterable(map(_keys, self._named))
        now += map(next, map(_last_key_first, self._modules), _NO_KEY)
        now += chain.from_iterable(self._views)
        return now

    def accept_changes(self, changes: Iterable[Change], held: list[Any]) -> None:
        """Accept entries of dicts that `changes` has returned, after `held` was read: a later write is another change."""
        for place, key, _, now in changes:
            self._at[place.key].before[key] = now
        self._held, self._known = held, addresses(held)

    def read(self, place: Place) -> Any:
        """Return the container at a place."""
        return self._at[place.key].own

    def has(self, place: Place, key: Any) -> bool:
        """True if the container at a place is a dict that must hold the key."""
        found = self._at.get(place.key)
        return found is not None and isinstance(found.own, dict) and key in found.before

    def put(self, place: Place, key: Any, value: Any) -> None:
        """Set an entry that exists, and accept it once `note` is called."""
        found = self._at[place.key]
        if isinstance(found.own, dict):
            dict.__setitem__(found.own, key, value)
        else:
            found.own[key] = value
        found.before[key] = value

    def clear(self) -> None:
        """Empty the containers, so that cycles among them keep nothing alive."""
        for each in self._at.values():
            each.own.clear()

    def _find_changed(self) -> list[_Container]:
        """Return the containers that hold other objects."""
        found = [*compress(self._hollow, self._empty)]
        sizes = [len(each.before) for each in self._full]
        for read in (dict.values, dict.keys):
            if [dict.__len__(each.own) for each in self._full] == sizes:
                now = chain.from_iterable([[*read(each.own)] for each in self._full])
                before = chain.from_iterable([read(each.before) for each in self._full])
                found += compress(chain.from_iterable(map(repeat, self._full, sizes)), map(is_not, now, before))
            else:
                found += [each for each in self._full if _differ([*read(each.own)], [*read(each.before)])]
        found = [*dict.fromkeys(found)]
        return found + [each for each in self._lists if _differ(each.own, each.before)]


def _differ(now: Any, before: list[Any]) -> bool:
    return len(now) != len(before) or any(map(is_not, now, before))

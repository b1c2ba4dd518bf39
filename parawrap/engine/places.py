"""The containers of a model: their places, the names of their entries, and how to read and write.

A model with a hundred layers has a thousand containers: ``__dict__`` of each module, its tables of
parameters, buffers, submodules, and hooks, and the lists and dicts among its attributes. `Survey`
finds them, and `Snapshot` compares them.
"""

from __future__ import annotations

import contextlib
import copyreg
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from parawrap._private_names import BUFFERS, CHILDREN, HOOK_TABLES, PARAMETERS
from parawrap.tree import ABSENT, PLAIN, names_of_slots

TABLES = (PARAMETERS, BUFFERS, CHILDREN)
"""The names of the tables of a module, without those of hooks."""

MOST_READS = 1000
"""How often a container is read while another thread changes it, before Python's error is raised.

A guess that no test has contradicted: a thread that writes all the time lets a read through before.
"""

MOST_COPIES = 8
"""How often a model is copied while another thread changes it, before calls run plainly.

A guess that no test has contradicted: most threads pause before.
"""

SIMPLE = (*PLAIN, torch.dtype, torch.device)
"""Classes of values that replicas share with the model. A refresh sets changed ones in them."""

LISTS = (list, deque, set)
"""Containers whose entries have no names."""

ALWAYS_NEW = frozenset({dict, list, set, deque, OrderedDict, defaultdict, types.CellType})
"""Classes of which `copy.deepcopy` makes a new object. A class of the user's may return an old one.
"""


class Place(NamedTuple):
    """The place of one container of a model.

    Attributes:
        owner: The object that has the container, or the container itself for "items" and "list".
        kind: "vars" for the ``__dict__`` of an object, "items" for a dict, "list" for a list,
            deque, or set, "slots" for the slots of an object, "cell" for a closure cell. Any other
            kind is the name of a table of a module, such as ``_buffers``.
        path: The attributes and keys from the model to the owner, as Python code names them.
    """

    owner: Any
    kind: str
    path: str

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the place."""
        # The place holds its owner, so no other object has this id while the place exists
        return id(self.owner), self.kind

    def name(self, key: Any) -> str:
        """Return how Python code names an entry of the container, or the owner for the key None."""
        if key is None:
            return self.path
        if self.kind == "slots":
            key = names_of_slots(type(self.owner))[key]
        if self.kind in ("items", "list"):
            return f"{self.path}[{key!r}]"
        # The path of the model itself is empty, so the dot may come first
        if self.kind in HOOK_TABLES:
            return f"{self.path}.{self.kind}[{key!r}]".lstrip(".")
        return f"{self.path}.{key}".lstrip(".")

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


def read_items(container: Any) -> list[Any]:
    """Return the items of a list, a deque, a set, or of `Slots`, as they are at one moment.

    Another thread may write the container.

    Raises:
        RuntimeError: If the container changed during each of `MOST_READS` reads.
    """
    if type(container) is deque:
        return [*container.copy()]  # `copy` is one step, and a loop over a deque is not
    # One step for a list or a set. A subclass of deque raises if it is changed during the loop
    for _ in range(MOST_READS):
        with contextlib.suppress(RuntimeError):
            return [*container]
    return [*container]


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
        # Not by `__setattr__` of the class, which may refuse the write or count it
        object.__setattr__(self.owner, self.names[index], part)

    def clear(self) -> None:
        for name in self.names:
            with contextlib.suppress(AttributeError):  # an empty slot
                object.__delattr__(self.owner, name)

    def extend(self, parts: list[Any]) -> None:
        for name, part in zip(self.names, parts, strict=True):
            if part is not ABSENT:
                object.__setattr__(self.owner, name, part)


def read_slot(owner: Any, name: str = "cell_contents") -> Any:
    """Return the value of a slot, by default that of a closure cell; ABSENT if it is empty."""
    try:
        return getattr(owner, name)
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return ABSENT


def has_rules_for_copies(cls: type) -> bool:
    """True if a class has code that makes its copies. A copy may be an object that exists."""
    if issubclass(cls, torch.nn.Module) or cls in ALWAYS_NEW:
        return False
    # `copy.deepcopy` takes the first of these: __deepcopy__, copyreg's table, __reduce_ex__, and
    # __reduce__. Each class inherits the last two from object
    if hasattr(cls, "__deepcopy__") or cls in copyreg.dispatch_table:
        return True
    # A `__new__` in Python is code of a class, and may return an object that exists
    if isinstance(cls.__new__, types.FunctionType):
        return True
    rules: tuple[Any, ...] = (cls.__reduce_ex__, cls.__reduce__)
    return rules != (object.__reduce_ex__, object.__reduce__)


def has_own_rules(cls: type) -> bool:
    """True if code of a class decides what copies of its instances hold."""
    root = torch.nn.Module if issubclass(cls, torch.nn.Module) else object
    names = ("__getstate__", "__setstate__", "__deepcopy__", "__reduce__", "__reduce_ex__")
    has_own = any(getattr(cls, name, None) is not getattr(root, name, None) for name in names)
    return has_own or has_rules_for_copies(cls)

"""The containers of a model: where they are, how entries are named, how they are read and written.

A model with a hundred layers has a thousand containers: ``__dict__`` of each module, its tables of
parameters, buffers, submodules, and hooks, and the lists and dicts among its attributes. `Survey`
finds them, `Snapshot` compares them.
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
"""The tables of a module, without those of hooks."""

# Reads of what another thread changes, before Python's error is raised. A thread that writes all
# the time lets a read through long before; a guess that no test has contradicted
MOST_READS = 1000
# A guess that no test has contradicted: a thread that changes the model has paused by then
MOST_COPIES = 8
"""How often a model is copied at most because another thread changes it meanwhile.

Then calls run plainly.
"""

SIMPLE = (*PLAIN, torch.dtype, torch.device)
"""Classes of values that a copy shares. What the model holds of them is set in the replicas."""

LISTS = (list, deque, set)

# `copy.deepcopy` makes a new object for each of these. A class of the user's may return an object
# that others hold too.
ALWAYS_NEW = frozenset({dict, list, set, deque, OrderedDict, defaultdict, types.CellType})


class Place(NamedTuple):
    """One container of a model: the object that has it, its kind, and the path to it.

    Kinds: "vars" is the ``__dict__`` of an object, "items" a dict, "list" a list, deque, or set,
    "slots" the slots of an object, and "cell" a closure cell. Any other kind is the name of a table
    of a module, such as ``_buffers``.
    """

    owner: Any
    kind: str
    path: str

    @property
    def key(self) -> tuple[int, str]:
        """The identity of the place."""
        # The place holds its owner, so no other object gets the number while the place exists.
        return id(self.owner), self.kind

    def name(self, key: Any) -> str:
        """Return how Python code names an entry of the container."""
        if key is None:
            return self.path
        if self.kind == "slots":
            key = names_of_slots(type(self.owner))[key]
        if self.kind in ("items", "list"):
            return f"{self.path}[{key!r}]"
        # The path of the model itself is empty.
        if self.kind in HOOK_TABLES:
            return f"{self.path}.{self.kind}[{key!r}]".lstrip(".")
        return f"{self.path}.{key}".lstrip(".")

    @property
    def module_path(self) -> str:
        """The path of the module that the container belongs to."""
        # The names of tables begin with an underscore
        if self.kind == "vars" or self.kind.startswith("_"):
            return self.path
        # The path ends with an attribute of the module, and the keys inside it.
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


def read_items(container: Any) -> list[Any]:
    """Return the items of a list, deque, or set, as they are at one moment.

    Other threads may write it. A list of a list or of a set is made in one step, with its lock
    held. A deque has a lock too, which only its own methods take, and raises if it is changed.
    """
    if type(container) is deque:
        return [*container.copy()]
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
        # Around `__setattr__` of the class, which may refuse the write or count it.
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
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return ABSENT


def has_rules_for_copies(cls: type) -> bool:
    """True if a class says itself how it is copied: it may return an object that exists."""
    if issubclass(cls, torch.nn.Module) or cls in ALWAYS_NEW:
        return False
    if hasattr(cls, "__deepcopy__") or cls in copyreg.dispatch_table:
        return True
    # A `__new__` in Python is the class's own, and may return an object that exists
    if isinstance(cls.__new__, types.FunctionType):
        return True
    rules: tuple[Any, ...] = (cls.__reduce_ex__, cls.__reduce__)
    return rules != (object.__reduce_ex__, object.__reduce__)


def has_own_rules(cls: type) -> bool:
    """True if a class says itself what copies of its instances hold."""
    root = torch.nn.Module if issubclass(cls, torch.nn.Module) else object
    names = ("__getstate__", "__setstate__", "__deepcopy__", "__reduce__", "__reduce_ex__")
    has_own = any(getattr(cls, name, None) is not getattr(root, name, None) for name in names)
    return has_own or has_rules_for_copies(cls)

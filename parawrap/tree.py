"""Nested values: flatten containers to leaves, rebuild them, and give each leaf an address.

optree does the work. It supports list, tuple, namedtuple, dict, OrderedDict, defaultdict, and
deque. This module registers dataclasses and subclasses of Mapping, list, and tuple when it first
meets each class, and rebuilds values as that class. It has no code for devices, rows, or modules.

word        | meaning
----------- | -----------------------------------------------------------------------------------
node        | any value in a nested value, also that value itself
leaf        | a node that is not taken apart, such as a tensor or a number
kept whole  | a class has rules of its own for its instances: each is one leaf (`WholeLeaf`)
spec        | the structure of a value without its leaves, as optree returns it
blank       | a registered container without its parts (`_Blank`)
address     | the place of a leaf, for messages, such as ``args[0]["mask"]``
"""

from __future__ import annotations

import dataclasses
import enum
import operator
import threading
import types
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from operator import is_not
from typing import Any, ClassVar, Protocol, TypeAlias

import optree
import torch

TreeSpec: TypeAlias = optree.PyTreeSpec

_NAMESPACE = "parawrap"
PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Classes of values that hold no other objects, cannot change, and are compared by value."""

TENSOR = frozenset({torch.Tensor})
"""Torch's own class, without subclasses, which may have operations of their own.

A set, because ``TENSOR.issuperset(map(type, values))`` checks all values in one call.
"""

TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Torch's own two classes. The operations of a Parameter are those of a tensor."""


ABSENT: Any = object()
"""Stands for the value of an entry that a container does not have. None may be a real value."""

# Classes of values that `tensors_in` does not search
_SEALED = (
    *PLAIN,
    type,
    types.ModuleType,
    types.FunctionType,
    types.BuiltinFunctionType,
)
INSIDE = ...
"""The step of a path from a container that is kept whole to its `WholeLeaf`.

No other step is Ellipsis, unless a dict has this key."""

# An attribute of a BatchEncoding of transformers, which is a UserDict. It has one item per row, or
# is None
_ITEMS_OF_ROWS = "_encodings"

# Each class is examined when it is first met. From then on it is in `_known_leaves` or in `_nodes`,
# for good, because classes are few and long-lived. The sets are written with the lock held, and may
# be read without it: a look-up in a set is one step of Python
_known_leaves: set[type] = {torch.Tensor, torch.nn.Parameter, torch.Size, *PLAIN}
_nodes: set[type] = set()  # registered with optree
_whole: set[type] = set()  # of the nodes, those that are kept whole
_examining = threading.Lock()
# The functions that `keep_whole_if` was given
_claims: list[Callable[[type], bool]] = []


class WholeLeaf:
    """A leaf that stands for a whole container.

    The class of the container has its own rules, or the container is a list with one item per row.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_known_leaves.add(WholeLeaf)


def flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of `value` in a fixed order, and its structure, which `unflatten` takes.

    None is a leaf. An instance of a class that is kept whole is also a leaf, wrapped in
    :class:`WholeLeaf`. The outermost nodes that `is_leaf` accepts are leaves.
    """
    leaves, spec = optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    # Nearly always true, and checked by a loop in C
    if _known_leaves.issuperset(map(type, leaves)):
        return leaves, spec
    # Without the nodes that `is_leaf` accepts: they are leaves in this call only
    kinds = {type(leaf) for leaf in leaves if is_leaf is None or not is_leaf(leaf)}
    new_kinds = kinds - _known_leaves
    if new_kinds and _examine(new_kinds):
        # Now optree takes the new containers apart. New classes inside are examined in turn
        return flatten(value, is_leaf)
    return leaves, spec


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """Return the value with a structure and leaves."""
    return spec.unflatten(leaves)


def replace_nodes(value: Any, chosen: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    """Return `value` with every outermost node that `chosen` accepts replaced by ``replace(node)``.

    If no node is replaced by another object, return `value` itself.
    """
    leaves, spec = flatten(value, chosen)
    made = [replace(leaf) if chosen(leaf) else leaf for leaf in leaves]
    # Without new leaves there are no new containers: forward may write into the caller's own
    if all(map(operator.is_, made, leaves)):
        return value
    return unflatten(spec, made)


def flatten_once(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the parts of a container, without opening them, and its structure.

    The structure has the keys in the same order: `unflatten` and `TreeSpec.entries` fit the parts.
    """
    # Every node except `value` itself is a leaf. In C, since optree calls it for each part
    return flatten(value, partial(is_not, value))


def parts_below(value: Any) -> list[Any] | None:
    """Return the values one level below a container; None for a leaf.

    A container that is kept whole has one part, its `WholeLeaf`.
    """
    # The usual classes first, without optree
    kind = type(value)
    if kind is dict:
        return [*value.values()]
    if kind is list or kind is tuple:
        return [*value]
    if kind in _known_leaves:
        return None
    parts, spec = flatten_once(value)
    return None if spec.is_leaf() else parts


def is_kept_whole(cls: type) -> bool:
    """True if every instance of a class is one leaf, also if it is a container."""
    return cls in _whole


def keep_whole(cls: type) -> None:
    """Treat each instance of `cls` as one leaf in a :class:`WholeLeaf`, also a container."""
    with _examining:
        # First: a thread that flattens an instance before `_register` finds an unknown leaf, and
        # waits in `_examine` for the lock
        _known_leaves.discard(cls)
        if cls in _nodes:
            optree.unregister_pytree_node(cls, namespace=_NAMESPACE)
        _register(cls, _as_whole)


def keep_whole_if(claim: Callable[[type], bool]) -> None:
    """Keep each class whole that is met from now on, and for which ``claim(cls)`` is True."""
    _claims.append(claim)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield each tensor in attributes, slots, and containers of `value`, at any depth, once.

    Functions, classes, and Python modules are not searched.
    """
    # The objects by id. They are kept, because another object could get the id of a deleted one
    seen: dict[int, object] = {}
    waiting: list[Any] = [value]
    while waiting:
        each = waiting.pop()
        if id(each) in seen or isinstance(each, _SEALED):
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            yield each
            continue
        waiting += held_by(each)


def held_by(value: Any) -> list[Any]:
    """Return the values in the attributes and slots of an object, and in it as a container."""
    found: list[Any] = []
    if isinstance(value, Mapping):
        found += value.values()
    elif isinstance(value, (list, tuple, deque, AbstractSet)):
        found += value
    elif isinstance(value, types.MethodType):
        found.append(value.__self__)
    for name in {*getattr(value, "__dict__", ()), *names_of_slots(type(value))}:
        # With `self.__dict__ = self`, keys may be other values than texts. A slot may be empty
        if isinstance(name, str) and hasattr(value, name):
            found.append(getattr(value, name))
    return found


def is_dense(tensor: torch.Tensor) -> bool:
    """True if a tensor has one shape and one value per index: it is not sparse and not nested."""
    return tensor.layout is torch.strided and not tensor.is_nested


def list_attributes(tensor: torch.Tensor) -> list[str]:
    """Return the names of a tensor's own attributes, which cutting and joining would lose."""
    # A subclass that wraps tensors has them as attributes, and cuts them itself
    if hasattr(tensor, "__tensor_flatten__"):
        return []
    # torch.compile marks tensors with attributes of its own
    return [name for name in tensor.__dict__ if not name.startswith("_dynamo_")]


def names_of_slots(cls: type) -> list[str]:
    """Return the names of the slots of a class, as Python stores them."""
    found: list[str] = []
    for each in cls.__mro__:
        slots = vars(each).get("__slots__", ())
        if isinstance(slots, str):  # Python takes a single name too
            slots = (slots,)
        for name in slots:
            if name in ("__dict__", "__weakref__"):
                continue
            # Python puts the class before a name with two underscores: _Net__cache
            is_private = name.startswith("__") and not name.endswith("__")
            found.append(f"_{each.__name__.lstrip('_')}{name}" if is_private else name)
    return found


# Options that may be trees, nested like the value that they describe: `in_dims`, `out_dims`, and
# `reduce`


class Fields(Protocol):
    """The type of any dataclass, for type checkers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


UNDECLARED: Any = object()
"""Stands for the entry of a place that an option does not name. None is an entry."""


def as_tree(option: Any) -> Any:
    """Return an option with dicts for mappings and dataclasses, and tuples for sequences."""
    # Before dataclasses: a ModelOutput of transformers is both, and its items are the mapping's
    if isinstance(option, Mapping):
        return {key: as_tree(each) for key, each in option.items()}
    is_class = isinstance(option, type)
    if dataclasses.is_dataclass(option) and not is_class:
        names = [field.name for field in dataclasses.fields(option)]
        # A field with init=False may be unset
        return {name: as_tree(getattr(option, name)) for name in names if hasattr(option, name)}
    if isinstance(option, (list, tuple, deque)):
        return tuple(map(as_tree, option))
    return option


def entries_of(option: Any) -> list[Any]:
    """Return the entries of an option that may be a tree."""
    return optree.tree_leaves(as_tree(option), none_is_leaf=True)


def entry_at(option: Any, key: Any, missing: Any) -> Any:
    """Return the entry of an option for one part of a container; `missing` if there is none.

    `option` is from `as_tree`. If it is not a tree, it holds for all parts, and is the entry of
    each.
    """
    if isinstance(option, dict):
        return option.get(key, missing)
    if not isinstance(option, tuple):
        return option
    has_entry = isinstance(key, int) and key < len(option)
    return option[key] if has_entry else missing


# Addresses: a path is the tuple of steps from a value to a leaf. A step is a key, a position, an
# attribute, or INSIDE


class Attribute(str):
    """The name of an attribute, in the path to a leaf."""

    __slots__ = ()


def addresses(spec: TreeSpec, root: str) -> list[str]:
    """Return the address of each leaf, such as ``values[0]`` or ``values["batch"].mask``.

    `root` is the name of the whole value.
    """
    return [address(root, path) for path in spec.paths()]


def address(root: str, path: Iterable[Any]) -> str:
    """Return the address of a path of keys and attributes, such as ``args[0]["mask"]``."""
    return root + "".join(map(_write_step, path))


def _write_step(step: object) -> str:
    if step is INSIDE:
        return ""
    if isinstance(step, Attribute):
        return f".{step}"
    if isinstance(step, str):
        return f'["{step}"]'
    return f"[{step!r}]"


# Classes of containers: how optree takes their instances apart, and rebuilds them


def _examine(kinds: Iterable[type]) -> bool:
    """Enter classes that are met for the first time. Return True if one of them is a container."""
    has_container = False
    with _examining:
        for cls in kinds:
            # Another thread may have entered the class before this one got the lock
            if cls not in _known_leaves and cls not in _nodes:
                if any(claim(cls) for claim in _claims):
                    _register(cls, _as_whole)
                elif _is_container(cls):
                    _register(cls, _take_apart)
                else:
                    _known_leaves.add(cls)
            has_container = has_container or cls in _nodes
    return has_container


def _is_container(cls: type) -> bool:
    # A module is one value, also if its class is a dataclass. So is a member of an Enum, also if it
    # is a tuple
    if issubclass(cls, (torch.nn.Module, enum.Enum)):
        return False
    return issubclass(cls, (Mapping, list, tuple)) or dataclasses.is_dataclass(cls)


def _register(cls: type, take_apart: Callable[[Any], Any]) -> None:
    """Let optree take instances of a class apart, and rebuild them. The caller holds the lock."""
    with warnings.catch_warnings():
        # optree warns that a registered namedtuple loses its default handling. That is intended
        warnings.simplefilter("ignore", UserWarning)
        optree.register_pytree_node(cls, take_apart, _rebuild, namespace=_NAMESPACE)
    _nodes.add(cls)
    if take_apart is _as_whole:
        _whole.add(cls)


@dataclasses.dataclass(slots=True, unsafe_hash=True)
class _Blank:
    """A container without its parts: its class, the keys of its items, and its attributes.

    The parts of a container are its items, and the attributes in `names`. Attributes of plain
    values stay in `plain`, with their types. Outputs with different blanks are not joined.
    """

    cls: Any
    keys: tuple[Any, ...]
    names: tuple[Attribute, ...]
    # The name, type, and value of each. The type is compared too, because True equals 1
    plain: tuple[tuple[str, type, Any], ...]
    # The factory of a defaultdict. It is left out of comparisons and of the repr, because the repr
    # of a function differs between processes
    factory: Any = dataclasses.field(compare=False, repr=False)
    is_namespace: bool = False  # its items are its attributes: ``self.__dict__ = self``


def _as_whole(value: Any) -> tuple[Any, ...]:
    """Return what optree needs: the container as its only part, no blank, and the step to it."""
    return (WholeLeaf(value),), None, (INSIDE,)


def _take_apart(value: Any) -> tuple[Any, ...]:
    """Return what optree needs: the parts of a container, its blank, and the step to each part."""
    # The items
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, Mapping):
        keys = tuple(value)
        parts = [value[key] for key in keys]
        if not isinstance(value, dict | UserDict):
            # They may hold the items, from which `_rebuild` makes the mapping by its class
            attributes = {}
    elif dataclasses.is_dataclass(value):
        fields = dataclasses.fields(value)
        keys = tuple(Attribute(field.name) for field in fields if hasattr(value, field.name))
        parts = [getattr(value, key) for key in keys]
    else:
        keys = tuple(range(len(value)))
        parts = list(value)

    # The attributes, without those that are items: all of a dataclass, and some of a ModelOutput
    skipped = {*keys}
    if isinstance(value, UserDict):
        skipped.add("data")  # the dict of its items
    names: list[Attribute] = []
    plain: list[tuple[str, type, Any]] = []
    for name, part in attributes.items():
        if name in skipped:
            continue
        if type(part) in PLAIN:
            plain.append((name, type(part), part))
            continue
        names.append(Attribute(name))
        # One leaf, which is cut by item like a list of texts
        has_item_per_row = name == _ITEMS_OF_ROWS and isinstance(part, list)
        is_one_leaf = has_item_per_row and isinstance(value, UserDict)
        parts.append(WholeLeaf(part) if is_one_leaf else part)

    # The blank
    factory = value.default_factory if isinstance(value, defaultdict) else None
    is_namespace = attributes is value
    blank = _Blank(type(value), keys, tuple(names), tuple(plain), factory, is_namespace)
    return tuple(parts), blank, (*keys, *names)


def _rebuild(blank: Any, parts: Iterable[Any]) -> Any:
    """Return a container with the parts, for optree.

    Without a blank, the only part is the container itself.
    Only a mapping that is neither a dict nor a UserDict runs its ``__init__``.
    """
    found = list(parts)
    if blank is None:
        return _unwrap(found[0])
    kind: type = blank.cls
    count = len(blank.keys)
    items = dict(zip(blank.keys, found[:count], strict=True))
    is_mapping = issubclass(kind, Mapping)
    if is_mapping and not issubclass(kind, dict | UserDict):
        return blank.cls(items)  # only the class knows where its instances keep the items

    # An empty container; a tuple has its items from the start
    is_tuple = issubclass(kind, tuple)
    built: Any = tuple.__new__(kind, items.values()) if is_tuple else blank.cls.__new__(kind)

    # The attributes that are no parts. Before the items, because `__setitem__` may read them
    if issubclass(kind, defaultdict):
        built.default_factory = blank.factory
    if blank.is_namespace:
        built.__dict__ = built  # its items are its attributes
    if issubclass(kind, UserDict):
        object.__setattr__(built, "data", {})  # of its items; its `__init__` would make it
    _set_attributes(built, {name: value for name, _, value in blank.plain})

    # The parts
    if is_mapping:
        # `__setitem__` of a ModelOutput also sets the attribute of an item, so no step follows
        for key, item in items.items():
            built[key] = item
    elif dataclasses.is_dataclass(kind):
        _set_attributes(built, items)
    elif not is_tuple:
        built.extend(items.values())
    # `_take_apart` may have wrapped a list of items per row
    attributes = map(_unwrap, found[count:])
    _set_attributes(built, dict(zip(blank.names, attributes, strict=True)))
    return built


def _unwrap(part: Any) -> Any:
    return part.value if isinstance(part, WholeLeaf) else part


def _set_attributes(built: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes, also of a frozen dataclass."""
    for name, value in attributes.items():
        object.__setattr__(built, str(name), value)

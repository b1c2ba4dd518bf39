"""Flatten and rebuild nested values, and describe the address of a leaf."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import threading
import warnings
from collections import UserDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import optree
import torch
from optree import GetAttrEntry, MappingEntry, PyTreeEntry, SequenceEntry
from optree import PyTreeSpec as TreeSpec

__all__ = [
    "TreeSpec",
    "WholeLeaf",
    "address",
    "addresses",
    "flatten",
    "flatten_call",
    "flatten_outside_sequences",
    "keep_whole",
    "keep_whole_if",
    "mismatch",
    "named_children",
    "replace_nodes",
    "sequences",
    "unflatten",
    "with_children",
]

_NAMESPACE = "parawrap"

# Each type is examined once. From then on it is a leaf, or a node that optree knows. Types are few and long-lived.
_known_leaves: set[type] = {torch.Tensor, torch.nn.Parameter, torch.Size, str, bytes, int, float, bool, type(None)}
_learning = threading.Lock()
_nodes: set[type] = set()
_claims: list[Callable[[type], bool]] = []
_TENSOR = frozenset({torch.Tensor})
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_calls_of_tensors: dict[int, TreeSpec] = {}


class WholeLeaf:
    """A leaf that stands for a whole container: a class with its own splitter, or a sequence cut by `in_dims`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_known_leaves.add(WholeLeaf)


def flatten(value: object) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of `value` in a fixed order, and its structure, which `unflatten` takes.

    None is a leaf. An instance of a class that was passed to `keep_whole` is also a leaf, wrapped in :class:`WholeLeaf`.
    """
    return _flatten(value)


def _flatten(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Flatten `value`, and keep each outermost node that `is_leaf` accepts whole. Classes met first are examined."""
    leaves, spec = optree.tree_flatten(value, is_leaf, none_is_leaf=True, namespace=_NAMESPACE)
    if _known_leaves.issuperset(map(type, leaves)):
        return leaves, spec
    strangers = {type(leaf) for leaf in leaves if is_leaf is None or not is_leaf(leaf)} - _known_leaves
    return _flatten(value, is_leaf) if strangers and _learn(strangers) else (leaves, spec)


def unflatten(spec: TreeSpec, leaves: Iterable[Any]) -> Any:
    """Return the value with that structure and those leaves."""
    return spec.unflatten(leaves)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], TreeSpec]:
    """Flatten ``(args, kwargs)``, with a fast path for the most common call: a few positional tensors."""
    if not kwargs and _TENSOR.issuperset(map(type, args)):
        spec = _calls_of_tensors.get(len(args))
        if spec is None:
            spec = _calls_of_tensors[len(args)] = flatten((args, kwargs))[1]
        return list(args), spec
    return flatten((args, kwargs))


def flatten_outside_sequences(value: object) -> tuple[list[Any], TreeSpec]:
    """Flatten `value` like `flatten`, but keep each outermost list and plain tuple whole, as one leaf."""
    return _flatten(value, lambda node: type(node) in (list, tuple))


def addresses(spec: TreeSpec, roots: tuple[str, ...]) -> list[str]:
    """Return the address of each leaf, such as ``args[0]`` or ``kwargs["batch"].mask``.

    `roots` names the entries of the outermost tuple. Pass a single name if the value is not wrapped in such a tuple.
    """
    found: list[str] = []
    wrapped = len(roots) > 1
    for accessor in spec.accessors():
        entries: list[Any] = [*accessor]
        root = roots[entries.pop(0).entry if wrapped else 0]
        found.append(root + "".join(_step(entry) for entry in entries))
    return found


def address(root: str, path: Iterable[Any]) -> str:
    """Return the address of a path of keys, indices, and attributes, such as ``args[0]["mask"]``."""
    return root + "".join(f".{entry}" if isinstance(entry, _Attribute) else f"[{_quote(entry)}]" for entry in path)


def mismatch(specs: Iterable[TreeSpec], root: str) -> tuple[str, list[str]] | None:
    """Return the first address at which trees differ, and a description of each tree's node; None if they are equal."""
    trees = list(specs)
    first = trees[0]
    if all(tree == first for tree in trees):
        return None
    shapes = [_describe(tree) for tree in trees]
    same_node = len(set(shapes)) == 1 and not any(tree.is_leaf() for tree in trees)
    if same_node:
        for entry, children in zip(first.entries(), zip(*(tree.children() for tree in trees), strict=True), strict=True):
            deeper = mismatch(children, f"{root}[{_quote(entry)}]")
            if deeper is not None:
                return deeper
        shapes = [_attributes_of(tree) or str(tree) for tree in trees]  # or the order of keys, two classes of one name
    return root, shapes


def sequences(spec: TreeSpec) -> Iterator[tuple[tuple[Any, ...], TreeSpec, int]]:
    """Yield every list, plain tuple, and deque in a structure: its path, its node, and the index of its first leaf."""

    def walk(node: TreeSpec, path: tuple[Any, ...], start: int) -> Iterator[tuple[tuple[Any, ...], TreeSpec, int]]:
        if node.type in (list, tuple, deque):
            yield path, node, start
        begins = itertools.accumulate((child.num_leaves for child in node.children()), initial=start)
        for entry, child, begin in zip(node.entries(), node.children(), begins, strict=False):
            yield from walk(child, (*path, entry), begin)

    return walk(spec, (), 0)


def replace_nodes(value: Any, chosen: Callable[[Any], bool], replace: Callable[[Any], Any]) -> Any:
    """Return `value` with every outermost node that `chosen` accepts replaced by ``replace(node)``."""
    leaves, spec = _flatten(value, chosen)
    return unflatten(spec, [replace(leaf) if chosen(leaf) else leaf for leaf in leaves])


def named_children(value: Any) -> dict[Any, Any]:
    """Return the parts of a container by key, index, or name of a field; of a leaf, nothing."""
    flatten(value)  # examines its class
    spec = optree.tree_structure(value, none_is_leaf=True, namespace=_NAMESPACE)
    if spec.is_leaf() or value is None:
        return {}
    children, _, entries, _ = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=_NAMESPACE)
    return dict(zip(entries, children, strict=True))


def with_children(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like `value` with these parts, which have the keys and the order of `named_children`."""
    _, metadata, _, rebuild = optree.tree_flatten_one_level(value, none_is_leaf=True, namespace=_NAMESPACE)
    return rebuild(metadata, tuple(parts.values()))


def keep_whole(cls: type) -> None:
    """Treat every instance of `cls` as one leaf, wrapped in :class:`WholeLeaf`, even if `cls` is a container."""
    with _learning:
        if cls in _nodes:
            optree.unregister_pytree_node(cls, namespace=_NAMESPACE)
        _register(cls, *_WHOLE)


def keep_whole_if(claim: Callable[[type], bool]) -> None:
    """Apply `keep_whole` to each class that is met from now on, if ``claim(cls)`` is True."""
    _claims.append(claim)


def _unwrap(leaves: Iterable[Any]) -> Any:
    (leaf,) = leaves
    return leaf.value if isinstance(leaf, WholeLeaf) else leaf


def _quote(entry: object) -> str:
    return f'"{entry}"' if isinstance(entry, str) else repr(entry)


def _step(entry: PyTreeEntry) -> str:
    if isinstance(entry, GetAttrEntry) or isinstance(entry.entry, _Attribute):
        return f".{entry.entry}"
    if isinstance(entry, (MappingEntry, SequenceEntry)):
        return f"[{_quote(entry.entry)}]"
    return ""


def _describe(tree: TreeSpec) -> str:
    if tree.is_leaf():
        return "a leaf"
    kind = tree.type
    name = kind.__name__ if kind is not None else "nothing"
    if kind is not None and issubclass(kind, Mapping):
        return f"a {name} with keys {list(tree.entries())}"
    return f"a {name} of {tree.num_children}"


def _attributes_of(tree: TreeSpec) -> str:
    """Return a description of the plain attributes of a node; an empty text if it has none."""
    node: Any = tree.one_level()
    blank = node.walk([None] * tree.num_children, lambda kind, data, children: data)
    if not isinstance(blank, _Blank) or not blank.plain:
        return ""
    return f"a {blank.cls.__name__} with {', '.join(f'{name}={value!r}' for name, value in blank.plain.items())}"


def _learn(strangers: Iterable[type]) -> bool:
    """Examine types that are met for the first time. Return True if one of them is a container."""
    learnt = False
    with _learning:
        for cls in strangers:
            if cls in _known_leaves or cls in _nodes:
                learnt = learnt or cls in _nodes  # another thread was quicker
                continue
            recipe = _WHOLE if any(claim(cls) for claim in _claims) else _recipe(cls)
            if recipe is None:
                _known_leaves.add(cls)
            else:
                _register(cls, *recipe)
                learnt = True
    return learnt


_Recipe = tuple[Callable[[Any], Any], Callable[[Any, Any], Any], type[PyTreeEntry]]
_WHOLE: _Recipe = (lambda value: ((WholeLeaf(value),), None), lambda _, leaves: _unwrap(leaves), PyTreeEntry)


def _register(cls: type, down: Callable[[Any], Any], up: Callable[[Any, Any], Any], entry: type[PyTreeEntry]) -> None:
    with warnings.catch_warnings():
        # optree warns that a registered namedtuple loses its default handling, which is intended here.
        warnings.simplefilter("ignore", UserWarning)
        optree.register_pytree_node(cls, down, up, path_entry_type=entry, namespace=_NAMESPACE)
    _nodes.add(cls)


def _recipe(cls: type) -> _Recipe | None:
    """Return functions that flatten and rebuild a container of a type that optree does not know; None for a leaf."""
    if issubclass(cls, (torch.nn.Module, enum.Enum)):
        return None
    if issubclass(cls, Mapping):
        return _list_mapping_parts, _rebuild, MappingEntry
    if dataclasses.is_dataclass(cls):
        return _dataclass_parts, _rebuild, GetAttrEntry
    if issubclass(cls, list) or (issubclass(cls, tuple) and not hasattr(cls, "n_fields")):  # not torch.return_types
        return _sequence_parts, _rebuild, SequenceEntry
    return None


class _Attribute(str):
    """The name of an attribute, as an entry next to the items of a container."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Blank:
    """A container without its parts: its class, the keys of its items, and its attributes of plain values.

    The parts of a container are its items, and its attributes with other values, which `names` lists. Two blanks are equal
    if class, keys, names, and plain attributes are equal, so that outputs with different attributes are not joined.
    """

    cls: Any
    keys: tuple[Any, ...]
    names: tuple[_Attribute, ...]
    plain: dict[str, Any] = dataclasses.field(hash=False)
    kinds: list[type] = dataclasses.field(hash=False)  # of the plain attributes: True is not 1
    factory: Any = dataclasses.field(compare=False)


def _parts(value: Any, keys: Iterable[Any], items: Iterable[Any], skip: Iterable[str] = ()) -> tuple[Any, ...]:
    """Return the parts of a container as optree takes them: values, blank, and entries. `skip` names other attributes."""
    keys, skip = tuple(keys), set(skip)
    own = {name: each for name, each in getattr(value, "__dict__", {}).items() if name not in skip}
    plain = {name: each for name, each in own.items() if type(each) in _PLAIN}
    names = tuple(_Attribute(name) for name in own if name not in plain)
    kinds, factory = list(map(type, plain.values())), getattr(value, "default_factory", None)
    blank = _Blank(type(value), keys, names, plain, kinds, factory)
    return (*items, *(own[name] for name in names)), blank, (*keys, *names)


def _sequence_parts(value: Sequence[Any]) -> tuple[Any, ...]:
    return _parts(value, range(len(value)), value)


def _list_mapping_parts(value: Mapping[Any, Any]) -> tuple[Any, ...]:
    keys = tuple(value)
    if not isinstance(value, dict | UserDict):
        skip = list(getattr(value, "__dict__", ()))  # its class alone can fill it, and its attributes may hold the items
    else:
        skip = ["data"] if isinstance(value, UserDict) else []
        skip += [key for key in keys if isinstance(key, str)]  # a ModelOutput also has its items as attributes
    return _parts(value, keys, (value[key] for key in keys), skip)


def _dataclass_parts(value: Any) -> tuple[Any, ...]:
    names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
    return _parts(value, names, (getattr(value, name) for name in names), names)


def _rebuild(blank: _Blank, leaves: Iterable[Any]) -> Any:
    """Return a container with these parts. Only a mapping that is neither a dict nor a UserDict runs its ``__init__``."""
    kind: type = blank.cls
    parts = list(leaves)
    items = dict(zip(blank.keys, parts, strict=False))
    others = dict(zip(map(str, blank.names), parts[len(items) :], strict=True))
    is_mapping, is_dataclass = issubclass(kind, Mapping), dataclasses.is_dataclass(kind)
    if is_mapping and not issubclass(kind, dict | UserDict):
        return blank.cls(items)  # only the class can fill its instances
    is_tuple = issubclass(kind, tuple) and not is_dataclass
    built: Any = tuple.__new__(blank.cls, items.values()) if is_tuple else blank.cls.__new__(blank.cls)
    _set_attributes(built, blank.plain)
    if is_mapping:
        if isinstance(built, defaultdict):
            built.default_factory = blank.factory
        if isinstance(built, UserDict):
            built.data = {}
        for key, item in items.items():  # __setitem__ keeps the attributes of a ModelOutput equal to its items
            built[key] = item
    elif is_dataclass:
        _set_attributes(built, items)
    elif not is_tuple:
        built.extend(items.values())
    _set_attributes(built, others)
    return built


def _set_attributes(built: Any, attributes: Mapping[str, Any]) -> None:
    """Set attributes, also of a frozen dataclass."""
    for name, value in attributes.items():
        object.__setattr__(built, name, value)

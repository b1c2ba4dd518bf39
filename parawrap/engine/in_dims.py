"""`in_dims`: where the rows of each argument lie, by the names of the target's parameters."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from parawrap.engine.flat_call import has_items
from parawrap.errors import ShardError
from parawrap.tree import UNDECLARED, Fields, WholeLeaf, address, as_tree, flatten, replace_nodes, unflatten

InDim = int | Literal["items"] | None | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields
"""Where the rows of an argument lie: a dim, "items" (one item per row), or None (every lane gets the argument whole). A
dict, tuple, or dataclass of these declares the parts of an argument."""


class Parameters:
    """The names under which a target takes its arguments. Immutable."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._positional: list[str] = []
        self._rest: str | None = None
        self._keywords: set[str] | None = None  # None: any keyword will do
        self._all_keywords: str | None = None  # the name of **kwargs
        schema = getattr(target, "schema", None)  # a TorchScript method
        if schema is not None:
            self._positional = [argument.name for argument in schema.arguments if argument.name != "self"]
            self._keywords = set(self._positional)
            return
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature
            return
        self._positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
        self._all_keywords = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)
        self._keywords = {p.name for p in parameters} if self._all_keywords is None else None

    def takes(self, name: str) -> bool:
        """True if the target has a parameter of that name, or takes any keyword."""
        return name != self._all_keywords and (self._keywords is None or name in self._keywords)

    def at(self, position: int) -> str | None:
        """Return the name of the positional argument at that place; None if the signature is not known."""
        return self._positional[position] if position < len(self._positional) else self._rest

    def __str__(self) -> str:
        return ", ".join(self._positional + ([f"*{self._rest}"] if self._rest else [])) or "none"


class InDims:
    """The entries of `in_dims` for the arguments of one method.

    `option` is how errors name the option: faces with torch's rules do not have it.
    """

    def __init__(self, dim: int, in_dims: Mapping[str, InDim], parameters: Parameters | None, option: str) -> None:
        self.dim = dim
        self.in_dims: dict[str, Any] = {name: as_tree(entry) for name, entry in in_dims.items()}
        self.parameters = parameters
        self.option = option

    def mark_items(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with each sequence that is cut by item turned into one leaf."""
        names = [self.name_at((0, index)) or "" for index in range(len(args))]
        by_item = tuple(_by_item(self.in_dims.get(name), value, [name]) for name, value in zip(names, args, strict=True))
        return by_item, {name: _by_item(self.in_dims.get(name), value, [name]) for name, value in kwargs.items()}

    def dim_at(self, path: Sequence[Any]) -> int | None:
        """Return the dim that the rows of a leaf lie on. The items of a sequence are on dim 0."""
        declared = self.find(path)
        return self.dim if declared is UNDECLARED else 0 if declared == "items" else declared

    def find(self, path: Sequence[Any]) -> Any:
        """Return the entry of `in_dims` for a path into (args, kwargs); UNDECLARED if there is none."""
        entry = self.in_dims.get(self.name_at(path) or "", UNDECLARED)
        for key in path[2:]:
            if not isinstance(entry, (dict, tuple)):
                break
            has_key = key in entry if isinstance(entry, dict) else isinstance(key, int) and key < len(entry)
            entry = entry[key] if has_key else UNDECLARED
        return UNDECLARED if isinstance(entry, (dict, tuple)) else entry

    def name_at(self, path: Sequence[Any]) -> str | None:
        """Return the parameter that a path into (args, kwargs) belongs to; None if the signature is not known."""
        if path[0] == 1:
            return str(path[1])
        return self.parameters.at(path[1]) if self.parameters is not None else None

    def write_cure(self, entries: Mapping[tuple[Any, ...], str | None]) -> str:
        """Return the `in_dims` with these entries for the values at these paths, next to the entries of the user.

        The entry is that of the whole argument where the keys of a path are not names.
        """
        cure: dict[str, Any] = dict(self.in_dims)
        for path, entry in entries.items():
            has_names = all(isinstance(key, str) for key in path[2:])
            *above, last = [self.name_at(path) or "its name", *map(str, path[2:] if has_names else ())]
            place = cure
            for key in above:
                below = place.get(key)
                place[key] = dict(below) if isinstance(below, dict) else {}
                place = place[key]
            place[last] = entry
        return f"{self.option}={cure}".replace("'", '"')


def _by_item(in_dim: Any, value: Any, place: list[Any]) -> Any:
    """Return a value with the sequences that its entry in `in_dims` cuts by item turned into leaves."""
    if in_dim is None:
        return value
    if isinstance(in_dim, (dict, tuple)):
        return _by_item_below(in_dim, value, place)
    if in_dim == "items":
        return WholeLeaf(value) if has_items(value) else replace_nodes(value, has_items, WholeLeaf)
    if _has_no_tensors(value):
        return WholeLeaf(value)  # named by the user: also a tuple of numbers
    return replace_nodes(value, _may_be_one_item_per_row, WholeLeaf)


def _by_item_below(in_dims: Any, value: Any, place: list[Any]) -> Any:
    """Do the same for a container, by the entries of its parts. Keys that it does not have are refused."""
    parts, spec = flatten(value, lambda node: node is not value)
    keys = spec.entries()
    if isinstance(in_dims, tuple) and len(in_dims) != len(keys):
        msg = f"{address('in_dims', place)} declares {len(in_dims)} items, and {place[0]!r} has {len(keys)} there"
        raise ShardError(msg)
    named = in_dims if isinstance(in_dims, dict) else dict(enumerate(in_dims))
    for key in named:
        if key not in keys:
            has = f"a {type(value).__name__} with {keys}" if keys else f"a {type(value).__name__}"
            msg = f"{address('in_dims', [*place, key])} is declared, and {place[0]!r} is {has} there"
            raise ShardError(msg)
    below = (_by_item(named.get(key), part, [*place, key]) for key, part in zip(keys, parts, strict=True))
    return unflatten(spec, below)


def _may_be_one_item_per_row(node: Any) -> bool:
    """True for a sequence without tensors, but for a tuple of numbers, such as the size of images."""
    is_size = type(node) is tuple and all(isinstance(item, (int, float)) for item in node)
    return not is_size and _has_no_tensors(node)


def _has_no_tensors(node: Any) -> bool:
    """True for a list, a deque, or a tuple without tensors, which has no dims. An empty one is the same in every lane."""
    is_sequence = isinstance(node, (list, deque)) or type(node) is tuple
    return is_sequence and bool(node) and not any(isinstance(leaf, torch.Tensor) for leaf in flatten(node)[0])

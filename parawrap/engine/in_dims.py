"""`in_dims`: where the rows of each argument lie, by the names of the target's parameters."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from parawrap.engine.flat_call import has_items
from parawrap.errors import ShardError
from parawrap.tree import (
    UNDECLARED,
    Fields,
    WholeLeaf,
    address,
    as_tree,
    entry_at,
    flatten,
    replace_nodes,
    unflatten,
)

InDim = int | Literal["items"] | None | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields
"""Where the rows of an argument lie.

It is a dim, "items" (one item per row), or None (every lane gets the argument whole). A dict,
tuple, or dataclass of these declares the parts of an argument."""


class Parameters:
    """The names under which a target takes its arguments. Immutable, and shared by threads."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._positional: list[str] = []
        self._rest: str | None = None  # the name of *args
        self._keywords: set[str] | None = None  # None: any keyword will do
        self._all_keywords: str | None = None  # the name of **kwargs
        # `inspect` finds only *args in a TorchScript method, which has a schema instead.
        schema = getattr(target, "schema", None)
        if schema is not None:
            names = [argument.name for argument in schema.arguments]
            self._positional = [name for name in names if name != "self"]
            self._keywords = set(self._positional)
            return
        try:
            parameters = inspect.signature(target).parameters.values()
        except (TypeError, ValueError):  # a builtin without a signature
            return
        for parameter in parameters:
            if parameter.kind is parameter.VAR_POSITIONAL:
                self._rest = parameter.name
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._all_keywords = parameter.name
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                self._positional.append(parameter.name)
        if self._all_keywords is None:
            self._keywords = {parameter.name for parameter in parameters}

    def takes(self, name: str) -> bool:
        """True if the target has a parameter of that name, or takes any keyword."""
        # The name of **kwargs is no argument: each of its keywords has a name
        if name == self._all_keywords:
            return False
        return self._keywords is None or name in self._keywords

    def at(self, position: int) -> str | None:
        """Return the name of a positional argument; None if the signature is not known."""
        if position < len(self._positional):
            return self._positional[position]
        return self._rest

    def __str__(self) -> str:
        rest = [f"*{self._rest}"] if self._rest else []
        return ", ".join(self._positional + rest) or "none"


class InDims:
    """The entries of `in_dims` for the arguments of one method.

    A path leads from (args, kwargs) to a value: ``(0, 2, "mask")`` to ``args[2]["mask"]``, and
    ``(1, "batch", "mask")`` to ``kwargs["batch"]["mask"]``. `option` is how errors name the
    option: calls by the rules of torch.nn.DataParallel have none, so it is that of a block.
    """

    def __init__(
        self, dim: int, in_dims: Mapping[str, InDim], parameters: Parameters | None, option: str
    ) -> None:
        self.dim = dim
        # None stands for an argument without a known name, which has no entry
        self.in_dims: dict[str | None, Any]
        self.in_dims = {name: as_tree(entry) for name, entry in in_dims.items()}
        self.parameters = parameters
        self.option = option

    def mark_items(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a call with each sequence that is cut by item turned into one leaf."""

        def mark(name: str | None, value: Any) -> Any:
            return _mark_by_item(self.in_dims.get(name), value, [name])

        marked_kwargs = {name: mark(name, value) for name, value in kwargs.items()}
        marked_args = []
        for index, value in enumerate(args):
            marked_args.append(mark(self.name_at((0, index)), value))
        return tuple(marked_args), marked_kwargs

    def dim_at(self, path: Sequence[Any]) -> int | None:
        """Return the dim that the rows of a leaf lie on. The items of a sequence are on dim 0."""
        declared = self.find(path)
        if declared is UNDECLARED:
            return self.dim
        return 0 if declared == "items" else declared

    def find(self, path: Sequence[Any]) -> Any:
        """Return the entry for a path into (args, kwargs); UNDECLARED if there is none."""
        entry = self.in_dims.get(self.name_at(path), UNDECLARED)
        below_argument = path[2:]
        for key in below_argument:
            entry = entry_at(entry, key, UNDECLARED)
        # The path is above the leaves: their entries may differ, so there is none for it.
        if isinstance(entry, (dict, tuple)):
            return UNDECLARED
        return entry

    def name_at(self, path: Sequence[Any]) -> str | None:
        """Return the parameter of a path into (args, kwargs); None if it is not known."""
        root, argument = path[0], path[1]
        if root == 1:
            return str(argument)  # the keyword
        if self.parameters is None:
            return None
        return self.parameters.at(argument)  # by its position

    def write_cure(self, entries: Mapping[tuple[Any, ...], str | int | None]) -> str:
        """Return the `in_dims` with these entries for the values at these paths.

        An entry of None gives the value whole to every lane. The entries of the user stay. Where
        the keys of a path are not names, the entry is that of the whole argument.
        """
        cure: dict[Any, Any] = dict(self.in_dims)
        for path, entry in entries.items():
            below_argument = path[2:]
            if not all(isinstance(key, str) for key in below_argument):
                below_argument = ()
            argument = self.name_at(path) or "its name"
            *above, last = [argument, *map(str, below_argument)]
            place = cure
            for key in above:
                below = place.get(key)
                # A copy: the dict of the user stays as it is.
                copied = dict(below) if isinstance(below, dict) else {}
                place[key] = copied
                place = copied
            place[last] = entry
        return f"{self.option}={cure}".replace("'", '"')


def _mark_by_item(in_dim: Any, value: Any, place: list[Any]) -> Any:
    """Return a value with sequences turned into leaves, if its entry in `in_dims` cuts them.

    `place` are the keys to the entry, for errors.
    """
    if in_dim is None:  # whole to every lane, or without an entry
        return value
    if isinstance(in_dim, (dict, tuple)):
        return _mark_parts(in_dim, value, place)
    # "items" also cuts the lists inside a dict: the user has named what holds them.
    if in_dim == "items":
        if has_items(value):
            return WholeLeaf(value)
        return replace_nodes(value, has_items, WholeLeaf)
    # The user names the argument itself, so a tuple of numbers has one item per row too.
    if _has_no_tensors(value):
        return WholeLeaf(value)
    return replace_nodes(value, _may_be_one_item_per_row, WholeLeaf)


def _mark_parts(in_dims: Any, value: Any, place: list[Any]) -> Any:
    """Return a container with sequences turned into leaves, by the entries of its parts.

    Keys that it does not have are refused.
    """
    # Only the container itself is opened: each part has its entry.
    parts, spec = flatten(value, lambda node: node is not value)
    keys = spec.entries()
    if isinstance(in_dims, tuple) and len(in_dims) != len(keys):
        where = address("in_dims", place)
        msg = f"{where} declares {len(in_dims)} items, and {place[0]!r} has {len(keys)} there"
        raise ShardError(msg)
    named = in_dims if isinstance(in_dims, dict) else dict(enumerate(in_dims))
    for key in named:
        if key in keys:
            continue
        has = f"a {type(value).__name__}"
        if keys:
            has += f" with {keys}"
        where = address("in_dims", [*place, key])
        msg = f"{where} is declared, and {place[0]!r} is {has} there"
        raise ShardError(msg)
    marked = []
    for key, part in zip(keys, parts, strict=True):
        entry = named.get(key)
        marked.append(_mark_by_item(entry, part, [*place, key]))
    return unflatten(spec, marked)


def _may_be_one_item_per_row(node: Any) -> bool:
    """True for a sequence without tensors, except a tuple of numbers, such as an image size."""
    # A namedtuple is a structure, and never cut by item.
    is_size = type(node) is tuple and all(isinstance(item, (int, float)) for item in node)
    if is_size:
        return False
    return _has_no_tensors(node)


def _has_no_tensors(node: Any) -> bool:
    """True for a list, a deque, or a tuple without tensors, which has no dims."""
    is_sequence = isinstance(node, (list, deque)) or type(node) is tuple
    if not is_sequence or not node:  # an empty one is the same in every lane
        return False
    leaves, _ = flatten(node)
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)

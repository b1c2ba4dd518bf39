"""`in_dims`: where the rows of each argument lie, by the names of the target's parameters."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from parawrap.engine.columns import write_code
from parawrap.engine.flat_call import address_in_call, has_items
from parawrap.errors import ShardError
from parawrap.tree import (
    INSIDE,
    UNDECLARED,
    Fields,
    WholeLeaf,
    address,
    as_tree,
    entry_at,
    flatten,
    flatten_once,
    replace_nodes,
    unflatten,
)

InDim = int | Literal["items"] | None | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields
"""Where the rows of an argument lie.

It is a dim, "items" (one item per row), or None (every lane gets the argument whole). A dict,
tuple, or dataclass of these declares the parts of an argument. A dict may name some items of a list
or tuple by index. A tuple for ``*args`` has one entry per argument that they collect."""


class Parameters:
    """The names under which a target takes its arguments. Immutable, and shared by threads."""

    def __init__(self, target: Callable[..., Any]) -> None:
        self._positional: list[str] = []
        self._var_positional: str | None = None  # the name of *args, if the target has them
        self._var_keyword: str | None = None  # the name of **kwargs, likewise
        self._keywords: set[str] | None = None  # None: the target takes any keyword
        # `inspect` finds only *args in a TorchScript method, which has a schema instead
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
                self._var_positional = parameter.name
            elif parameter.kind is parameter.VAR_KEYWORD:
                self._var_keyword = parameter.name
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                self._positional.append(parameter.name)
        if self._var_keyword is None:
            self._keywords = {parameter.name for parameter in parameters}

    def takes(self, name: str) -> bool:
        """True if the target has a parameter of that name, or takes any keyword."""
        # `in_dims` names the keywords that **kwargs collects, and not the dict of them
        if name == self._var_keyword:
            return False
        return self._keywords is None or name in self._keywords

    def name_of_positional(self, position: int) -> str | None:
        """Return the name of a positional argument; None if the signature does not show it."""
        if position < len(self._positional):
            return self._positional[position]
        return self._var_positional

    def position_in_rest(self, position: int) -> int | None:
        """Return the position of an argument in ``*args``; None if it has a name of its own."""
        rest = position - len(self._positional)
        return rest if self._var_positional is not None and rest >= 0 else None

    def __str__(self) -> str:
        """Return the names of the positional parameters, for an error."""
        rest = [f"*{self._var_positional}"] if self._var_positional else []
        return ", ".join(self._positional + rest) or "none"


class InDims:
    """The entries of `in_dims` for the arguments of one method.

    A path leads from (args, kwargs) to a value: ``(0, 2, "mask")`` to ``args[2]["mask"]``, and
    ``(1, "batch", "mask")`` to ``kwargs["batch"]["mask"]``.

    Attributes:
        dim: The dim of the rows of arguments without an entry.
        in_dims: The entries by the names of parameters, as `as_tree` returns them. The key None
            stands for an argument without a known name, which has no entry.
        parameters: The names of the parameters; None if they are not known.
        option: The name of the option in errors. DataParallel has no such option, so its errors
            name that of a block.
    """

    def __init__(
        self, dim: int, in_dims: Mapping[str, InDim], parameters: Parameters | None, option: str
    ) -> None:
        self.dim = dim
        self.in_dims: dict[str | None, Any] = {
            name: as_tree(entry) for name, entry in in_dims.items()
        }
        self.parameters = parameters
        self.option = option

    def mark_items(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with a `WholeLeaf` for each sequence that is cut by item."""

        def mark(path: Sequence[Any], value: Any) -> Any:
            entry = self._entry_of_argument(path)
            if entry is UNDECLARED:
                return value
            name = self.name_at(path)
            is_for_each = entry is not self.in_dims[name]  # one of the entries for ``*args``
            place = [name, self._position_in_rest(path)] if is_for_each else [name]
            return _mark_by_item(entry, value, place)

        marked_kwargs = {name: mark((1, name), value) for name, value in kwargs.items()}
        marked_args = [mark((0, index), value) for index, value in enumerate(args)]
        return tuple(marked_args), marked_kwargs

    def dim_at(self, path: Sequence[Any]) -> int | None:
        """Return the dim that the rows of a leaf lie on. The items of a sequence are on dim 0."""
        declared = self.find(path)
        if declared is UNDECLARED:
            return self.dim
        return 0 if declared == "items" else declared

    def find(self, path: Sequence[Any]) -> Any:
        """Return the entry for a path into (args, kwargs); UNDECLARED if there is none."""
        entry = self._entry_of_argument(path)
        below_argument = path[2:]
        for key in below_argument:
            entry = entry_at(entry, key, UNDECLARED)
        # A tree declares the parts of the value one by one, and not the value itself
        if isinstance(entry, (dict, tuple)):
            return UNDECLARED
        return entry

    def _entry_of_argument(self, path: Sequence[Any]) -> Any:
        """Return the entry for an argument; UNDECLARED if there is none."""
        entry = self.in_dims.get(self.name_at(path), UNDECLARED)
        rest = self._position_in_rest(path)
        # An argument of ``*args`` behind the last entry of a tuple has none
        is_for_each = rest is not None and isinstance(entry, tuple)
        return entry_at(entry, rest, UNDECLARED) if is_for_each else entry

    def _position_in_rest(self, path: Sequence[Any]) -> int | None:
        """Return the position in ``*args`` that a path into (args, kwargs) leads to, or None."""
        root, key = path[0], path[1]
        is_positional = root == 0  # as in the pair (args, kwargs)
        if self.parameters is None or not is_positional:
            return None
        return self.parameters.position_in_rest(key)

    def name_at(self, path: Sequence[Any]) -> str | None:
        """Return the parameter of a path into (args, kwargs); None if it is not known."""
        root, key = path[0], path[1]
        is_keyword = root == 1  # as in the pair (args, kwargs)
        if is_keyword:
            return str(key)
        return None if self.parameters is None else self.parameters.name_of_positional(key)

    def write_cure(
        self,
        entries: Mapping[tuple[Any, ...], str | int | None],
        paths: Sequence[tuple[Any, ...]],
    ) -> str:
        """Return the `in_dims` with these entries for the values at the keys, which are paths.

        An entry of None gives the value whole to every lane. Other entries of the user stay: if one
        holds for all parts of an argument, each other part gets it. So `paths` lead to all leaves
        of the call. If a path has a key that is neither a text nor an index, the entry is for the
        whole argument.
        """
        cure: dict[Any, Any] = dict(self.in_dims)
        without_name: dict[str, None] = {}  # addresses, each once
        for path, entry in entries.items():
            name = self.name_at(path)
            if name is None:  # as of a builtin without a signature
                place = address_in_call(path[:2])
                without_name[place] = None
                name = f"name of {place}"
            keys = [key for key in path[2:] if key is not INSIDE]
            if not all(isinstance(key, (str, int)) for key in keys):
                keys = []  # the entry is for the whole argument
            below = [other[2:] for other in paths if other[:2] == path[:2]]
            rest = self._position_in_rest(path)
            if rest is None:
                cure[name] = _with_entry(cure.get(name), keys, entry, below)
                continue
            # One entry for all arguments of ``*args`` becomes one for each
            given = cure.get(name, self.dim)
            count = rest + 1  # up to this argument. Later ones need no entry
            of_each = [*given] if isinstance(given, tuple) else [given] * count
            while len(of_each) < count:
                of_each.append(self.dim)
            of_each[rest] = _with_entry(of_each[rest], keys, entry, below)
            cure[name] = tuple(of_each)
        written = f"{self.option}={write_code(cure)}"
        if without_name:
            written += f" and pass {' and '.join(without_name)} by keyword"
        return written


def _with_entry(
    given: Any, keys: Sequence[Any], entry: Any, below: Sequence[tuple[Any, ...]]
) -> Any:
    """Return the entry of a value with `entry` at these keys. `given` is not written.

    The paths `below` lead from the value to its leaves.
    """
    if not keys:
        return entry
    first, *rest = keys
    # New dicts: `given` belongs to the options of the block
    if isinstance(given, dict):
        entries = dict(given)
    elif isinstance(given, tuple):
        entries = dict(enumerate(given))
    elif given is None:  # not declared: a value that goes whole needs no cure
        entries = {}
    else:  # one entry for all parts
        entries = {path[0]: given for path in below}
    below_first = [path[1:] for path in below if path[0] == first]
    entries[first] = _with_entry(entries.get(first), rest, entry, below_first)
    return entries


def _mark_by_item(entry: Any, value: Any, place: list[Any]) -> Any:
    """Return a value with a `WholeLeaf` for each sequence that its entry in `in_dims` cuts by item.

    `place` are the keys to the entry, for errors.
    """
    if entry is None:  # whole to every lane, or not declared
        return value
    if isinstance(entry, (dict, tuple)):
        return _mark_parts(entry, value, place)
    # "items" also cuts the lists inside a dict: the user has named the dict that holds them
    if entry == "items":
        if has_items(value):
            return WholeLeaf(value)
        return replace_nodes(value, has_items, WholeLeaf)
    # A tuple of numbers that the user names has one item per row too. Inside an argument that the
    # user names, it may be an image size
    if _is_sequence_without_tensors(value):
        return WholeLeaf(value)
    return replace_nodes(value, _may_be_one_item_per_row, WholeLeaf)


def _mark_parts(entries: Any, value: Any, place: list[Any]) -> Any:
    """Mark the parts of a container by their entries. Refuse entries of parts that it lacks."""
    parts, spec = flatten_once(value)
    keys = spec.entries()
    if isinstance(entries, tuple) and len(entries) != len(keys):
        where = address("in_dims", place)
        msg = f"{where} declares {len(entries)} items, and {place[0]!r} has {len(keys)} there"
        raise ShardError(msg)
    by_key = entries if isinstance(entries, dict) else dict(enumerate(entries))
    for key in by_key:
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
        entry = by_key.get(key)
        marked.append(_mark_by_item(entry, part, [*place, key]))
    return unflatten(spec, marked)


def _may_be_one_item_per_row(node: Any) -> bool:
    """True for a sequence without tensors, except a tuple of numbers, such as an image size."""
    is_size = type(node) is tuple and all(isinstance(item, (int, float)) for item in node)
    return not is_size and _is_sequence_without_tensors(node)


def _is_sequence_without_tensors(node: Any) -> bool:
    """True for a list, a deque, or a tuple without tensors, but with items."""
    # A namedtuple is a structure, and never cut by item
    is_sequence = isinstance(node, (list, deque)) or type(node) is tuple
    if not is_sequence or len(node) == 0:  # an empty one is the same in every lane
        return False
    leaves, _ = flatten(node)
    return not any(isinstance(leaf, torch.Tensor) for leaf in leaves)

"""The options of the user for joining outputs, and the `Refusal` of what they do not join."""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from parawrap.errors import GatherError
from parawrap.tree import UNDECLARED, Fields, TreeSpec, as_tree, entries_of

Reduce = Literal["mean", "sum", "stack"] | Callable[[torch.Tensor], torch.Tensor]
JoinMode = Literal["cat", "list", "pad"]
OutDims = Any
"""A dim, None, "items", or "ragged" for every output, or a tree of these like the output."""

PadValue = float | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields | None
"""A number for every output, a tree of numbers like the output, or None."""

# Compared by `type(value) in SEQUENCES`: a namedtuple is a structure with keys
SEQUENCES = (list, tuple, deque)
_REDUCTIONS = ("mean", "sum", "stack")
_WORDS = ("items", "ragged")
_MOST_STRUCTURES = 1024  # of outputs, to remember; a guess that no test has contradicted


class ReturnedArgument:
    """Stands for an argument of the caller in the outputs of lanes.

    All lanes return the same mark for one argument, so it is joined as one value.

    Attributes:
        argument: The argument of the caller.
        parts: The lanes' parts of a tensor, which are joined if other lanes return another value;
            empty for other arguments.
    """

    __slots__ = ("argument", "parts")

    def __init__(self, argument: Any, parts: Sequence[Any] = ()) -> None:
        self.argument = argument
        self.parts = parts


class Declared(NamedTuple):
    """The entries of the options for one place in the output.

    Attributes:
        out_dim: Where its rows lie; UNDECLARED, or a tree for the parts of a container.
        reduce: How its values are reduced.
        pad_value: The value to pad it with.
        names_reduce: True if `reduce` is a tree that names this place. A single reduction is for
            the numbers of the whole output alone.
    """

    out_dim: Any
    reduce: Any
    pad_value: Any
    names_reduce: bool = False

    def below(self, spec: TreeSpec) -> list[Declared]:
        """Return the declarations of each leaf of a structure at this place."""
        if spec.is_leaf():
            return [self]
        if spec.type in SEQUENCES:
            refuse_tree("out_dims", self.out_dim, spec.type)
        leaves = []
        parts = self.parts(spec.entries())
        for part, child in zip(parts, spec.children(), strict=True):
            leaves += part.below(child)
        return leaves

    def parts(self, keys: Sequence[Any]) -> list[Declared]:
        """Return the declarations of the parts of a container with these keys."""
        out_dims = _entries_of_parts("out_dims", self.out_dim, UNDECLARED, keys)
        reductions = _entries_of_parts("reduce", self.reduce, None, keys)
        pad_values = _entries_of_parts("pad_value", self.pad_value, None, keys)
        names_reduce = is_tree(self.reduce)
        if is_tree(self.out_dim) and not names_reduce:
            # A None that names a place in out_dims comes before a reduction for all numbers
            for index, out_dim in enumerate(out_dims):
                is_constant = out_dim is None
                if is_constant:
                    reductions[index] = None
        columns = zip(out_dims, reductions, pad_values, strict=True)
        return [Declared(*column, names_reduce) for column in columns]


@dataclass(frozen=True)
class JoinRules:
    """The options for joining.

    Attributes:
        dim: The dim of the rows of undeclared outputs.
        as_torch: True for the rules of torch.nn.DataParallel's gather.
        options: The options that an error may name: all, those for a whole output, or none.
        assumes_proof: True if shards of one size prove which outputs follow the rows, as unequal
            shards do. Errors of DataParallel try the options of a block so: its shards are unequal.
    """

    dim: int = 0
    out_dims: OutDims = UNDECLARED
    reduce: Any = None
    join: JoinMode = "cat"
    pad_value: Any = None
    as_torch: bool = False
    options: Literal["all", "whole", "none"] = "all"
    assumes_proof: bool = False

    # Cached, since every call reads these. Threads that compute one at the same time store equal
    # values

    @cached_property
    def needs_proof(self) -> bool:
        """True if the sizes of shards must differ, to show which outputs follow the rows."""
        return _has_undeclared(self.out_dims) and self.join != "list"

    @cached_property
    def keep_single(self) -> bool:
        """True if the output of a call that was not cut is returned as it is."""
        # The mean or the sum of one number is the number. "stack" and functions make another value
        keeps_numbers = all(each in (None, "mean", "sum") for each in entries_of(self.reduce))
        return keeps_numbers and self.join != "list"

    @cached_property
    def row_dim_of_tensor(self) -> int | None:
        """The dim to concatenate outputs of one tensor on; None if the options say otherwise."""
        is_declared = self.out_dims is not UNDECLARED and not self.as_torch
        dim = self.out_dims if is_declared else self.dim
        if self.join != "cat" or not isinstance(dim, int):
            return None
        return dim if dim >= 0 else None  # `join` joins outputs on a negative dim

    @cached_property
    def declared(self) -> Declared:
        """The declarations of the whole output."""
        return Declared(self.out_dims, self.reduce, self.pad_value)

    @cached_property
    def row_dims(self) -> Callable[[TreeSpec], tuple[int, ...] | None]:
        """A function that returns the dim of each tensor in a structure.

        It returns None if an option says of some part not to concatenate it. Threads may call it.
        """
        # Cached per object, and not per class: the cache ends with the block
        find = partial(_find_row_dims, self.declared, self.dim, self.join)
        return lru_cache(_MOST_STRUCTURES)(find)

    def __post_init__(self) -> None:
        # Written around the frozen class, before the first look at a cached property
        for name in ("out_dims", "reduce", "pad_value"):
            object.__setattr__(self, name, as_tree(getattr(self, name)))
        if self.as_torch:  # torch concatenates outputs of any sizes
            object.__setattr__(self, "out_dims", "ragged")
        if self.join not in ("cat", "list", "pad"):
            msg = f"join={self.join!r} is not supported. Use 'cat', 'pad', or 'list'"
            raise GatherError(msg)
        for each in entries_of(self.reduce):
            if each is not None and each not in _REDUCTIONS and not callable(each):
                _refuse_entry("reduce", each, "'mean', 'sum', 'stack', a function of a vector")
        for each in entries_of(self.out_dims):
            if not _is_out_dim(each):
                advice = f". {each!r} is a value of reduce" if each in _REDUCTIONS else ""
                _refuse_entry("out_dims", each, 'a dim, None, "items", "ragged"', advice)
        for each in entries_of(self.pad_value):
            if each is not None and not isinstance(each, numbers.Number):
                _refuse_entry("pad_value", each, "a number")


def _is_out_dim(entry: Any) -> bool:
    # A bool is an int, and `out_dims=True` is a mistake.
    is_dim = isinstance(entry, int) and not isinstance(entry, bool)
    return entry is UNDECLARED or entry is None or is_dim or entry in _WORDS


def _refuse_entry(name: str, entry: Any, allowed: str, advice: str = "") -> NoReturn:
    like = "a tuple, dict, or dataclass of these like the output"
    msg = f"{name}={entry!r} is not supported. Use {allowed}, or {like}{advice}"
    raise GatherError(msg)


class Refusal(Exception):  # noqa: N818
    """Raised at a place that cannot be joined. `join` raises a GatherError with places and cures.

    Attributes:
        why: The reason, in words.
        advice: What the user can change besides options, in words.
        returned: The values of the lanes, in words.
        is_of_options: True if the options have another structure than the output.
        has_cure: False if no option joins the place.
    """

    def __init__(
        self,
        why: str,
        advice: str = "",
        *,
        returned: str = "",
        is_of_options: bool = False,
        has_cure: bool = True,
    ) -> None:
        super().__init__(why)
        self.why = why
        self.advice = advice
        self.returned = returned
        self.is_of_options = is_of_options
        self.has_cure = has_cure


def refuse(why: str, advice: str = "", *, returned: str = "") -> NoReturn:
    """Raise a refusal."""
    raise Refusal(why, advice, returned=returned)


def _refuse_options(why: str) -> NoReturn:
    raise Refusal(why, is_of_options=True)


def refuse_tree(name: str, option: Any, kind: type) -> None:
    """Refuse an option that declares parts, for a value of `kind` that has no such parts."""
    if kind is ReturnedArgument:  # the option declares the entries that forward has added to it
        return
    # `kind` has no keys. A tuple of entries fits a sequence
    declares_keys = isinstance(option, dict)
    declares_items = isinstance(option, tuple) and kind not in SEQUENCES
    if declares_keys or declares_items:
        found = type(option).__name__
        _refuse_options(f"{name} declares a {found} here, and the lanes returned a {kind.__name__}")


def is_tree(option: Any) -> bool:
    """True if an option declares the parts of a container."""
    return isinstance(option, (dict, tuple))  # `as_tree` has replaced other containers


def _has_undeclared(out_dims: Any) -> bool:
    """True if a tree of out_dims may not declare some place of an output."""
    if isinstance(out_dims, tuple):
        return any(map(_has_undeclared, out_dims))
    # An output may have keys that a dict does not name
    return out_dims is UNDECLARED or isinstance(out_dims, dict)


def _find_row_dims(
    declared: Declared, dim: int, join: str, spec: TreeSpec
) -> tuple[int, ...] | None:
    """Return the dim of each leaf; None if an option says not to concatenate one of them."""
    if join != "cat":
        return None
    try:
        leaves = declared.below(spec)
    except Refusal:
        return None  # `Joiner` raises it again, at its place
    dims = []
    for leaf in leaves:
        is_reduced = leaf.names_reduce and leaf.reduce is not None
        # `pad_value` does not count, since nothing is padded here
        out_dim = dim if leaf.out_dim is UNDECLARED else leaf.out_dim
        if is_reduced or is_tree(leaf.reduce) or not isinstance(out_dim, int):
            return None
        dims.append(out_dim)
    return tuple(dims)


def _entries_of_parts(name: str, option: Any, missing: Any, keys: Sequence[Any]) -> list[Any]:
    """Return the entry of an option for each part of a container, by the keys of the parts.

    `missing` is the entry of the keys that the option leaves out.
    """
    if isinstance(option, dict):
        for key in option:
            if key not in keys:
                has = list(keys)
                _refuse_options(f"{name} declares the key {key!r}, and the output has {has} here")
        return [option.get(key, missing) for key in keys]
    if not isinstance(option, tuple):
        return [option] * len(keys)
    has_positions = [*keys] == [*range(len(keys))]
    if not has_positions:  # a dict has its parts sorted by key, and not as the user wrote them
        _refuse_options(
            f"{name} declares a tuple, and the output has the keys {[*keys]} here. Declare a dict "
            "with these keys"
        )
    if len(option) != len(keys):
        _refuse_options(f"{name} declares {len(option)} items, and the output has {len(keys)} here")
    return list(option)

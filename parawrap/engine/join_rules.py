"""The options of the user for joining outputs."""

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

# Compared by `type(value) in SEQUENCES`: a namedtuple is a structure with keys.
SEQUENCES = (list, tuple, deque)
_REDUCTIONS = ("mean", "sum", "stack")
_WORDS = ("items", "ragged")
_MOST_STRUCTURES = 1024  # of outputs; a guess that no test has contradicted


class ReturnedArgument:
    """The place of a container in an output, if the container is an argument of the caller.

    All lanes have one such object for one argument, so that it is joined as one value.
    """

    __slots__ = ("argument",)

    def __init__(self, argument: Any) -> None:
        self.argument = argument


class Declared(NamedTuple):
    """The declarations of one place in the output: its rows, its reduction, and its padding.

    `names_reduce` is True if `reduce` names this place, and not the numbers of the whole output.
    """

    out_dim: Any
    reduce: Any
    pad_value: Any
    names_reduce: bool = False

    def below(self, spec: TreeSpec) -> list[Declared]:
        """Return the declarations of each leaf below a node."""
        if spec.is_leaf():
            return [self]
        if spec.type in SEQUENCES:
            refuse_tree("out_dims", self.out_dim, spec.type)
        leaves = []
        for part, child in zip(self.parts(spec.entries()), spec.children(), strict=True):
            leaves += part.below(child)
        return leaves

    def parts(self, entries: Sequence[Any]) -> list[Declared]:
        """Return the declarations of the parts of a container with these keys."""
        out_dims = _children("out_dims", self.out_dim, UNDECLARED, entries)
        reductions = _children("reduce", self.reduce, None, entries)
        pad_values = _children("pad_value", self.pad_value, None, entries)
        names_reduce = is_tree(self.reduce)
        if is_tree(self.out_dim) and not names_reduce:
            # A None that names a place comes before a reduction for all numbers.
            for index, out_dim in enumerate(out_dims):
                is_constant = out_dim is None
                if is_constant:
                    reductions[index] = None
        columns = zip(out_dims, reductions, pad_values, strict=True)
        return [Declared(*column, names_reduce) for column in columns]


@dataclass(frozen=True)
class JoinRules:
    """The options for joining. `as_torch` selects the rules of torch.nn.DataParallel's gather.

    `options` says which options an error may name: all, those for a whole output, or none.
    """

    dim: int = 0
    out_dims: OutDims = UNDECLARED
    reduce: Any = None
    join: JoinMode = "cat"
    pad_value: Any = None
    as_torch: bool = False
    options: Literal["all", "whole", "none"] = "all"

    # Cached, since every call reads these. Threads that compute one at the same time get equal
    # values.

    @cached_property
    def needs_proof(self) -> bool:
        """True if the sizes of shards must differ, to show which outputs follow the rows."""
        return _has_undeclared(self.out_dims) and self.join != "list"

    @cached_property
    def keep_single(self) -> bool:
        """True if the output of a call that was not cut is returned as it is."""
        # The mean or the sum of one number is that number. "stack" and functions make another value
        keeps_numbers = all(each in (None, "mean", "sum") for each in entries_of(self.reduce))
        return keeps_numbers and self.join != "list"

    @cached_property
    def row_dim_of_tensor(self) -> int | None:
        """The dim to concatenate outputs of one tensor on; None if the options say otherwise."""
        is_declared = self.out_dims is not UNDECLARED and not self.as_torch
        dim = self.out_dims if is_declared else self.dim
        if self.join != "cat" or not isinstance(dim, int):
            return None
        return dim if dim >= 0 else None  # a `Joiner` takes outputs with a negative dim

    @cached_property
    def declared(self) -> Declared:
        """The declarations of the whole output."""
        return Declared(self.out_dims, self.reduce, self.pad_value)

    @cached_property
    def row_dims(self) -> Callable[[TreeSpec], tuple[int, ...] | None]:
        """A function from a structure to the dim of each tensor in it.

        It returns None if some part of the structure is not concatenated. Threads may call it.
        """
        # A cache per object, and not one of the class: it goes when the block goes.
        find = partial(_find_row_dims, self.declared, self.dim, self.join)
        return lru_cache(_MOST_STRUCTURES)(find)

    def __post_init__(self) -> None:
        # The class is frozen, and its cached properties are read only after this.
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
                other = f". {each!r} is a value of reduce" if each in _REDUCTIONS else ""
                _refuse_entry("out_dims", each, 'a dim, None, "items", "ragged"', other)
        for each in entries_of(self.pad_value):
            if each is not None and not isinstance(each, numbers.Number):
                _refuse_entry("pad_value", each, "a number")


def _is_out_dim(entry: Any) -> bool:
    # A bool is an int, and `out_dims=True` is a mistake.
    is_dim = isinstance(entry, int) and not isinstance(entry, bool)
    return entry is UNDECLARED or entry is None or is_dim or entry in _WORDS


def _refuse_entry(name: str, entry: Any, allowed: str, more: str = "") -> NoReturn:
    like = "a tuple, dict, or dataclass of these like the output"
    msg = f"{name}={entry!r} is not supported. Use {allowed}, or {like}{more}"
    raise GatherError(msg)


class Refusal(Exception):  # noqa: N818
    """Why a place cannot be joined. Becomes a GatherError that names the place and a cure.

    `returned` are the values of the lanes in words, `advice` is what to do besides options. With
    `is_of_options`, the options have another structure than the output. Without `has_cure`, no
    option is right.
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
    """Refuse an option for the parts of a container where the output has another value."""
    if kind is ReturnedArgument:  # an argument: the options hold for what forward put into it
        return
    declares_keys = isinstance(option, dict)
    declares_items = isinstance(option, tuple) and kind not in SEQUENCES
    if declares_keys or declares_items:
        found = type(option).__name__
        _refuse_options(f"{name} declares a {found} here, and the lanes returned a {kind.__name__}")


def is_tree(option: Any) -> bool:
    """True if an option declares the parts of a container."""
    return isinstance(option, (dict, tuple))  # which `as_tree` makes of all options


def _has_undeclared(out_dims: Any) -> bool:
    """True if a tree of out_dims may not declare some place of an output."""
    if isinstance(out_dims, tuple):
        return any(map(_has_undeclared, out_dims))
    # An output may have keys that a dict does not name.
    return out_dims is UNDECLARED or isinstance(out_dims, dict)


def _find_row_dims(
    declared: Declared, dim: int, join: str, spec: TreeSpec
) -> tuple[int, ...] | None:
    """Return the dim of each leaf; None if an option says something else of one of them."""
    if join != "cat":
        return None
    try:
        leaves = declared.below(spec)
    except Refusal:
        return None  # joining place by place raises it again, with its place
    dims = []
    for leaf in leaves:
        is_reduced = leaf.names_reduce and leaf.reduce is not None
        # Without a look at `pad_value`: nothing is padded here.
        out_dim = dim if leaf.out_dim is UNDECLARED else leaf.out_dim
        if is_reduced or is_tree(leaf.reduce) or not isinstance(out_dim, int):
            return None
        dims.append(out_dim)
    return tuple(dims)


def _children(name: str, option: Any, missing: Any, entries: Sequence[Any]) -> list[Any]:
    """Return the entry of an option for each child of a node.

    `missing` stands for keys that the option leaves out.
    """
    if isinstance(option, dict):
        unknown = [key for key in option if key not in entries]
        if unknown:
            has = list(entries)
            _refuse_options(
                f"{name} declares the key {unknown[0]!r}, and the output has {has} here"
            )
        return [option.get(entry, missing) for entry in entries]
    if not isinstance(option, tuple):
        return [option] * len(entries)
    if len(option) != len(entries):
        _refuse_options(
            f"{name} declares {len(option)} items, and the output has {len(entries)} here"
        )
    return list(option)

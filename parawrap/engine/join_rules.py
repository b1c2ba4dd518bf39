"""The options of the user for joining outputs, and the errors that name further options."""

from __future__ import annotations

import numbers
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from parawrap.errors import GatherError
from parawrap.tree import UNDECLARED, Fields, TreeSpec, as_tree, entries_of

Reduce = Literal["mean", "sum", "stack"] | Callable[[torch.Tensor], torch.Tensor]
OutDims = Any
"""A dim, None, "items", or "ragged" for every output, or a tree of these like the output."""

PadValue = float | Mapping[Any, Any] | tuple[Any, ...] | list[Any] | Fields | None
"""A number for every output, a tree of numbers like the output, or None."""

SEQUENCES = (list, tuple, deque)
_REDUCTIONS = ("mean", "sum", "stack")
_WORDS = ("items", "ragged")
_MOST_STRUCTURES = 1024  # of outputs; a guess that no test has contradicted
JOIN_LIST = 'join="list" returns the outputs of the lanes as they are'
CURE = (
    "Declare it with out_dims: the dim that holds the rows (out_dims=0), None for one value that is the same in every "
    f'lane, "items" for a list with one item per row, "ragged" for rows in order whatever their number. {JOIN_LIST}'
)
SAME = "out_dims=None for a value that is the same in every lane"


class Declared(NamedTuple):
    """The declarations of one place in the output: of its rows, of the reduction of its numbers, and of its padding.

    `names_reduce` is True if `reduce` names this place, and not the numbers of the whole output. `is_whole` is True for an
    output that is not a container.
    """

    out_dim: Any
    reduce: Any
    pad_value: Any = UNDECLARED
    names_reduce: bool = False
    is_whole: bool = False

    @property
    def is_of_sequence(self) -> bool:
        """True if it declares the items of a list or tuple one by one."""
        return isinstance(self.out_dim, (list, tuple))

    @property
    def is_tree(self) -> bool:
        """True if it declares the parts of a container."""
        return is_tree(self.out_dim)

    def below(self, spec: TreeSpec) -> list[Declared]:
        """Return the declarations of each leaf below a node."""
        if spec.is_leaf():
            return [self]
        if isinstance(self.out_dim, Mapping) and spec.type in SEQUENCES:
            refuse(f"out_dims declares a dict here, and the lanes returned a {spec.type.__name__}")
        children = self._each(spec.entries())
        return [leaf for each, child in zip(children, spec.children(), strict=True) for leaf in each.below(child)]

    def items(self, count: int) -> list[Declared]:
        """Return the declarations of the items of a list or tuple."""
        return self._each(range(count))

    def _each(self, entries: Sequence[Any]) -> list[Declared]:
        out_dims = _children("out_dims", self.out_dim, UNDECLARED, entries)
        reductions = _children("reduce", self.reduce, None, entries)
        pad_values = _children("pad_value", self.pad_value, UNDECLARED, entries)
        names_reduce = is_tree(self.reduce)
        return [Declared(*each, names_reduce) for each in zip(out_dims, reductions, pad_values, strict=True)]


@dataclass(frozen=True)
class JoinRules:
    """The options for joining. With `as_torch`, the rules are those of torch.nn.DataParallel's gather.

    `pad_value` is None if the user gave none.
    """

    dim: int = 0
    out_dims: OutDims = UNDECLARED
    reduce: Any = None
    join: Literal["cat", "list", "pad"] = "cat"
    pad_value: Any = None
    as_torch: bool = False

    @cached_property
    def needs_proof(self) -> bool:
        """True if the sizes of shards must show which outputs follow the rows, and therefore differ."""
        return _leaves_open(self.out_dims) and self.join != "list" and not self.as_torch

    @cached_property
    def keep_single(self) -> bool:
        """True if the output of a call that was not cut is returned as it is."""
        return self.join != "list" and all(each in (None, "mean", "sum") for each in entries_of(self.reduce))

    @cached_property
    def row_dim_of_tensor(self) -> int | None:
        """The dim to concatenate outputs of one tensor on; None if the options say otherwise."""
        dim = self.dim if self.out_dims is UNDECLARED else self.out_dims
        return dim if self.join == "cat" and isinstance(dim, int) and dim >= 0 else None

    @cached_property
    def declared(self) -> Declared:
        """The declarations of the whole output."""
        return Declared(self.out_dims, self.reduce, UNDECLARED if self.pad_value is None else self.pad_value, is_whole=True)

    @cached_property
    def _row_dims(self) -> dict[TreeSpec, tuple[int, ...] | None]:
        return {}

    def row_dims(self, spec: TreeSpec) -> tuple[int, ...] | None:
        """Return the dim of each tensor of an output of that structure, if every tensor in it is concatenated."""
        dims: tuple[int, ...] | None = self._row_dims.get(spec, UNDECLARED)
        if dims is UNDECLARED:
            if len(self._row_dims) >= _MOST_STRUCTURES:
                self._row_dims.clear()
            dims = self._row_dims[spec] = self._find_row_dims(spec)
        return dims

    def _find_row_dims(self, spec: TreeSpec) -> tuple[int, ...] | None:
        if self.join != "cat" or self.as_torch:
            return None
        try:
            leaves = self.declared.below(spec)
        except Refusal:
            return None  # the slow way raises it, with its place
        if any(each.is_tree or (each.names_reduce and each.reduce is not None) for each in leaves):
            return None
        dims = [self.dim if each.out_dim is UNDECLARED else each.out_dim for each in leaves]
        return tuple(dims) if all(isinstance(dim, int) for dim in dims) else None

    def __post_init__(self) -> None:
        for name in ("out_dims", "reduce", "pad_value"):
            object.__setattr__(self, name, as_tree(getattr(self, name)))
        for each in entries_of(self.reduce):
            if each is not None and each not in _REDUCTIONS and not callable(each):
                msg = (
                    f"reduce={each!r} is not supported. Use 'mean', 'sum', 'stack', a function of a vector, or a tuple, "
                    "dict, or dataclass of these like the output"
                )
                raise GatherError(msg)
        if self.join not in ("cat", "list", "pad"):
            msg = f"join={self.join!r} is not supported. Use 'cat', 'pad', or 'list'"
            raise GatherError(msg)
        for each in entries_of(self.out_dims):
            if isinstance(each, bool) or not (
                each is UNDECLARED or each is None or isinstance(each, int) or each in _WORDS
            ):
                other = f". {each!r} is a value of reduce" if each in _REDUCTIONS else ""
                msg = (
                    f'out_dims has {each!r}. Use a dim, None, "items", "ragged", or a tuple, dict, or dataclass of these '
                    f"like the output{other}"
                )
                raise GatherError(msg)
        for each in entries_of(self.pad_value):
            if each is not None and not isinstance(each, numbers.Number):
                like = "a tuple, dict, or dataclass of numbers like the output"
                msg = f"pad_value={each!r} is not supported. Use a number, or {like}"
                raise GatherError(msg)


class Refusal(Exception):  # noqa: N818
    """Why a place cannot be joined, with the way to it from the inside out. Becomes a GatherError."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.steps: list[str] = []


def refuse(why: str) -> NoReturn:
    """Raise a refusal."""
    raise Refusal(why)


def is_tree(option: Any) -> bool:
    """True if an option declares the parts of a container."""
    return isinstance(option, (list, tuple, Mapping))


def _leaves_open(out_dims: Any) -> bool:
    """True if a tree of out_dims leaves some place open."""
    if isinstance(out_dims, Mapping):
        return True  # an output may have keys that it does not name
    if isinstance(out_dims, (list, tuple)):
        return any(map(_leaves_open, out_dims))
    return out_dims is UNDECLARED


def _children(name: str, option: Any, missing: Any, entries: Sequence[Any]) -> list[Any]:
    """Return the entry of an option for each child of a node. `missing` stands for keys that the option leaves out."""
    if isinstance(option, Mapping):
        unknown = [key for key in option if key not in entries]
        if unknown:
            refuse(f"{name} declares the key {unknown[0]!r}, and the output has {list(entries)} here")
        return [option.get(entry, missing) for entry in entries]
    if isinstance(option, (list, tuple)) and len(option) != len(entries):
        refuse(f"{name} declares {len(option)} items, and the output has {len(entries)} here")
    return list(option) if isinstance(option, (list, tuple)) else [option] * len(entries)

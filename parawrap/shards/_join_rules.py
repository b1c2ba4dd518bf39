"""The options of the user for joining outputs, and the errors that name further options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, NoReturn

import torch

from parawrap.errors import GatherError
from parawrap.tree import TreeSpec

__all__ = [
    "CURE",
    "JOIN_LIST",
    "UNDECLARED",
    "Declared",
    "JoinRules",
    "OutDims",
    "Reduce",
    "Refusal",
    "as_tree",
    "entries_of",
    "refuse",
]

Reduce = Literal["mean", "sum", "stack"] | Callable[[torch.Tensor], torch.Tensor]
OutDims = Any
"""A dim, None, "items", or "ragged" for every output, or a tree of these like the output."""

UNDECLARED: Any = object()
"""The declaration of a place that `out_dims` does not name."""

_REDUCTIONS = ("mean", "sum", "stack")
_WORDS = ("items", "ragged")
JOIN_LIST = 'join="list" returns the outputs of the lanes as they are'
CURE = (
    "Declare it with out_dims: the dim that holds the rows (out_dims=0), None for one value that is the same in every "
    f'lane, "items" for a list with one item per row, "ragged" for rows in order whatever their number. {JOIN_LIST}'
)


class Declared(NamedTuple):
    """The declarations of one place in the output: of its rows, and of the reduction of its numbers.

    `names_reduce` is True if `reduce` names this place, and not the numbers of the whole output. `is_whole` is True for an
    output that is not a container.
    """

    out_dim: Any
    reduce: Any
    names_reduce: bool = False
    is_whole: bool = False

    @property
    def is_of_sequence(self) -> bool:
        """True if it declares the items of a list or tuple one by one."""
        return isinstance(self.out_dim, (list, tuple))

    @property
    def is_tree(self) -> bool:
        """True if it declares the parts of a container."""
        return _is_tree(self.out_dim)

    def below(self, spec: TreeSpec) -> list[Declared]:
        """Return the declarations of each leaf below a node."""
        if spec.is_leaf():
            return [self]
        out_dims = _children("out_dims", self.out_dim, UNDECLARED, spec)
        reductions = _children("reduce", self.reduce, None, spec)
        children = [Declared(*each, _is_tree(self.reduce)) for each in zip(out_dims, reductions, strict=True)]
        return [leaf for each, child in zip(children, spec.children(), strict=True) for leaf in each.below(child)]

    def items(self, count: int) -> list[Declared]:
        """Return the declarations of the items of a list or tuple."""
        pairs = zip(_items("out_dims", self.out_dim, count), _items("reduce", self.reduce, count), strict=True)
        return [Declared(*each, _is_tree(self.reduce)) for each in pairs]


@dataclass(frozen=True)
class JoinRules:
    """The options for joining. With `as_torch`, the rules are those of torch.nn.DataParallel's gather."""

    dim: int = 0
    out_dims: OutDims = UNDECLARED
    reduce: Any = None
    join: Literal["cat", "list", "pad"] = "cat"
    pad_value: float = 0
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
    def joins_rows(self) -> bool:
        """True if every tensor with its shard's row count on `dim` is concatenated."""
        is_on_dim = self.out_dims is UNDECLARED or self.out_dims == self.dim
        return self.join == "cat" and is_on_dim and not self.as_torch

    @property
    def declared(self) -> Declared:
        """The declarations of the whole output."""
        return Declared(self.out_dims, self.reduce, is_whole=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "out_dims", as_tree(self.out_dims))
        object.__setattr__(self, "reduce", as_tree(self.reduce))
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


class Refusal(Exception):  # noqa: N818
    """Why a place cannot be joined, with the way to it from the inside out. Becomes a GatherError."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.steps: list[str] = []


def refuse(why: str) -> NoReturn:
    """Raise a refusal."""
    raise Refusal(why)


def as_tree(option: Any) -> Any:
    """Return an option that may be a tree, with dicts of their fields in the places of dataclasses."""
    if is_dataclass(option) and not isinstance(option, type) and not isinstance(option, Mapping):
        return {field.name: as_tree(getattr(option, field.name)) for field in fields(option) if hasattr(option, field.name)}
    if isinstance(option, Mapping):
        return {key: as_tree(each) for key, each in option.items()}
    return tuple(map(as_tree, option)) if isinstance(option, (list, tuple)) else option


def _is_tree(option: Any) -> bool:
    return isinstance(option, (list, tuple, Mapping))


def entries_of(option: Any) -> list[Any]:
    """Return the entries of an option that may be a tree."""
    if not _is_tree(option):
        return [option]
    below = option.values() if isinstance(option, Mapping) else option
    return [leaf for each in below for leaf in entries_of(each)]


def _leaves_open(out_dims: Any) -> bool:
    """True if a tree of out_dims leaves some place open."""
    if isinstance(out_dims, Mapping):
        return True  # an output may have keys that it does not name
    if isinstance(out_dims, (list, tuple)):
        return any(map(_leaves_open, out_dims))
    return out_dims is UNDECLARED


def _children(name: str, option: Any, missing: Any, spec: TreeSpec) -> list[Any]:
    """Return the entry of an option for each child of a node. `missing` stands for keys that the option leaves out."""
    if isinstance(option, Mapping):
        unknown = [key for key in option if key not in spec.entries()]
        if unknown:
            refuse(f"{name} declares the key {unknown[0]!r}, and the output has {list(spec.entries())} here")
        return [option.get(entry, missing) for entry in spec.entries()]
    if isinstance(option, (list, tuple)):
        return _items(name, option, spec.num_children)
    return [option] * spec.num_children


def _items(name: str, option: Any, count: int) -> list[Any]:
    if not isinstance(option, (list, tuple)):
        return [option] * count
    if len(option) != count:
        refuse(f"{name} declares {len(option)} items, and the output has {count} here")
    return list(option)

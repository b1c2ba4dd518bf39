"""The options of the user for joining outputs, and the errors that name further options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch

from parawrap.errors import GatherError
from parawrap.tree import TreeSpec

__all__ = ["CURE", "LEARN", "JoinRules", "OutDims", "Reduce", "Refusal", "declared_below", "refuse"]

Reduce = Literal["mean", "sum", "stack"] | Callable[[torch.Tensor], torch.Tensor]
OutDims = Any
"""A dim, None, "items", or "ragged" for every output, or a tree of these like the output."""

LEARN: Any = object()
"""The declaration of a place that `out_dims` does not name."""

_REDUCTIONS = ("mean", "sum", "stack")
_WORDS = ("items", "ragged")
CURE = (
    "Declare it with out_dims: the dim that holds the rows (out_dims=0), None for one value that is the same in every "
    'lane, "items" for a list with one item per row, "ragged" for rows in order whatever their number. join="list" returns '
    "the outputs of the lanes as they are"
)


@dataclass(frozen=True, slots=True)
class JoinRules:
    """The options for joining. With `as_torch`, the rules are those of torch.nn.DataParallel's gather."""

    dim: int = 0
    out_dims: OutDims = LEARN
    reduce: Reduce | None = None
    join: Literal["cat", "list", "pad"] = "cat"
    pad_value: float = 0
    as_torch: bool = False

    @property
    def learns(self) -> bool:
        """True if calls must show which outputs follow the rows, and may be cut for it.

        A stack has one value per lane, so its calls are always cut evenly.
        """
        may_cut = self.join != "list" and not self.as_torch and self.reduce in (None, "mean", "sum")
        return may_cut and _leaves_open(self.out_dims)

    @property
    def keep_single(self) -> bool:
        """True if the output of a call that was not cut is returned as it is."""
        return self.join != "list" and self.reduce in (None, "mean", "sum")

    def __post_init__(self) -> None:
        if self.reduce is not None and self.reduce not in _REDUCTIONS and not callable(self.reduce):
            msg = f"reduce={self.reduce!r} is not supported. Use 'mean', 'sum', 'stack', or a function of a vector"
            raise GatherError(msg)
        if self.join not in ("cat", "list", "pad"):
            msg = f"join={self.join!r} is not supported. Use 'cat', 'pad', or 'list'"
            raise GatherError(msg)
        _check_out_dims(self.out_dims)


class Refusal(Exception):  # noqa: N818
    """Why a place cannot be joined, with the way to it from the inside out. Becomes a GatherError."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.steps: list[str] = []


def refuse(why: str) -> NoReturn:
    """Raise a refusal."""
    raise Refusal(why)


def _leaves_open(declared: Any) -> bool:
    """True if a tree of out_dims leaves some place open."""
    if isinstance(declared, Mapping):
        return True  # an output may have keys that it does not name
    if isinstance(declared, (list, tuple)):
        return any(map(_leaves_open, declared))
    return declared is LEARN


def _check_out_dims(declared: Any) -> None:
    if isinstance(declared, (list, tuple, Mapping)):
        for below in declared.values() if isinstance(declared, Mapping) else declared:
            _check_out_dims(below)
    elif isinstance(declared, bool) or not (
        declared is LEARN or declared is None or isinstance(declared, int) or declared in _WORDS
    ):
        msg = f'out_dims has {declared!r}. Use a dim, None, "items", "ragged", or a tuple or dict of these like the output'
        raise GatherError(msg)


def declared_below(declared: Any, spec: TreeSpec) -> list[Any]:
    """Return the declaration of each leaf below a node."""
    if spec.is_leaf():
        return [declared]
    if isinstance(declared, Mapping):
        if spec.entries() and not any(entry in declared for entry in spec.entries()):
            refuse(f"out_dims declares the keys {list(declared)}, and the output has {list(spec.entries())} here")
        below = [declared.get(entry, LEARN) for entry in spec.entries()]
    elif isinstance(declared, (list, tuple)):
        if len(declared) != spec.num_children:
            refuse(f"out_dims declares {len(declared)} items, and the output has {spec.num_children} here")
        below = list(declared)
    else:
        return [declared] * spec.num_leaves
    return [leaf for each, child in zip(below, spec.children(), strict=True) for leaf in declared_below(each, child)]

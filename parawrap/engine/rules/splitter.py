"""The rules of types that are cut and joined as a whole, and the errors of their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap.errors import GatherError, ShardError


class Splitter(NamedTuple):
    """The rules of one type.

    `split` cuts a value into parts of the given sizes, `join` puts parts together, and `rows`
    counts the rows of a value. `to` brings a part to a device; None calls the part's own method
    `to`, if there is one. `update` puts the state of joined parts into the argument that they came
    from, and `contents` lists the state of a value; None stands for the rules of any object, in
    `object_state.py`. A value that `may_be_empty` and has no rows, such as a cache before its first
    use, becomes one empty part per lane.
    """

    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    rows: Callable[[Any], int]
    to: Callable[[Any, torch.device], Any] | None = None
    update: Callable[[Any, Any], object] | None = None
    contents: Callable[[Any], list[Any]] | None = None
    may_be_empty: bool = False


def refuse_split(value: object, why: str, cure: str = "") -> NoReturn:
    """Raise for an argument, or for a layer inside one. `cure` is another one in words."""
    # Only the class of the argument can be registered, whatever lies inside it.
    name = type(value).__name__
    msg = (
        f"a {name} cannot be cut: {why}. Use parawrap.register_split for the class of the argument"
        f"{cure}"
    )
    raise ShardError(msg)


def refuse_to_join(value: object, why: str) -> NoReturn:
    """Raise for the parts of a value that the lanes returned or changed."""
    msg = f"the lanes' parts of a {type(value).__name__} cannot be joined: {why}"
    raise GatherError(msg)


def refuse_update(value: object, why: str) -> NoReturn:
    """Raise for an argument that forward changed, and that cannot take the change."""
    msg = f"forward changed its {type(value).__name__}, and {why}. Return it instead"
    raise GatherError(msg)


def spans(sizes: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Return the start and the end of each part."""
    # An iterator of C code: every cut value of every call goes through here.
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


def are_equal(one: Any, other: Any) -> bool:
    """True if two values are equal, element by element for tensors."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)

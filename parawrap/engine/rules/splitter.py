"""The rules of types that are cut and joined as a whole, and the errors of their values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from parawrap.errors import GatherError, ShardError


class Splitter(NamedTuple):
    """The rules of one type.

    Attributes:
        split: Cuts a value into parts of the given sizes.
        join: Joins parts, in order.
        rows: Counts the rows of a value.
        to: Returns a part on a device; None calls the part's own method `to`, if there is one.
        update: Puts the state of joined parts into the argument that they came from; None calls
            `put_state` of `object_state.py`.
        contents: Lists the state of a value; None calls `list_state` of `object_state.py`.
        may_be_empty: True if a value without rows, such as a cache before its first use, is cut
            into one empty part per lane.
    """

    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    rows: Callable[[Any], int]
    to: Callable[[Any, torch.device], Any] | None = None
    update: Callable[[Any, Any], object] | None = None
    contents: Callable[[Any], list[Any]] | None = None
    may_be_empty: bool = False


def refuse_split(value: object, why: str, cure: str = "") -> NoReturn:
    """Refuse to cut an argument for a value in it, such as a layer of a cache.

    `cure` is what else the user can do, in words.
    """
    # "of the argument": the class of an inner value may be registered, and would not be used
    name = type(value).__name__
    msg = (
        f"a {name} cannot be cut: {why}. Use parawrap.register_split for the class of the argument"
        f"{cure}"
    )
    raise ShardError(msg)


def refuse_to_join(value: object, why: str) -> NoReturn:
    """Refuse to join the parts of a value that the lanes returned or changed."""
    msg = f"the lanes' parts of a {type(value).__name__} cannot be joined: {why}"
    raise GatherError(msg)


def refuse_update(value: object, why: str) -> NoReturn:
    """Refuse a change by forward that the argument cannot take."""
    msg = f"forward changed its {type(value).__name__}, and {why}. Return it instead"
    raise GatherError(msg)


def spans(sizes: Iterable[int]) -> Iterable[tuple[int, int]]:
    """Return the start and the end of each part."""
    # An iterator in C, since every cut value of every call goes through here
    return itertools.pairwise(itertools.accumulate(sizes, initial=0))


def are_equal(one: Any, other: Any) -> bool:
    """True if two values are equal, element by element for tensors."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)

"""Values that are cut and joined in a way of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils import rnn

from parawrap.tree import keep_whole

__all__ = ["Splitter", "register_split", "splitter_of"]


class Splitter(NamedTuple):
    """How the values of one type are cut into parts of given sizes, joined again, and counted."""

    split: Callable[[Any, Sequence[int]], Sequence[Any]]
    join: Callable[[Sequence[Any]], Any]
    rows: Callable[[Any], int]


_splitters: dict[type, Splitter] = {}


def register_split(
    cls: type,
    *,
    split: Callable[[Any, Sequence[int]], Sequence[Any]],
    join: Callable[[Sequence[Any]], Any],
    rows: Callable[[Any], int] = len,
) -> None:
    """Teach parawrap to cut and join the instances of a class, wherever in a call or an output they lie.

    Args:
        cls: the class; its instances are no longer looked into, also where they are containers.
        split: ``split(value, sizes)`` returns one part for each size, with that many rows, in order.
        join: ``join(parts)`` puts parts together, in order; outputs of the class are joined by it.
        rows: ``rows(value)`` counts the rows; `len` by default.

    Raises:
        ShardError: at a call, for a `split` that returns another number of parts than it was given sizes.

    Example:
        >>> import torch
        >>> from parawrap import parallel, register_split
        >>> class Words:
        ...     def __init__(self, items): self.items = list(items)
        ...     def __len__(self): return len(self.items)
        >>> def split(words, sizes):
        ...     items = iter(words.items)
        ...     return [Words(next(items) for _ in range(size)) for size in sizes]
        >>> register_split(Words, split=split, join=lambda parts: Words(w for part in parts for w in part.items))
        >>> with parallel(lambda x, words: (x + 1, words), ["cpu", "cpu"]) as p:
        ...     y, words = p(torch.zeros(3), Words(["a", "b", "c"]))
        >>> y.tolist(), words.items
        ([1.0, 1.0, 1.0], ['a', 'b', 'c'])
    """
    keep_whole(cls)
    _splitters[cls] = Splitter(split, join, rows)


def splitter_of(value: object) -> Splitter:
    """The registered splitter of a value that is kept whole, else the one of plain sequences."""
    return _splitters.get(type(value), _SEQUENCE)


def _split_sequence(value: Any, sizes: Sequence[int]) -> list[Any]:
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _join_sequence(parts: Sequence[Any]) -> Any:
    joined = parts[0]
    for part in parts[1:]:
        joined = joined + part
    return joined


def _split_packed(value: rnn.PackedSequence, sizes: Sequence[int]) -> list[rnn.PackedSequence]:
    rows, lengths = rnn.pad_packed_sequence(value, batch_first=True)
    return [
        rnn.pack_padded_sequence(part[:, : int(length.max())], length, batch_first=True, enforce_sorted=False)
        for part, length in zip(rows.split_with_sizes(sizes), lengths.split_with_sizes(sizes), strict=True)
    ]


def _join_packed(parts: Sequence[rnn.PackedSequence]) -> rnn.PackedSequence:
    rows: list[torch.Tensor] = []
    for part in parts:
        padded, lengths = rnn.pad_packed_sequence(part, batch_first=True)
        rows += [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]
    return rnn.pack_sequence(rows, enforce_sorted=False)


def _packed_rows(value: rnn.PackedSequence) -> int:
    return int(value.batch_sizes[0])


_SEQUENCE = Splitter(_split_sequence, _join_sequence, len)
# Cut along its time steps, as the namedtuple that it is, a packed sequence would fall apart without an error.
register_split(rnn.PackedSequence, split=_split_packed, join=_join_packed, rows=_packed_rows)

"""Cut and join packed sequences along their rows. Cut as namedtuples, along their time steps, they would fall apart."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.nn.utils import rnn

from parawrap.engine.rules.splitter import Splitter


def _split_packed(value: rnn.PackedSequence, sizes: Sequence[int]) -> list[rnn.PackedSequence]:
    """Cut along the rows. A batch that was sorted by its caller gives parts that are sorted in the same way."""
    rows, lengths = rnn.pad_packed_sequence(value, batch_first=True)
    return [
        rnn.pack_padded_sequence(
            part[:, : int(length.max())], length, batch_first=True, enforce_sorted=value.sorted_indices is None
        )
        for part, length in zip(rows.split_with_sizes(list(sizes)), lengths.split_with_sizes(list(sizes)), strict=True)
    ]


def _join_packed(parts: Sequence[rnn.PackedSequence]) -> rnn.PackedSequence:
    """Concatenate the rows in order. Parts that were sorted by the caller make a whole without sorting indices."""
    rows: list[torch.Tensor] = []
    is_sorted = all(part.sorted_indices is None for part in parts)
    for part in parts:
        padded, lengths = rnn.pad_packed_sequence(part, batch_first=True)
        rows += [row[:length] for row, length in zip(padded, lengths.tolist(), strict=True)]
    is_sorted = is_sorted and all(len(one) >= len(other) for one, other in itertools.pairwise(rows))
    return rnn.pack_sequence(rows, enforce_sorted=is_sorted)


def _count_packed_rows(value: rnn.PackedSequence) -> int:
    return int(value.batch_sizes[0])


PACKED_RULES = Splitter(_split_packed, _join_packed, _count_packed_rows)

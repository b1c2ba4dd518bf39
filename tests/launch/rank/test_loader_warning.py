"""parawrap warns once if a plain shuffling loader in a rank would give every rank the same rows."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parawrap import current_rank, wrapper
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.processes import ranks

ROWS = TensorDataset(torch.arange(8))


def iterates(rows):
    """Iterate loaders that need no warning, then some that do, and return the warnings of each."""
    rank = current_rank()
    first, second = (DataLoader(rows, batch_size=2, shuffle=True) for _ in range(2))
    sharded = DistributedSampler(rows, rank.world_size, rank.global_rank)
    loaders = DataLoader(rows), DataLoader(rows, sampler=sharded), first, first, second
    return [warnings_of(lambda loader=loader: list(loader)) for loader in loaders]


def test_shuffling_loader_warns_once():
    """The warning names functional.shard_loader."""
    for *others, shuffled, again, further in wrapper(ranks())(iterates)(ROWS):
        (message,) = shuffled
        assert "functional.shard_loader" in message
        assert others == [[], []]
        assert again == further == []


def test_lone_rank_does_not_warn():
    """A single rank and the script itself use all rows."""
    assert wrapper(ranks(1))(iterates)(ROWS) == wrapper(ranks(1))(iterates).inline(ROWS) == ([[]] * 5,)
    assert warnings_of(lambda: list(DataLoader(ROWS, batch_size=2, shuffle=True))) == []

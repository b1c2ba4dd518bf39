"""parawrap warns once if a plain shuffling loader in a rank would give every rank the same rows."""

from __future__ import annotations

import warnings

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parawrap import current_rank, wrapper
from tests.helpers.processes import ranks

ROWS = TensorDataset(torch.arange(8))


def warnings_of(*loaders):
    """Iterate each loader and return the warnings, one list per loader."""
    found = []
    for loader in loaders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sum(len(rows) for (rows,) in loader) >= 4
        found.append([(each.category, str(each.message), each.filename) for each in caught])
    return found


def iterates(rows):
    """Iterate loaders that need no warning, then some that do."""
    rank = current_rank()
    first, second = (DataLoader(rows, batch_size=2, shuffle=True) for _ in range(2))
    sharded = DistributedSampler(rows, rank.world_size, rank.global_rank)
    return warnings_of(DataLoader(rows), DataLoader(rows, sampler=sharded), first, first, second)


def test_shuffling_loader_warns_once():
    """UserWarning names functional.shard_loader and points to the user's file."""
    for *others, shuffled, again, further in wrapper(ranks())(iterates)(ROWS):
        ((category, message, file),) = shuffled
        assert (category, file) == (UserWarning, __file__)
        assert "functional.shard_loader" in message
        assert others == [[], []]
        assert again == further == []


def test_lone_rank_does_not_warn():
    """A single rank and the script itself use all rows."""
    assert wrapper(ranks(1))(iterates)(ROWS) == wrapper(ranks(1))(iterates).inline(ROWS) == ([[]] * 5,)
    assert warnings_of(DataLoader(ROWS, batch_size=2, shuffle=True)) == [[]]

"""parawrap warns once if a plain shuffling loader in a rank would give every rank the same rows."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parawrap import current_rank, wrapper
from tests.helpers.processes import ranks

ROWS = TensorDataset(torch.arange(8))


def warned(*loaders):
    """Iterate each loader and return the warnings, one list per loader."""
    found = []
    for loader in loaders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sum(len(rows) for (rows,) in loader) >= 4
        found.append([(each.category.__name__, str(each.message), each.filename) for each in caught])
    return found


def plain_loader(rows):
    """Return a loader as in a single-process script."""
    return DataLoader(rows, batch_size=2, shuffle=True)


def test_a_shuffling_loader_warns_once_per_rank():
    """UserWarning names functional.shard_loader and points to the user's file; later passes and loaders do not warn."""

    def iterates(rows):
        first = plain_loader(rows)
        return warned(first, first, plain_loader(rows))

    for first, *others in wrapper(ranks())(iterates)(ROWS):
        ((category, message, file),) = first
        assert category == "UserWarning"
        assert "functional.shard_loader" in message
        assert file == __file__
        assert others == [[], []]


def test_loaders_without_shuffling_do_not_warn():
    """A DistributedSampler and a loader without shuffling do not warn."""

    def iterates(rows):
        rank = current_rank()
        sampler = DistributedSampler(rows, rank.world_size, rank.global_rank)
        return warned(
            DataLoader(rows, batch_size=2, sampler=sampler),
            DataLoader(rows, batch_size=2, shuffle=False),
            DataLoader(rows, batch_size=2),
        )

    assert wrapper(ranks())(iterates)(ROWS) == ([[], [], []],) * 2


@pytest.mark.parametrize("call", ["one rank", "inline", "plain"])
def test_a_shuffling_loader_outside_a_world_does_not_warn(call):
    """A single rank, an inline run, and the script itself use all rows, so they do not warn."""

    def iterates(rows):
        return warned(plain_loader(rows))

    launchable = wrapper(ranks(1))(iterates)
    call = {"one rank": launchable, "inline": launchable.inline, "plain": lambda rows: (iterates(rows),)}[call]
    assert call(ROWS) == ([[]],)

"""A loader that shuffles gives every rank the same rows: parawrap warns once, and names the helper."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from parawrap import current_rank, wrapper
from tests.launch.processes import ranks

ROWS = TensorDataset(torch.arange(8))


def warned(*loaders):
    """The warnings that are shown while each loader is iterated, one list per loader."""
    found = []
    for loader in loaders:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert sum(len(rows) for (rows,) in loader) >= 4
        found.append([(each.category.__name__, str(each.message), each.filename) for each in caught])
    return found


def raw(rows):
    """A loader as in a script for one process."""
    return DataLoader(rows, batch_size=2, shuffle=True)


def test_a_raw_loader_that_shuffles_is_named_once_in_each_rank():
    """UserWarning names functional.shard_loader, at the user's line; a second pass and a second loader add none."""

    def iterates(rows):
        first = raw(rows)
        return warned(first, first, raw(rows))

    for first, *others in wrapper(ranks())(iterates)(ROWS):
        ((category, message, file),) = first
        assert category == "UserWarning"
        assert "functional.shard_loader" in message
        assert file == __file__
        assert others == [[], []]


def test_loaders_that_are_right_in_a_rank_do_not_warn():
    """A sampler of the rank's own, and a loader in the order of its rows, are what they seem."""

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
def test_a_loader_that_shuffles_outside_a_world_does_not_warn(call):
    """One rank, an inline run, and the script itself see all rows once."""

    def iterates(rows):
        return warned(raw(rows))

    launchable = wrapper(ranks(1))(iterates)
    call = {"one rank": launchable, "inline": launchable.inline, "plain": lambda rows: (iterates(rows),)}[call]
    assert call(ROWS) == ([[]],)

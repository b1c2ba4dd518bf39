"""`get_dataset_sampler`: the share of a dataset's rows that a rank reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from parawrap import PlatformError, current_rank, functional
from tests.helpers.processes import ranks
from tests.helpers.ranks import on


@given(st.integers(2, 7), st.integers(0, 40))
def test_unpadded_shares_are_complete(world_size, length):
    """The shares of all ranks are the rows in order, and their lengths differ by at most one."""
    platform = ranks(world_size)
    shares = [
        functional.get_dataset_sampler(range(length), rank, platform, pad=False)
        for rank in range(world_size)
    ]
    shares[0].set_epoch(3)  # exists for training loops, and changes nothing
    rows = [list(share) for share in shares]
    assert [row for share in rows for row in share] == list(range(length))
    assert [len(share) for share in shares] == [len(share) for share in rows]
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_ranks_know_their_share():
    """Inside a rank, rank and platform are known, and a DataLoader reads the rank's share.

    Padded shares equal torch's.
    """

    def rows():
        data = TensorDataset(torch.arange(7))
        loader = DataLoader(
            data, batch_size=2, sampler=functional.get_dataset_sampler(data, pad=False)
        )
        padded, torchs = (
            functional.get_dataset_sampler(data),
            DistributedSampler(data, 3, current_rank().global_rank),
        )
        assert isinstance(padded, DistributedSampler)
        for each in (padded, torchs):
            each.set_epoch(2)
        assert list(padded) == list(torchs)
        return [batch.tolist() for (batch,) in loader]

    assert on(3, rows) == ([[0, 1], [2]], [[3, 4]], [[5, 6]])


def test_one_rank_gets_no_sampler():
    """None lets DataLoader's own `shuffle` apply."""
    assert functional.get_dataset_sampler(range(5), pad=False) is None
    assert functional.get_dataset_sampler(range(5), 0, ranks(1)) is None
    assert on(1, functional.get_dataset_sampler, range(5)) == (None,)


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        yield from range(3)


def test_other_arguments_are_refused():
    for world_size in (1, 2):
        with pytest.raises(TypeError, match=r"Stream has no length.*current_rank\(\)"):
            functional.get_dataset_sampler(Stream(), 0, ranks(world_size))
    for rank, world_size in ((2, 2), (-1, 2), (1, 1)):
        with pytest.raises(PlatformError, match=rf"global_rank={rank}\b.*world of {world_size}"):
            functional.get_dataset_sampler(range(5), rank, ranks(world_size), pad=False)

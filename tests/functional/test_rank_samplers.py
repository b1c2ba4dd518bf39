"""`get_dataset_sampler`: the share of a dataset's rows that a rank reads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from parawrap import Platform, PlatformError, functional
from tests.helpers.ranks import on


def platform_of(ranks):
    return Platform(device="cpu", n_cpus=ranks)


@given(st.integers(2, 7), st.integers(0, 40))
def test_unpadded_shares_are_complete(world_size, length):
    """The shares of all ranks are the rows in order, and their lengths differ by at most one."""
    platform = platform_of(world_size)
    shares = [functional.get_dataset_sampler(range(length), rank, platform, pad=False) for rank in range(world_size)]
    shares[0].set_epoch(3)  # exists for training loops, and changes nothing
    rows = [list(share) for share in shares]
    assert [row for share in rows for row in share] == list(range(length))
    assert [len(share) for share in shares] == [len(share) for share in rows]
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@given(st.integers(2, 7), st.integers(1, 40), st.integers(0, 3))
def test_padded_shares_equal_torchs(world_size, length, epoch):
    for rank in range(world_size):
        ours = functional.get_dataset_sampler(range(length), rank, platform_of(world_size))
        torchs = DistributedSampler(range(length), world_size, rank)
        assert isinstance(ours, DistributedSampler)
        ours.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(ours) == list(torchs)


def test_ranks_know_their_share():
    """Inside a rank, rank and platform are known, and a DataLoader with the sampler reads the rank's share."""

    def rows():
        data = TensorDataset(torch.arange(7))
        loader = DataLoader(data, batch_size=2, sampler=functional.get_dataset_sampler(data, pad=False))
        padded = functional.get_dataset_sampler(data)
        return [batch.tolist() for (batch,) in loader], len(padded), padded.num_replicas, padded.rank

    assert on(3, rows) == (([[0, 1], [2]], 3, 3, 0), ([[3, 4]], 3, 3, 1), ([[5, 6]], 3, 3, 2))


def test_one_rank_gets_no_sampler():
    """None lets DataLoader's own `shuffle` apply."""

    def is_none():
        return functional.get_dataset_sampler(range(5), pad=False) is None

    assert (is_none(), *on(1, is_none)) == (True, True)
    assert functional.get_dataset_sampler(range(5), 0, platform_of(1)) is None


class Stream(IterableDataset):
    """A dataset without a length."""

    def __iter__(self):
        yield from range(3)


def test_other_arguments_are_refused():
    """A dataset without a length, and a rank out of range, also with one rank."""
    for world_size in (1, 2):
        with pytest.raises(TypeError, match=r"Stream has no length.*current_rank\(\)"):
            functional.get_dataset_sampler(Stream(), 0, platform_of(world_size))
    for rank, world_size in ((2, 2), (-1, 2), (1, 1)):
        with pytest.raises(PlatformError, match=rf"global_rank={rank}\b.*world of {world_size}"):
            functional.get_dataset_sampler(range(5), rank, platform_of(world_size), pad=False)

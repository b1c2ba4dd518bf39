"""`shard_loader`: every rank reads its share of a loader's rows, and each iteration is the next epoch."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
)

from parawrap import PlatformError, current_rank, functional
from tests.helpers.ranks import on


def rows_of(loader, epochs=1):
    return [[int(row) for batch in loader for row in torch.as_tensor(batch).flatten()] for _ in range(epochs)]


def order_of_torch(length, rank, epoch, **options):
    torchs = DistributedSampler(range(length), 2, rank, **options)
    torchs.set_epoch(epoch)
    return list(torchs)


@pytest.mark.parametrize(
    ("length", "shuffle"),
    [(0, False), (1, True), (7, False), (12, True)],  # older torch cannot shuffle zero rows
)
def test_shares_have_each_row(ranks, length, shuffle):
    """Without padding, once. With padding, ranks get equally many. With drop_last, full batches, and no row twice."""

    def read(pad, drop_last):
        loader = DataLoader(range(length), batch_size=2, shuffle=shuffle, drop_last=drop_last)
        sharded = functional.shard_loader(loader, pad=pad)
        assert len(list(sharded)) == len(sharded)
        sharded.sampler.set_epoch(0)
        return rows_of(sharded, epochs=3)

    for one, other in zip(*ranks(read, False, False), strict=True):
        assert sorted(one + other) == list(range(length))
        assert abs(len(one) - len(other)) <= 1
    padded = ranks(read, True, False)
    for one, other in zip(*padded, strict=True):
        assert set(one + other) == set(range(length))
        assert len(one) == len(other) == -(-length // 2)
    for one, other in zip(*ranks(read, True, True), strict=True):
        assert max(Counter(one + other).values(), default=1) == 1
        assert len(one) == len(other)
        assert len(one) % 2 == 0
    if length:  # each iteration is the next epoch of DistributedSampler
        expected = [[order_of_torch(length, rank, epoch, shuffle=shuffle) for epoch in range(3)] for rank in range(2)]
        assert [*padded] == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_rank_reads_every_row(shuffle):
    """Also outside a launch. A shuffled loader has a new order in each epoch."""
    loader = functional.shard_loader(DataLoader(range(9), batch_size=2, shuffle=shuffle), pad=shuffle)
    epochs = rows_of(loader, epochs=3)
    assert all(sorted(rows) == list(range(9)) for rows in epochs)
    assert len({str(rows) for rows in epochs}) == (3 if shuffle else 1)
    assert len(loader) == 5
    loader.sampler.set_epoch(0)
    assert on(1, lambda: rows_of(loader, epochs=3)) == (epochs,)


@pytest.mark.parametrize(
    "options",
    [{"batch_size": 3, "shuffle": True}, {"batch_sampler": BatchSampler(RandomSampler(range(20)), 2, False)}],
    ids=["shuffled", "batch sampler"],
)
def test_set_epoch_resumes_an_order(options):
    """An unfinished loop counts as an epoch, and reading `loader.sampler` does not."""
    loader = functional.shard_loader(DataLoader(range(20), **options))
    epochs = rows_of(loader, epochs=4)
    for _ in range(2):
        loader.sampler.set_epoch(2)
    assert list(loader.sampler) == list(loader.sampler)
    assert rows_of(loader, epochs=2) == epochs[2:]
    loader.sampler.set_epoch(0)
    next(iter(loader))
    assert rows_of(loader) == epochs[1:2]


class Drawn(Sampler):
    """Rows, or batches of them, in an order that a function draws."""

    def __init__(self, draw, length=8):
        self.draw, self.length = draw, length

    def __iter__(self):
        return iter(self.draw())

    def __len__(self):
        return self.length


def generator(seed):
    return torch.Generator().manual_seed(seed)


BUCKETS = [[0, 1], [2, 3, 4], [5], [6, 7]]
SAMPLERS = {
    "weighted": lambda rank: {"sampler": WeightedRandomSampler([1, 2, 0, 4, 1, 1, 1, 0], 10, generator=generator(rank))},
    "numpy": lambda rank: {"sampler": Drawn(lambda: np.random.permutation(8).tolist())},
    "python": lambda rank: {"sampler": Drawn(lambda: random.sample(range(8), 8))},
    "shuffled": lambda rank: {"shuffle": True, "generator": generator(7 + rank)},
    "buckets": lambda rank: {"batch_sampler": Drawn(lambda: [BUCKETS[i] for i in torch.randperm(4)], length=4)},
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_other_samplers_are_split(ranks, name):
    """Both ranks split one global order, although their random generators differ. Each epoch has another order."""

    def read():
        rank = current_rank().global_rank
        functional.seed_generators(rank)
        sharded = functional.shard_loader(DataLoader(range(8), **SAMPLERS[name](rank)))
        return rows_of(sharded, epochs=2)

    epochs = list(zip(*ranks(read), strict=True))
    assert epochs[0] != epochs[1]
    for one, other in epochs:
        assert len(one) == len(other) or name == "buckets"
        if name == "weighted":
            assert not {2, 7} & {*one, *other}
        else:
            assert sorted(one + other) == list(range(8))
    if name == "shuffled":  # the order of the seed of rank 0's generator
        assert epochs[0] == tuple(order_of_torch(8, rank, 0, seed=7) for rank in range(2))


def test_different_orders_are_refused(ranks, lone_ranks):
    """Every rank refuses a sampler with its own generator. Without a group, only plain loaders are sharded."""

    def shard():
        own = np.random.default_rng(current_rank().global_rank)
        with pytest.raises(TypeError) as caught:
            functional.shard_loader(DataLoader(range(8), sampler=Drawn(lambda: own.permutation(8).tolist())))
        return str(caught.value)

    def shard_without_group():
        for loader in (DataLoader(range(4), shuffle=True, generator=generator(1)), DataLoader(range(4), sampler=[1, 2])):
            with pytest.raises(PlatformError, match="Leave ipc_groups out of Platform"):
                functional.shard_loader(loader)
        return rows_of(functional.shard_loader(DataLoader(range(4), shuffle=True)))[0]

    one, other = ranks(shard)
    assert one == other
    assert "Drawn, has a different order on rank 1 than on rank 0. Let it draw from torch's" in one
    one, other = lone_ranks(shard_without_group)
    assert sorted(one + other) == [0, 1, 2, 3]


OF_WORKERS = {"num_workers": 1, "prefetch_factor": 3, "persistent_workers": True, "multiprocessing_context": "spawn"}
OPTIONS = OF_WORKERS | {"worker_init_fn": print, "timeout": 5.0, "in_order": False, "collate_fn": torch.tensor}
OPTIONS |= {"batch_size": 3, "drop_last": True, "pin_memory": True, "pin_memory_device": "cpu", "generator": generator(4)}


def test_every_option_is_kept():
    known = inspect.signature(DataLoader).parameters
    given = {name: value for name, value in OPTIONS.items() if name in known}
    assert known.keys() - given.keys() == {"dataset", "shuffle", "sampler", "batch_sampler"}, "torch has a new argument"
    loader = DataLoader(range(12), **given)
    sharded = functional.shard_loader(loader)
    assert isinstance(sharded, DataLoader)
    for name in ("dataset", *given):
        assert getattr(sharded, name) is getattr(loader, name), name
        if name not in ("batch_size", "dataset"):
            assert getattr(sharded, name) != getattr(DataLoader([]), name), f"{name} is the default"


class Halved(DataLoader):
    """A subclass that changes an argument and the batches, and does not accept a sampler."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=2)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch / 2


def test_subclass_is_kept():
    """Whatever its constructor takes, it keeps its type, batch size, iteration, and attributes. So does a copy."""
    halved = Halved(range(4))
    halved.title = ["a"]
    loader = functional.shard_loader(halved)
    assert loader.title is halved.title
    for each in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in each] == [[0.0, 0.5], [1.0, 1.5]]
        assert isinstance(each, Halved)
        assert (each.batch_size, len(each)) == (2, 2)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


REFUSED = {
    "stream": (DataLoader(Stream()), TypeError, r"Stream is a stream.*islice\(rows, current_rank\(\)"),
    "sharded by torch": (
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)),
        TypeError,
        "DistributedSampler, is already sharded",
    ),
    "sharded twice": (functional.shard_loader(DataLoader(range(4))), TypeError, "PaddedShare, is already sharded"),
    "no length": (DataLoader(range(4), sampler=iter([1, 2])), TypeError, "has no __len__"),
    "endless": (DataLoader(range(4), sampler=Drawn(itertools.count)), ValueError, "yields more items than its length, 8"),
    "no loader": ([1, 2], TypeError, "takes a torch.utils.data.DataLoader, not a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_loaders_are_refused(name):
    """The error names the value and what to do, also with one rank."""
    loader, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        functional.shard_loader(loader)


def test_drop_last_needs_padding():
    """`pad=False` promises each row once, which `drop_last=True` contradicts."""
    with pytest.raises(ValueError, match="Use drop_last=False or pad=True"):
        functional.shard_loader(DataLoader(range(4), 3, drop_last=True), pad=False)

"""`shard_loader`: every rank reads its share of a loader's rows, and each iteration is the next
epoch.
"""

from __future__ import annotations

import copy
import inspect
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
)

from parawrap import PlatformError, current_rank, functional
from tests.helpers.ranks import on


def rows_of(loader, epochs=1):
    return [
        [int(row) for batch in loader for row in torch.as_tensor(batch).flatten()]
        for _ in range(epochs)
    ]


def order_of_torch(length, rank, epoch, **options):
    torchs = DistributedSampler(range(length), 2, rank, **options)
    torchs.set_epoch(epoch)
    return list(torchs)


@pytest.mark.parametrize(
    ("length", "shuffle"),
    [(0, False), (1, True), (7, False), (12, True)],  # older torch cannot shuffle zero rows
)
def test_shares_have_each_row(ranks, length, shuffle):
    """The shares of all ranks have each row, without padding exactly once.

    With padding, ranks get equally many. With drop_last, full batches, and no row twice.
    """

    def read(pad, drop_last):
        loader = DataLoader(range(length), batch_size=2, shuffle=shuffle, drop_last=drop_last)
        sharded = functional.shard_loader(loader, pad=pad)
        assert len(list(sharded)) == len(sharded)
        sharded.sampler.set_epoch(0)
        return rows_of(sharded, epochs=3)

    unpadded = ranks(read, False, False)
    for one, other in zip(*unpadded, strict=True):
        assert sorted(one + other) == list(range(length))
        assert abs(len(one) - len(other)) <= 1
    if length == 12:
        assert len({str(rows) for rows in unpadded[0]}) == 3  # a new order in each epoch
    padded = ranks(read, True, False)
    for one, other in zip(*padded, strict=True):
        assert set(one + other) == set(range(length))
        assert len(one) == len(other) == -(-length // 2)
    for one, other in zip(*ranks(read, True, True), strict=True):
        assert max(Counter(one + other).values(), default=1) == 1
        assert len(one) == len(other)
        assert len(one) % 2 == 0
    if length:  # each iteration is the next epoch of DistributedSampler
        expected = [
            [order_of_torch(length, rank, epoch, shuffle=shuffle) for epoch in range(3)]
            for rank in range(2)
        ]
        assert [*padded] == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_rank_reads_every_row(shuffle):
    """One rank reads every row, also outside a launch. A shuffled loader has a new order in each
    epoch, and `set_epoch` resumes it.
    """
    loader = functional.shard_loader(
        DataLoader(range(9), batch_size=2, shuffle=shuffle), pad=shuffle
    )
    epochs = rows_of(loader, epochs=3)
    assert all(sorted(rows) == list(range(9)) for rows in epochs)
    assert len({str(rows) for rows in epochs}) == (3 if shuffle else 1)
    assert len(loader) == 5
    loader.sampler.set_epoch(2)
    assert rows_of(loader) == epochs[2:]
    loader.sampler.set_epoch(0)
    assert on(1, lambda: rows_of(loader, epochs=3)) == (epochs,)


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_ranks_agree_on_a_shuffle(ranks, lone_ranks):
    """Ranks split the order of rank 0's generator, although their generators differ; without a
    group, there must be none.
    """

    def shard():
        loader = DataLoader(
            range(8), shuffle=True, generator=generator(7 + current_rank().global_rank)
        )
        return rows_of(functional.shard_loader(loader), epochs=2)

    epochs = list(zip(*ranks(shard), strict=True))
    assert epochs[0] != epochs[1]
    assert all(sorted(one + other) == list(range(8)) for one, other in epochs)

    def shard_without_group():
        with pytest.raises(PlatformError, match="Leave ipc_groups out of Platform"):
            shard()
        return rows_of(functional.shard_loader(DataLoader(range(4), shuffle=True)))[0]

    one, other = lone_ranks(shard_without_group)
    assert sorted(one + other) == [0, 1, 2, 3]


OPTIONS = {
    "num_workers": 1,
    "prefetch_factor": 3,
    "persistent_workers": True,
    "multiprocessing_context": "spawn",
}
OPTIONS |= {"worker_init_fn": print, "timeout": 5.0, "in_order": False, "collate_fn": torch.tensor}
OPTIONS |= {
    "batch_size": 3,
    "drop_last": True,
    "pin_memory": True,
    "pin_memory_device": "cpu",
    "generator": generator(4),
}


def test_every_option_is_kept():
    known = inspect.signature(DataLoader).parameters
    given = {name: value for name, value in OPTIONS.items() if name in known}
    assert known.keys() - given.keys() == {"dataset", "shuffle", "sampler", "batch_sampler"}, (
        "torch has a new argument"
    )
    loader = DataLoader(range(12), **given)
    sharded = functional.shard_loader(loader)
    assert isinstance(sharded, DataLoader)
    # Each rank's workers draw other numbers
    for name in ("dataset", *given.keys() - {"generator"}):
        assert getattr(sharded, name) is getattr(loader, name), name


class Registered(DataLoader):
    """A class whose subclasses need an argument."""

    def __init_subclass__(cls, *, name):
        cls.name = name


class Halved(Registered, name="halved"):
    """A subclass that changes an argument and the batches, and does not accept a sampler."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=2)

    def __iter__(self):
        for batch in super().__iter__():
            yield batch / 2


def test_subclass_is_kept():
    """Whatever its constructor takes, it keeps its type, batch size, iteration, and attributes.

    So does a copy.
    """
    halved = Halved(range(4))
    halved.title = ["a"]
    loader = functional.shard_loader(halved)
    assert loader.title is halved.title
    for each in (loader, copy.copy(loader)):
        assert [batch.tolist() for batch in each] == [[0.0, 0.5], [1.0, 1.5]]
        assert isinstance(each, Halved)
        assert (each.batch_size, len(each), each.name) == (2, 2, "halved")


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


REFUSED = {
    "stream": (
        DataLoader(Stream()),
        TypeError,
        r"Stream is a stream.*islice\(rows, current_rank\(\)",
    ),
    "sharded by torch": (
        DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)),
        TypeError,
        "has a DistributedSampler. If that is already sharded, use the loader as it is",
    ),
    "sharded twice": (
        functional.shard_loader(DataLoader(range(4))),
        TypeError,
        "has a RankSampler",
    ),
    "weighted": (
        DataLoader(range(4), sampler=WeightedRandomSampler([1.0] * 4, 4)),
        TypeError,
        (
            r"this one has a WeightedRandomSampler. .* sampler, or batch sampler, that yields the "
            r"share of"
        ),
    ),
    "replacement": (
        DataLoader(range(4), sampler=RandomSampler(range(4), replacement=True)),
        TypeError,
        "this one has a RandomSampler",
    ),
    "no loader": ([1, 2], TypeError, "takes a torch.utils.data.DataLoader, not a list"),
    "no padding": (
        DataLoader(range(4), 3, drop_last=True),
        ValueError,
        "Use drop_last=False or pad=True",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_loaders_are_refused(name):
    """The error names the value and what to do, also with one rank.

    `pad=False` drops no row, unlike `drop_last`.
    """
    loader, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        functional.shard_loader(loader, pad=False)


class Keeping(DataLoader):
    """A subclass that keeps an iterator, as endless loaders do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.kept)


class KeepingBatches(Keeping):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.kept = iter(list(self.kept))


class Inner(DataLoader):
    """A subclass that reads another loader."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.inner = DataLoader(*args, **options)

    def __iter__(self):
        return iter(self.inner)


class Caching(DataLoader):
    """A subclass that keeps the batches of its first epoch."""

    cached = None

    def __iter__(self):
        if self.cached is None:
            self.cached = list(super().__iter__())
        return iter(self.cached)


class DrawingAhead(DataLoader):
    """A subclass that begins the next epoch at the end of each one, and its own iterator."""

    ahead = None

    def __iter__(self):
        self.ahead = self.ahead or super().__iter__()
        self.first = next(self.ahead, None)
        return self

    def __next__(self):
        if (batch := self.first) is None:
            self.ahead = super().__iter__()
            raise StopIteration
        self.first = next(self.ahead, None)
        return batch


WORKERS = [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}]


@pytest.mark.parametrize("options", WORKERS, ids=["main process", "worker", "persistent worker"])
@pytest.mark.parametrize("kind", [Keeping, KeepingBatches, Inner])
def test_kept_batches_are_refused(kind, options):
    """Batches that a program has kept are refused, since they would be those of all ranks.

    Each epoch is refused, also if the program has read the sampler itself.
    """
    loader = functional.shard_loader(kind(range(6), batch_size=2, **options))
    list(loader.sampler)
    for _ in range(2):
        with pytest.raises(
            TypeError, match=f"^{kind.__name__} yields batches that it keeps.*Make them in __iter__"
        ):
            list(loader)


@pytest.mark.parametrize("options", WORKERS, ids=["main process", "worker", "persistent worker"])
def test_own_batches_may_be_kept(options):
    """A subclass may keep, or draw early, what its sampler gives."""
    for kind in Caching, DrawingAhead, Halved:
        sharded = functional.shard_loader(kind(range(6), **{} if kind is Halved else options))
        assert len(rows_of(sharded, epochs=2)[1]) == 6
    assert list(functional.shard_loader(Caching([], **options))) == []


# -- random numbers


class Augmented(Dataset):
    """Eight rows: the index, and a number from each generator."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        drawn = torch.rand(()).item(), random.random(), np.random.rand()
        return torch.tensor([index, *drawn], dtype=torch.float64)


KINDS = {
    "main process": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def epochs_of(first):
    """Return by kind the numbers that a loader draws in the epochs from `first` to 2, and those of
    the loop.
    """
    found = {}
    for kind, options in KINDS.items():
        functional.seed_generators(3)
        loader = functional.shard_loader(DataLoader(Augmented(), 2, shuffle=True, **options))
        loader.sampler.set_epoch(first)
        epochs, after = [], []
        for _ in range(first, 3):
            batches = []
            for batch in loader:
                batches.append(batch)
                after += torch.rand(()).item(), random.random(), np.random.rand()
            epochs.append(torch.cat(batches)[:, 1:].flatten().tolist())
        found[kind] = epochs, after
    return found


def test_numbers_never_repeat():
    """No number occurs twice in two ranks, their workers, and three epochs.

    The loop has the same numbers on all ranks.
    """
    whole, last = on(2, epochs_of, 0), on(2, epochs_of, 2)
    for kind in KINDS:
        drawn = [number for rank in whole for epoch in rank[kind][0] for number in epoch]
        assert len(set(drawn)) == len(drawn) == 3 * 24
        assert whole[0][kind][1] == whole[1][kind][1]
        assert not {*whole[0][kind][1]} & {*drawn}
        if kind != "persistent workers":  # which are seeded once
            assert [rank[kind][0][0] for rank in last] == [rank[kind][0][2] for rank in whole]


def test_loops_keep_their_numbers():
    """Nested loops draw different numbers in their loaders only."""
    outer, inner = (functional.shard_loader(DataLoader(Augmented(), 4)) for _ in range(2))
    torch.manual_seed(1)
    expected = [torch.rand(()).item() for _ in range(4)]
    torch.manual_seed(1)
    inner.sampler.set_epoch(5)
    rows = [
        float(row[1]) for one, other in zip(outer, inner, strict=True) for row in (*one, *other)
    ]
    assert len(set(rows)) == 16
    assert [torch.rand(()).item() for _ in range(4)] == expected

"""`shard_loader`: every rank reads its share of a loader's rows, and each iteration is the next epoch."""

from __future__ import annotations

import copy
import inspect
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
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from parawrap import PlatformError, current_rank, functional
from tests.helpers.ranks import on


def rows_of(loader, epochs=1):
    """Return the rows of each epoch."""
    return [[int(row) for batch in loader for row in batch] for _ in range(epochs)]


# --- rows ---


@pytest.fixture(scope="module")
def shares():
    """Rows of two ranks in three epochs, by (length, shuffle, pad, drop_last)."""

    def read():
        found = {}
        for length in (0, 1, 2, 7, 12):
            for shuffle in (False, True):
                for pad, drop_last in ((True, False), (True, True), (False, False)):
                    if length == 0 and shuffle:
                        continue  # older versions of torch cannot shuffle zero rows
                    loader = DataLoader(range(length), batch_size=2, shuffle=shuffle, drop_last=drop_last)
                    sharded = functional.shard_loader(loader, pad=pad)
                    lengths = [len(batch) for batch in sharded]
                    assert len(lengths) == len(sharded)
                    sharded.sampler.set_epoch(0)
                    found[length, shuffle, pad, drop_last] = rows_of(sharded, epochs=3)
        return found

    one, other = on(2, read)
    return {key: list(zip(one[key], other[key], strict=True)) for key in one}


def test_unpadded_shares_have_each_row_once(shares):
    """Without padding, every row is on exactly one rank in every epoch, and shares differ by at most one row."""
    for (length, _, pad, _), epochs in shares.items():
        if not pad:
            assert all(sorted(one + other) == list(range(length)) for one, other in epochs)
            assert all(abs(len(one) - len(other)) <= 1 for one, other in epochs)


def test_padded_shares_are_equally_long_and_have_each_row(shares):
    """With padding, both ranks get the same number of rows, and every row is on some rank."""
    for (length, _, pad, drop_last), epochs in shares.items():
        if pad and not drop_last:
            assert all(set(one + other) == set(range(length)) for one, other in epochs)
            assert all(len(one) == len(other) == -(-length // 2) for one, other in epochs)


def test_drop_last_gives_no_row_twice(shares):
    """With drop_last, both ranks get the same number of full batches, and no row is repeated."""
    for (_, _, _, drop_last), epochs in shares.items():
        if drop_last:
            assert all(max(Counter(one + other).values(), default=1) == 1 for one, other in epochs)
            assert all(len(one) == len(other) and len(one) % 2 == 0 for one, other in epochs)


def test_each_iteration_is_the_next_epoch(shares):
    """A shuffled loader has DistributedSampler's order of epochs 0, 1, and 2. Other loaders keep their order."""
    for rank in range(2):
        torchs = DistributedSampler(range(12), 2, rank)
        for epoch, rows in enumerate(shares[12, True, True, False]):
            torchs.set_epoch(epoch)
            assert rows[rank] == list(torchs)
    assert len({str(epoch) for epoch in shares[12, True, True, False]}) == 3
    assert len({str(epoch) for epoch in shares[12, True, False, False]}) == 3
    assert len({str(epoch) for epoch in shares[12, False, True, False]}) == 1
    assert shares[7, False, False, False][0] == ([0, 1, 2, 3], [4, 5, 6])
    assert shares[7, False, True, False][0] == ([0, 2, 4, 6], [1, 3, 5, 0])


@pytest.mark.parametrize("pad", [True, False])
def test_one_rank_reads_every_row(pad):
    """With one rank, also outside a launch, each epoch has all rows, and a shuffled loader has a new order."""
    for shuffle in (False, True):
        loader = functional.shard_loader(DataLoader(range(9), batch_size=2, shuffle=shuffle), pad=pad)
        epochs = rows_of(loader, epochs=3)
        assert all(sorted(rows) == list(range(9)) for rows in epochs)
        assert len({str(rows) for rows in epochs}) == (3 if shuffle else 1)
        assert len(loader) == 5
        loader.sampler.set_epoch(0)
        assert on(1, lambda loader=loader: rows_of(loader, epochs=3)) == (epochs,)


def test_set_epoch_resumes_an_order():
    """After set_epoch, iterations continue with that epoch. It can be called several times."""
    loader = functional.shard_loader(DataLoader(range(20), batch_size=3, shuffle=True))
    epochs = rows_of(loader, epochs=4)
    loader.sampler.set_epoch(2)
    assert rows_of(loader, epochs=2) == epochs[2:]
    loader.sampler.set_epoch(3)
    loader.sampler.set_epoch(3)
    assert rows_of(loader) == epochs[3:]


def test_reading_the_sampler_does_not_start_an_epoch():
    """`list(loader.sampler)` returns the current epoch's rows and does not change the order of the next epochs."""
    loader = functional.shard_loader(DataLoader(range(20), batch_size=3, shuffle=True))
    expected = rows_of(functional.shard_loader(DataLoader(range(20), batch_size=3, shuffle=True)), epochs=2)
    assert list(loader.sampler) == list(loader.sampler) == expected[0]
    first = rows_of(loader)
    assert list(loader.sampler) == expected[0]
    assert first + rows_of(loader) == expected


def test_an_unfinished_iteration_counts_as_an_epoch():
    """After a loop that ends early, the next iteration is the next epoch from its start."""
    expected = rows_of(functional.shard_loader(DataLoader(range(20), batch_size=3, shuffle=True)), epochs=2)
    loader = functional.shard_loader(DataLoader(range(20), batch_size=3, shuffle=True))
    next(iter(loader))
    assert rows_of(loader) == expected[1:]


def test_workers_read_the_ranks_rows():
    """Worker processes, also persistent ones, and `batch_size=None` give the same rows and epochs."""

    def read():
        kinds = {
            "workers": {"batch_size": 2, "num_workers": 2},
            "persistent": {"batch_size": 2, "num_workers": 1, "persistent_workers": True},
            "rows": {"batch_size": None, "num_workers": 0},
            "rows in a worker": {"batch_size": None, "num_workers": 1},
        }
        found = {}
        for name, options in kinds.items():
            loader = functional.shard_loader(DataLoader(torch.arange(8), shuffle=True, **options))
            found[name] = [[torch.as_tensor(batch).flatten().tolist() for batch in loader] for _ in range(2)]
            found[name] = [[row for batch in epoch for row in batch] for epoch in found[name]]
            del loader
        return found

    for rank, found in enumerate(on(2, read)):
        torchs = DistributedSampler(range(8), 2, rank)
        expected = []
        for epoch in range(2):
            torchs.set_epoch(epoch)
            expected.append(list(torchs))
        assert found == dict.fromkeys(found, expected)


# --- seeds, other samplers ---


class Drawn(Sampler):
    """Eight rows in an order from one of the global generators."""

    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        return iter(self.draw())

    def __len__(self):
        return 8


class Buckets(Sampler):
    """A batch sampler: rows of similar length together, the batches in a random order."""

    def __iter__(self):
        batches = [[0, 1], [2, 3, 4], [5], [6, 7]]
        yield from (batches[i] for i in torch.randperm(4).tolist())

    def __len__(self):
        return 4


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_rows_of_other_samplers_are_split_over_ranks():
    """Both ranks split one global order, although their random generators differ."""

    def read():
        rank = current_rank().global_rank
        functional.seed_generators(rank)
        weights = torch.tensor([0.1, 0.2, 0.0, 0.4, 0.1, 0.1, 0.1, 0.0])
        data = range(8)
        loaders = {
            "weighted": DataLoader(data, 3, sampler=WeightedRandomSampler(weights, 10)),
            "with a generator": DataLoader(data, 3, sampler=WeightedRandomSampler(weights, 10, generator=generator(rank))),
            "subset": DataLoader(data, 3, sampler=SubsetRandomSampler([1, 3, 5, 7, 6])),
            "replacement": DataLoader(data, 3, sampler=RandomSampler(data, replacement=True, num_samples=11)),
            "torch": DataLoader(data, 3, sampler=Drawn(lambda: torch.randperm(8).tolist())),
            "numpy": DataLoader(data, 3, sampler=Drawn(lambda: np.random.permutation(8).tolist())),
            "python": DataLoader(data, 3, sampler=Drawn(lambda: random.sample(range(8), 8))),
            "list": DataLoader(data, 3, sampler=[7, 1, 2]),
            "shuffled by a generator": DataLoader(data, 3, shuffle=True, generator=generator(7 + rank)),
            "batches": DataLoader(data, batch_sampler=Buckets()),
            "plain batches": DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 3, False)),
        }
        sharded = {name: functional.shard_loader(loader) for name, loader in loaders.items()}
        return {name: [[batch.tolist() for batch in loader] for _ in range(2)] for name, loader in sharded.items()}

    one, other = on(2, read)
    for name in one:
        first, second = (zip(a, b, strict=True) for a, b in zip(one[name], other[name], strict=True))
        pairs = [list(first), list(second)]
        ranks = [[[row for pair in epoch for row in pair[rank]] for rank in range(2)] for epoch in pairs]
        sizes = [len(rows) for rows in ranks[0]]
        assert len(pairs[0]) == len(one[name][0]), name
        if name != "batches":
            assert sizes[0] == sizes[1], name
        seen = [sorted(rows[0] + rows[1]) for rows in ranks]
        if name in ("torch", "numpy", "python", "shuffled by a generator", "batches", "plain batches"):
            assert seen == [list(range(8))] * 2, name
        if name in ("weighted", "with a generator"):
            assert not {2, 7} & set(seen[0]), name
        if name == "subset":
            assert set(seen[0]) == {1, 3, 5, 6, 7}
        if name == "list":
            assert ranks == [[[7, 2], [1, 7]]] * 2
        else:
            assert pairs[0] != pairs[1], f"{name} has one order in both epochs"
    torchs = DistributedSampler(range(8), 2, 1, seed=7)
    assert [row for batch in other["shuffled by a generator"][0] for row in batch] == list(torchs)


def test_the_global_order_is_that_of_the_sampler():
    """With one rank, a seeded sampler keeps its order, and the global generators keep their state."""
    weights = torch.ones(8)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    sharded = functional.shard_loader(
        DataLoader(range(8), sampler=WeightedRandomSampler(weights, 6, generator=generator(5)))
    )
    found = list(sharded.sampler)
    assert found == list(WeightedRandomSampler(weights, 6, generator=generator(5)))
    assert torch.equal(torch.get_rng_state(), before)


def test_ranks_with_different_orders_are_refused():
    """A sampler with its own generator, seeded by rank, is refused on every rank."""

    def shard():
        own = np.random.default_rng(current_rank().global_rank)
        try:
            functional.shard_loader(DataLoader(range(8), sampler=Drawn(lambda: own.permutation(8).tolist())))
        except TypeError as error:
            return str(error)

    one, other = on(2, shard)
    assert one == other
    assert "Drawn, has a different order on rank 1 than on rank 0. Let it draw from torch's" in one


def test_without_a_group_only_plain_loaders_are_sharded():
    """Without a process group, a shuffled loader is sharded; a loader with a generator or a sampler is refused."""

    def shard():
        plain = functional.shard_loader(DataLoader(range(4), shuffle=True))
        refused = []
        for loader in (DataLoader(range(4), shuffle=True, generator=generator(1)), DataLoader(range(4), sampler=[1, 2])):
            try:
                functional.shard_loader(loader)
            except PlatformError as error:
                refused.append("Leave ipc_groups out of Platform" in str(error))
        return [row for rows in rows_of(plain) for row in rows], refused

    (one, refused), (other, _) = on(2, shard, ipc_groups=None)
    assert sorted(one + other) == [0, 1, 2, 3]
    assert refused == [True, True]


# --- options, subclasses ---


def collate(rows):
    return torch.tensor(rows)


def seed_worker(worker):
    pass


OPTIONS = {
    "batch_size": 3,
    "num_workers": 1,
    "collate_fn": collate,
    "pin_memory": True,
    "drop_last": True,
    "timeout": 5.0,
    "worker_init_fn": seed_worker,
    "multiprocessing_context": "spawn",
    "generator": generator(4),
    "prefetch_factor": 3,
    "persistent_workers": True,
    "pin_memory_device": "cpu",
    "in_order": False,
}


def test_every_option_of_the_installed_torch_is_kept():
    """The sharded loader has the value of each constructor argument of DataLoader."""
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


def test_attributes_set_on_a_loader_are_kept():
    """The sharded loader has attributes that the user set on the loader."""
    loader = DataLoader(range(4))
    loader.title, loader.worker_init_fn = "train", seed_worker
    sharded = functional.shard_loader(loader)
    assert (sharded.title, sharded.worker_init_fn) == ("train", seed_worker)


class Titled(DataLoader):
    """A subclass that stores its additional argument."""

    def __init__(self, dataset, batch_size=1, *, title, **options):
        super().__init__(dataset, batch_size, **options)
        self.title = title


class Doubling(DataLoader):
    """A subclass that changes an argument."""

    def __init__(self, dataset, batch_size=1, **options):
        super().__init__(dataset, 2 * batch_size, **options)


class Secretive(DataLoader):
    """A subclass that does not store its argument."""

    def __init__(self, path, **options):
        super().__init__(range(len(path)), **options)


class Fixed(DataLoader):
    """A subclass that does not accept a sampler."""

    def __init__(self, dataset):
        super().__init__(dataset, batch_size=2, shuffle=True)


def test_a_subclass_is_kept():
    """A subclass that stores its arguments as attributes keeps its type."""
    loader = functional.shard_loader(Titled(range(6), 2, title=["a"], shuffle=True))
    assert (isinstance(loader, Titled), loader.title, loader.batch_size) == (True, ["a"], 2)
    assert rows_of(loader) != rows_of(loader)


@pytest.mark.parametrize(
    "loader",
    [Doubling(range(6), 1), Secretive("path", batch_size=2), Fixed(range(6))],
    ids=lambda loader: type(loader).__name__,
)
def test_a_subclass_with_another_constructor_is_kept(loader):
    """A subclass whose constructor takes other arguments keeps its type, batch size, and methods."""
    sharded = functional.shard_loader(loader)
    assert isinstance(sharded, type(loader))
    assert sorted(row for rows in rows_of(sharded) for row in rows) == list(range(len(loader.dataset)))
    assert (sharded.batch_size, len(sharded)) == (2, len(loader))


class Halved(DataLoader):
    """A subclass that changes the batches."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch / 2


def test_the_iteration_of_a_subclass_is_kept():
    """A subclass with its own `__iter__` yields its own batches, also of a copy, and after a pickle."""
    loader = functional.shard_loader(Halved(range(4), batch_size=2))
    for each in (loader, copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in each] == [[0.0, 0.5], [1.0, 1.5]]
        assert isinstance(each, Halved)


@pytest.mark.parametrize(
    "batches", [[[0, 1], [2]], BatchSampler(RandomSampler(range(3)), 2, False)], ids=["list", "sampler"]
)
def test_a_loader_with_a_batch_sampler_can_resume(batches):
    """`loader.sampler.set_epoch` chooses the epoch of a loader with a batch sampler too."""
    loader = functional.shard_loader(DataLoader(range(3), batch_sampler=batches))
    epochs = rows_of(loader, epochs=3)
    loader.sampler.set_epoch(1)
    assert rows_of(loader, epochs=2) == epochs[1:]


# --- refusals ---


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(3)


class Endless(Sampler):
    def __iter__(self):
        while True:
            yield 0

    def __len__(self):
        return 3


REFUSED = {
    "stream": (DataLoader(Stream()), TypeError, r"Stream is a stream.*islice\(rows, current_rank\(\)"),
    "sharded by torch": (DataLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), TypeError, "is already sharded"),
    "sharded batches": (
        DataLoader(range(4), batch_sampler=BatchSampler(DistributedSampler(range(4), 2, 0), 2, False)),
        TypeError,
        "DistributedSampler, is already sharded",
    ),
    "sharded twice": (
        functional.shard_loader(DataLoader(range(4))),
        TypeError,
        "PaddedShare, is already sharded",
    ),
    "no length": (DataLoader(range(4), sampler=iter([1, 2])), TypeError, "has no __len__"),
    "endless": (DataLoader(range(4), sampler=Endless()), ValueError, "yields more items than its length, 3"),
    "no loader": ([1, 2], TypeError, "takes a torch.utils.data.DataLoader, not a list"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_loaders_that_cannot_be_sharded_are_refused(name):
    """The error names the value and what to do, also with one rank."""
    loader, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        functional.shard_loader(loader)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(range(4), drop_last=True, batch_size=3),
        DataLoader(range(4), batch_sampler=BatchSampler(RandomSampler(range(4)), 3, True)),
    ],
    ids=["batch_size", "batch_sampler"],
)
def test_drop_last_without_padding_is_refused(loader):
    """`pad=False` promises each row once, which `drop_last=True` contradicts."""
    with pytest.raises(ValueError, match="Use drop_last=False or pad=True"):
        functional.shard_loader(loader, pad=False)


def test_rows_that_are_tuples_are_collated():
    """The sharded loader uses the loader's collate function."""
    data = TensorDataset(torch.arange(5), torch.arange(5) * 10)
    batches = list(functional.shard_loader(DataLoader(data, batch_size=4)))
    assert [[part.tolist() for part in batch] for batch in batches] == [[[0, 1, 2, 3], [0, 10, 20, 30]], [[4], [40]]]

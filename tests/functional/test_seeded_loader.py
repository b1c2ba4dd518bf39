"""Random numbers of ranks and workers while they iterate a loader from `shard_loader`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from parawrap import functional
from tests.helpers.ranks import on


class Augmented(Dataset):
    """Eight rows: the index, the worker, and a number from each generator."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        worker = get_worker_info()
        drawn = torch.rand(()).item(), random.random(), np.random.rand()
        return torch.tensor([index, worker.id if worker else -1, *drawn], dtype=torch.float64)


KINDS = {
    "main process": {},
    "workers": {"num_workers": 2},
    "persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def epochs_of(first):
    """Return by kind and generator the rows, and a number drawn after each batch, of the epochs from `first` to 2."""
    found = {}
    for kind, options in KINDS.items():
        for generator in (None, torch.Generator().manual_seed(5)):
            loader = functional.shard_loader(DataLoader(Augmented(), 2, shuffle=True, generator=generator, **options))
            loader.sampler.set_epoch(first)
            epochs = found[kind, generator is not None] = []
            for _ in range(first, 3):
                batches, after = [], []
                for batch in loader:
                    batches.append(batch)
                    after.append(torch.rand(()).item())
                epochs.append((torch.cat(batches).tolist(), after))
    return found


@pytest.fixture(scope="module")
def whole():
    """The numbers that two ranks with one seed read in all epochs."""
    return on(2, epochs_of, 0, seed=3)


def test_numbers_never_repeat(whole):
    """No number of any generator occurs twice in two ranks, their workers, and three epochs."""
    for kind in whole[0]:
        rank_epochs = [rank[kind] for rank in whole]
        rows = [row for epochs in rank_epochs for epoch, _ in epochs for row in epoch]
        drawn = [number for _, _, *numbers in rows for number in numbers]
        assert len(set(drawn)) == len(drawn) == 3 * 24
        assert {worker for _, worker, *_ in rows} == ({-1} if kind[0] == "main process" else {0, 1})
        after = [number for epochs in rank_epochs for _, numbers in epochs for number in numbers]
        assert len(set(after)) == len(after)
        for epoch in range(3):
            assert sorted(index for epochs in rank_epochs for index, *_ in epochs[epoch][0]) == list(range(8))


def test_numbers_of_an_epoch_repeat(whole):
    """A second launch that resumes with a later epoch draws the same numbers. Another seed draws others."""
    last = on(2, epochs_of, 2, seed=3)
    others = on(2, epochs_of, 2, seed=4)
    for first, resumed, other in zip(whole, last, others, strict=True):
        for kind, epochs in first.items():
            assert resumed[kind] == epochs[2:]
            assert other[kind][0][1] != epochs[2][1]


def test_ranks_are_equal_after_a_loop():
    """So they do after a loop that breaks off or raises."""

    def draw():
        loader = functional.shard_loader(DataLoader(range(8), 2))
        found = []
        for leave in (lambda: None, lambda: 1 / 0):
            found += [torch.rand(()).item(), random.random(), np.random.rand()]
            try:
                for _ in loader:
                    leave()
            except ZeroDivisionError:
                pass
        for _ in loader:
            break
        return found, torch.rand(()).item(), torch.initial_seed()

    one, other = on(2, draw, seed=3)
    assert one == other
    assert len(set(one[0])) == 6
    assert one[2] == 3


def test_nested_and_parallel_loops():
    """Loops over two loaders that end in any order draw different numbers and restore them."""
    long, short = (functional.shard_loader(DataLoader(range(length))) for length in (3, 2))
    state = torch.get_rng_state()
    found = []
    for loaders in ((long, short), (short, long)):
        for _ in zip(*loaders, strict=False):
            found.append(torch.rand(()).item())
        assert torch.equal(torch.get_rng_state(), state)
    for _ in long:
        found += [torch.rand(()).item() for _ in short]
        found.append(torch.rand(()).item())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(found)) == len(found)


def test_new_iterator_is_the_next_epoch():
    """It ends the old one, and draws what a loop over the same epoch draws."""
    loader = functional.shard_loader(DataLoader(Augmented(), 2))
    torch.manual_seed(1)
    expected = [torch.cat(list(loader)).tolist() for _ in range(2)]
    loader.sampler.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    iterator = iter(loader)
    assert len(iterator) == 4
    assert torch.cat(list(iterator)).tolist() == expected[1]

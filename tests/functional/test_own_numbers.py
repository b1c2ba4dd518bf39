"""Random numbers of ranks and workers while they iterate a loader from `shard_loader`."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from parawrap import Platform, current_rank, functional, wrapper
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


def epochs_of(first, kind, seeded):
    """Return the rows, and a number drawn after each batch, of the epochs from `first` to 2."""
    generator = torch.Generator().manual_seed(5) if seeded else None
    loader = functional.shard_loader(DataLoader(Augmented(), 2, shuffle=True, generator=generator, **KINDS[kind]))
    loader.sampler.set_epoch(first)
    found = []
    for _ in range(first, 3):
        batches, after = [], []
        for batch in loader:
            batches.append(batch)
            after.append(torch.rand(()).item())
        found.append((torch.cat(batches).tolist(), after))
    return found


@pytest.mark.parametrize("seeded", [False, True], ids=["", "with a generator"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_and_worker_draws_its_own_numbers(kind, seeded):
    """No number of any generator occurs twice in two ranks, their workers, and three epochs."""
    ranks = on(2, epochs_of, 0, kind, seeded, seed=3)
    rows = [row for epochs in ranks for epoch, _ in epochs for row in epoch]
    drawn = [number for _, _, *numbers in rows for number in numbers]
    assert len(set(drawn)) == len(drawn) == 3 * 24
    assert {worker for _, worker, *_ in rows} == ({-1} if kind == "main process" else {0, 1})
    after = [number for epochs in ranks for _, numbers in epochs for number in numbers]
    assert len(set(after)) == len(after)
    for epoch in range(3):
        assert sorted(index for epochs in ranks for index, *_ in epochs[epoch][0]) == list(range(8))


@pytest.mark.parametrize("seeded", [False, True], ids=["", "with a generator"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_an_epoch_are_reproducible(kind, seeded):
    """A second launch draws the same numbers, also if it resumes with a later epoch. Another seed draws others."""
    ranks = on(2, epochs_of, 0, kind, seeded, seed=3)
    assert on(2, epochs_of, 0, kind, seeded, seed=3) == ranks
    assert on(2, epochs_of, 2, kind, seeded, seed=3) == tuple(epochs[2:] for epochs in ranks)
    others = on(2, epochs_of, 2, kind, seeded, seed=4)
    assert all(other[0][1] != epochs[2][1] for other, epochs in zip(others, ranks, strict=True))


def test_all_ranks_draw_equal_numbers_again_after_the_loop():
    """Before and after a loop, also one that breaks off or raises, the generators of both ranks have equal states."""

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


def test_a_loop_does_not_change_later_numbers():
    """The numbers after a loop are those that would be drawn without it."""
    torch.manual_seed(1)
    expected = torch.rand(2).tolist()
    torch.manual_seed(1)
    first = torch.rand(1).item()
    for _ in functional.shard_loader(DataLoader(range(4))):
        torch.rand(3)
    assert [first, torch.rand(1).item()] == expected


def test_nested_and_parallel_loops():
    """Loops inside loops, and loops over two loaders that end in any order, draw different numbers and restore them."""
    long, short = (functional.shard_loader(DataLoader(range(length))) for length in (3, 2))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    found = []
    for loaders in ((long, short), (short, long)):
        for _ in zip(*loaders, strict=False):
            found.append(torch.rand(()).item())
        assert torch.equal(torch.get_rng_state(), state)
    for _ in long:
        before = torch.get_rng_state()
        found += [torch.rand(()).item() for _ in short]
        assert torch.equal(torch.get_rng_state(), before)
        found.append(torch.rand(()).item())
    assert torch.equal(torch.get_rng_state(), state)
    assert len(set(found)) == len(found)


def test_two_loaders_that_are_read_together_draw_different_numbers():
    """The workers of two loaders in one loop draw different numbers."""
    loaders = [functional.shard_loader(DataLoader(Augmented(), 4, num_workers=1)) for _ in range(2)]
    batches = [batch for pair in zip(*loaders, strict=True) for batch in pair]
    drawn = torch.cat(batches)[:, 2].tolist()
    assert len(set(drawn)) == len(drawn) == 16


def test_an_iterator_that_is_replaced_draws_the_numbers_of_the_next_epoch():
    """A new iterator of a loader ends the old one, and draws what a loop over the same epoch draws."""
    torch.manual_seed(1)
    loader = functional.shard_loader(DataLoader(Augmented(), 2))
    expected = [torch.cat(list(loader)).tolist() for _ in range(2)]
    loader.sampler.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    iterator = iter(loader)
    assert len(iterator) == 4
    assert torch.cat(list(iterator)).tolist() == expected[1]


def test_numbers_of_persistent_workers_with_batches_of_indices():
    """Persistent workers get the lists of a batch sampler, and draw other numbers in each epoch and rank."""

    def read():
        loader = functional.shard_loader(
            DataLoader(Augmented(), batch_sampler=[[0, 1], [2], [3, 4], [5, 6]], num_workers=1, persistent_workers=True)
        )
        return [torch.cat(list(loader)).tolist() for _ in range(2)]

    one, other = on(2, read, seed=3)
    assert [[row[0] for row in epoch] for epoch in one + other] == [[0, 1, 3, 4]] * 2 + [[2, 5, 6]] * 2
    drawn = [row[2] for epoch in one + other for row in epoch]
    assert len(set(drawn)) == len(drawn)


def test_workers_get_the_ranks_seed_from_the_start():
    """`worker_init_fn` sees a seed that differs between ranks, for generators that it makes itself."""

    def seeds():
        loader = DataLoader(Seeds(), num_workers=2, worker_init_fn=remember_seed)
        return [int(seed) for seed in functional.shard_loader(loader)]

    one, other = on(2, seeds, seed=3)
    assert len(set(one + other)) == 4


class Seeds(Dataset):
    """Each row is the seed that `remember_seed` saw in this worker."""

    seed = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor(Seeds.seed)


def remember_seed(worker):
    Seeds.seed = torch.initial_seed() % 2**62


def test_inline_draws_the_numbers_of_rank_0():
    """An inline call, and a launch with one rank, draw the same numbers."""

    def draw():
        loader = functional.shard_loader(DataLoader(Augmented(), 2, shuffle=True))
        return torch.cat(list(loader)).tolist(), current_rank().global_rank

    assert wrapper(Platform(device="cpu", n_cpus=1, seed=3))(draw).inline() == on(1, draw, seed=3)

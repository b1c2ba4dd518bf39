"""`shard_loader`: a DataLoader that reads one rank's share of the rows."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from parawrap.functional._collectives import find_place, gather_objects, require_group
from parawrap.functional._rank_samplers import RankSampler
from parawrap.launch import preserved_generators

L = TypeVar("L", bound="DataLoader[Any]")

_SEEDS = 2**62  # a smaller number plus an epoch, or the number of a worker, is a seed of torch


def shard_loader(loader: L, *, pad: bool = True) -> L:
    """Return a loader of the same class and options that reads this rank's share of the rows.

    Each iteration is a new epoch. A shuffled loader has a new order in each epoch, the same on all
    ranks, so iterate it the same number of times on every rank. To resume training, choose the next
    epoch with ``loader.sampler.set_epoch(epoch)``.

    ``batch_size`` is per rank, as with torch's DistributedSampler, and a step reads ``batch_size *
    world_size`` rows. For the same steps as in one process, divide ``batch_size`` by the world
    size.

    - ``shuffle=True`` becomes a shuffled DistributedSampler. Its seed is rank 0's seed of the
      loader's ``generator``, or 0.
    - ``shuffle=False`` keeps the order of the dataset.

    The dataset and ``collate_fn`` draw this rank's own random numbers from Python, numpy, and torch
    on the CPU, in this process and in each worker. They follow from the seed of torch, the rank,
    and the epoch (with ``persistent_workers``, the first epoch), so that random crops differ
    between ranks and are reproducible. The training loop keeps its numbers.

    A subclass of DataLoader may yield batches that it keeps, or those of an iterator that it keeps.
    These are not sharded, so the first one raises TypeError.

    Args:
        loader: A loader over a dataset with a length, with ``shuffle`` True or False, or a batch
            sampler of torch over such a sampler. Call `shard_loader` on every rank.
        pad: True gives all ranks the same number of rows, as training with collectives requires.
            Some rows are then repeated, or dropped with ``drop_last=True``. False gives each row to
            exactly one rank, for evaluation. The ranks' row counts may then differ by one.

    Raises:
        TypeError: If the dataset is a stream, the loader is sharded already, or it has a sampler of
            another kind.
        ValueError: If ``pad=False`` is combined with ``drop_last=True``.
        PlatformError: If ranks must agree on a seed, but ``ipc_groups=None`` forms no process
            group.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def rows():
        ...     loader = DataLoader(range(6), batch_size=2)
        ...     return [batch.tolist() for batch in functional.shard_loader(loader)]
        >>> rows()
        RankResults([[0, 2], [4]], [[1, 3], [5]])
    """
    sampler = _find_sampler(loader)
    batches: Any = loader.batch_sampler  # None with batch_size=None: the dataset yields batches
    drop_last = batches is not None and batches.drop_last
    if drop_last and not pad:
        msg = (
            "pad=False keeps every row, but the loader has drop_last=True. Use drop_last=False or "
            "pad=True."
        )
        raise ValueError(msg)
    rank, world_size = find_place()
    share = RankSampler(
        sampler.data_source,
        rank,
        world_size,
        shuffle=isinstance(sampler, RandomSampler),
        seed=_agree_on_seed(sampler, world_size),
        pad=pad,
        drop_last=drop_last,
        counts_epochs=True,
    )
    user_class: Any = type(loader)
    kind = _class_with_own_numbers(user_class)
    sharded: L = kind.__new__(kind)
    # Without __init__, which may have other arguments in a subclass. Through `vars`, because
    # DataLoader refuses to set these attributes. The iterator stays with the user's loader
    vars(sharded).update(vars(loader), sampler=share, generator=torch.Generator(), _iterator=None)
    if batches is not None:
        vars(sharded)["batch_sampler"] = BatchSampler(share, batches.batch_size, drop_last)
    return sharded


def _find_sampler(loader: Any) -> Any:
    """Return the sampler of a loader's rows: sequential, or a random one that draws each row once.

    Raises:
        TypeError: If `loader` is not a DataLoader, or its dataset or sampler is of another kind.
    """
    if not isinstance(loader, DataLoader):
        msg = f"shard_loader takes a torch.utils.data.DataLoader, not a {type(loader).__qualname__}"
        raise TypeError(msg)
    if isinstance(loader.dataset, IterableDataset):
        msg = (
            f"{type(loader.dataset).__qualname__} is a stream, so it has no sampler to shard. "
            "Yield this rank's rows in its __iter__: itertools.islice(rows, "
            "current_rank().global_rank, None, current_rank().world_size). With several workers, "
            "split them again by torch.utils.data.get_worker_info()."
        )
        raise TypeError(msg)
    batches: Any = loader.batch_sampler
    sampler: Any = batches
    if batches is None:
        sampler = loader.sampler
    elif type(batches) is BatchSampler:
        sampler = batches.sampler
    if type(sampler) is SequentialSampler or _draws_each_row_once(sampler):
        return sampler
    msg = (
        "shard_loader shards loaders with shuffle=True or shuffle=False, and this one has a "
        f"{type(sampler).__qualname__}. If that is already sharded, use the loader as it is. If "
        "not, make a loader with a sampler, or batch sampler, that yields the share of this "
        "rank: current_rank().global_rank of current_rank().world_size."
    )
    raise TypeError(msg)


def _draws_each_row_once(sampler: Any) -> bool:
    if type(sampler) is not RandomSampler or sampler.replacement:
        return False
    # With another number of samples, an epoch leaves rows out, or draws them again
    return bool(sampler.num_samples == len(sampler.data_source))


def _agree_on_seed(sampler: Any, world_size: int) -> int:
    """Return the seed of the sampler's generator on rank 0; 0 without a generator."""
    generator = getattr(sampler, "generator", None)
    if generator is None:
        return 0
    seed: int = generator.initial_seed() % _SEEDS
    if world_size == 1:
        return seed
    require_group("shard_loader with a generator")
    return gather_objects(seed)[0]


# --- iteration ---


class _OwnNumbers:
    """A base class of sharded loaders, in front of DataLoader or a subclass of it.

    Making a batch draws from random numbers of the loader, not from those of the training loop.
    """

    _has_drawn = False  # True once an epoch has drawn from the sampler

    def __init_subclass__(cls) -> None:
        """Do not run the hook of the user's class: the sharded class is not one of the user's."""

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        share = loader.sampler
        rank, _ = find_place()
        seeds = torch.initial_seed(), share.seed, rank, share.epoch
        # One number from all of them. `hash` would differ between processes
        seed = random.Random(repr(seeds)).randrange(_SEEDS)
        # DataLoader draws the seed of its workers from its generator, on the default device
        device = torch.get_default_device()
        if loader.generator.device != device:
            vars(loader)["generator"] = torch.Generator(device)
        loader.generator.manual_seed(seed)
        draws = share.draws  # before the next line, which may draw
        # The iterator of DataLoader, or of the user's subclass
        batches: Iterator[Any] = super().__iter__()  # type: ignore[misc]  # pyright: ignore
        if not loader.num_workers:
            batches = _Batches(batches, seed)
        _, user_class = type(loader).__bases__  # from `_class_with_own_numbers`
        # DataLoader itself keeps no batches
        if self._has_drawn or user_class is DataLoader:
            return batches
        return self._check_first(batches, draws, user_class.__name__)

    def _check_first(self, batches: Iterator[Any], draws: int, name: str) -> Iterator[Any]:
        """Yield batches. Check that the first one is of rows from the sampler.

        Later epochs are not checked: a loader that passed may keep its draws, or draw ahead.

        Args:
            batches: The iterator of the epoch.
            draws: The number of draws from the sampler before the epoch.
            name: The name of the user's class.

        Raises:
            TypeError: At the first batch, if nothing has drawn from the sampler in this epoch.
        """
        loader: Any = self
        while True:
            # Not a `for` loop, which calls __iter__: a loader that is its own iterator would begin
            # its next epoch
            try:
                batch = next(batches)
            except StopIteration:
                return
            if not self._has_drawn and loader.sampler.draws == draws:
                msg = (
                    f"{name} yields batches that it keeps, or those of an iterator that it keeps, "
                    "so shard_loader cannot shard them. Make them in __iter__, by "
                    "super().__iter__(), or give shard_loader a plain DataLoader"
                )
                raise TypeError(msg)
            vars(self)["_has_drawn"] = True  # not through a `__setattr__` of the user
            yield batch


@functools.cache  # loaders of one class stay of one class
def _class_with_own_numbers(kind: type) -> Any:
    """Return a subclass of a class of loaders, with `_OwnNumbers` in front."""
    return type(
        f"Sharded{kind.__name__}",
        (_OwnNumbers, kind),
        {"__module__": kind.__module__, "__doc__": kind.__doc__},
    )


class _Batches:
    """Batches that this process makes.

    Random numbers for a batch follow from `seed`. Afterwards, the generators are as before.
    """

    def __init__(self, batches: Iterator[Any], seed: int) -> None:
        self._batches = batches
        self._seeds = random.Random(seed)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with preserved_generators(torch.device("cpu")):
            seed = self._seeds.randrange(_SEEDS)
            random.seed(seed)
            torch.default_generator.manual_seed(seed)  # not those of accelerators
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.seed(seed % 2**32)  # numpy takes no larger seeds
            return next(self._batches)

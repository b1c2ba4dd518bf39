"""Samplers that give each rank its share of a dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import cycle, islice
from typing import Any, cast

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from parawrap.errors import PlatformError
from parawrap.functional._collectives import find_place
from parawrap.functional._seeded_loader import SeededItem, reseed
from parawrap.launch import Platform

__all__ = [
    "ContiguousShare",
    "EachEpoch",
    "EpochSampler",
    "OrderedShare",
    "PaddedShare",
    "generators_of",
    "get_dataset_sampler",
]


def get_dataset_sampler(
    dataset: Dataset[Any], global_rank: int | None = None, platform: Platform | None = None, *, pad: bool = True
) -> Sampler[int] | None:
    """Return a sampler that gives this rank its share of a dataset. With one rank, return None.

    `shard_loader` makes a loader with such a sampler, and calls ``set_epoch`` itself.

    Args:
        dataset: A dataset with a length.
        global_rank: The global rank; by default this rank's.
        platform: The platform that sets the number of ranks; by default this rank's.
        pad: True returns torch's DistributedSampler, which shuffles (call ``set_epoch``) and gives all ranks the same
            number of rows. It repeats some rows if the number of ranks does not divide the length. False gives each row to
            exactly one rank, in order, for evaluation. The ranks' row counts may then differ by one.

    Raises:
        TypeError: If the dataset is a stream, or has no length.
        PlatformError: If `global_rank` is not a rank of the platform.

    Example:
        >>> from parawrap import Platform
        >>> [list(get_dataset_sampler(range(5), rank, Platform(device="cpu", n_cpus=2), pad=False)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    rank, world_size = find_place(global_rank, platform)
    if not 0 <= rank < world_size:
        msg = f"global_rank={rank} is out of range for a world of {world_size} rank(s). Use 0 to {world_size - 1}"
        raise PlatformError(msg)
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        name = type(dataset).__qualname__
        msg = f"{name} has no length, or is a stream, so a sampler cannot split it. Split it by current_rank() yourself"
        raise TypeError(msg)
    if world_size == 1:
        return None
    if pad:
        return cast("Sampler[int]", PaddedShare(dataset, num_replicas=world_size, rank=rank))
    return ContiguousShare(len(dataset), rank, world_size)


class EpochSampler:
    """A base for samplers with epochs. `begin_epoch` starts the epoch that `set_epoch` chose, else the next one."""

    epoch = 0
    worker_seed: int | None = None  # of this epoch, for persistent workers
    _is_used = False

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return self.epoch + self._is_used

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.epoch = epoch
        self._is_used = False

    def begin_epoch(self) -> None:
        """Start the next epoch if an iteration has used the current one."""
        self.epoch = self.next_epoch
        self._is_used = True


class PaddedShare(EpochSampler, DistributedSampler[Any]):
    """torch's DistributedSampler, which also works if the default device is not the CPU."""

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):
            return super().__iter__()


class ContiguousShare(EpochSampler, Sampler[int]):
    """A contiguous share of the indices. The ranks' lengths differ by at most one; the longer shares come first."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        share, longer = divmod(length, world_size)
        start = rank * share + min(rank, longer)
        self.whole = range(length)
        self._indices = range(start, start + share + (rank < longer))

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class OrderedShare(EpochSampler, Sampler[Any]):
    """Every world_size-th item of another sampler. Each rank draws the sampler's order from the same seed.

    Items are indices, or lists of indices from a batch sampler. The order of an epoch is drawn once and cached.
    """

    def __init__(self, source: Any, rank: int, world_size: int, *, pad: bool, drop_last: bool, seed: int) -> None:
        self.source = source
        self._rank, self._world_size = rank, world_size
        self._pad, self._drop_last, self._seed = pad, drop_last, seed
        self._drawn: tuple[int, list[Any]] | None = None

    @property
    def order(self) -> list[Any]:
        """The items of all ranks in this epoch, without padding."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            restore = reseed(self._seed + self.epoch, generators_of(self.source))
            try:
                self._drawn = self.epoch, _all_items(self.source)
            finally:
                restore()
        return self._drawn[1]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._share())

    def __len__(self) -> int:
        return len(self._share())

    def _share(self) -> list[Any]:
        order = self.order
        excess = len(order) % self._world_size
        if excess and self._drop_last:
            order = order[:-excess]
        elif excess and self._pad:
            order = [*order, *islice(cycle(order), self._world_size - excess)]
        return order[self._rank :: self._world_size]


class EachEpoch(Sampler[Any]):
    """A sampler that yields the items of `share`, and starts its next epoch with each iteration."""

    def __init__(self, share: Any) -> None:
        self.share = share

    def __iter__(self) -> Iterator[Any]:  # a generator: the epoch starts when the first item is read
        self.share.begin_epoch()
        seed = self.share.worker_seed
        for item in self.share:
            yield item if seed is None else SeededItem(item, seed)

    def __len__(self) -> int:
        return len(self.share)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self.share.set_epoch(epoch)


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the torch generators that a sampler holds, and those of the sampler inside a batch sampler."""
    found: list[torch.Generator] = []
    while sampler is not None:
        found += [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, torch.Generator)]
        sampler = getattr(sampler, "sampler", None)
    return found


def _all_items(source: Iterable[Any]) -> list[Any]:
    """Return the items of a sampler. Raise if there are more than its length, since it may be endless."""
    length = len(cast("Sequence[Any]", source))
    with torch.device("cpu"):  # samplers shuffle on the CPU, whatever the default device is
        items = list(islice(iter(source), length + 1))
    if len(items) > length:
        msg = f"{type(source).__qualname__} yields more items than its length, {length}. Correct its __len__."
        raise ValueError(msg)
    return items

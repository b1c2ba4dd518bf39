"""Samplers that give each rank its share of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from parawrap.errors import PlatformError
from parawrap.functional._collectives import find_place
from parawrap.launch import Platform


def get_dataset_sampler(
    dataset: Dataset[Any],
    global_rank: int | None = None,
    platform: Platform | None = None,
    *,
    pad: bool = True,
) -> Sampler[int] | None:
    """Return a sampler that gives this rank its share of a dataset. With one rank, return None.

    `shard_loader` makes a loader with such a sampler, and calls ``set_epoch`` itself.

    Args:
        dataset: A dataset with a length.
        global_rank: The global rank; by default this rank's.
        platform: The platform that sets the number of ranks; by default this rank's.
        pad: True returns torch's DistributedSampler, which shuffles (call ``set_epoch``) and gives
            all ranks the same number of rows. It repeats some rows if the number of ranks does not
            divide the length. False gives each row to exactly one rank, in order, for evaluation.
            The ranks' row counts may then differ by one.

    Raises:
        TypeError: If the dataset is a stream, or has no length.
        PlatformError: If `global_rank` is not a rank of the platform.

    Example:
        >>> from parawrap import Platform
        >>> platform = Platform(device="cpu", n_cpus=2)
        >>> def rows_of(rank):
        ...     return list(get_dataset_sampler(range(5), rank, platform, pad=False))
        >>> rows_of(0), rows_of(1)
        ([0, 1, 2], [3, 4])
    """
    rank, world_size = find_place(global_rank, platform)
    if not 0 <= rank < world_size:
        msg = (
            f"global_rank={rank} is out of range for a world of {world_size} rank(s). Use 0 to "
            f"{world_size - 1}"
        )
        raise PlatformError(msg)
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        name = type(dataset).__qualname__
        msg = (
            f"{name} has no length, or is a stream, so a sampler cannot split it. Split it by "
            "current_rank() yourself"
        )
        raise TypeError(msg)
    if world_size == 1:
        return None
    # Only training, which pads, shuffles
    return RankSampler(dataset, rank, world_size, shuffle=pad, pad=pad)


class RankSampler(DistributedSampler[Any]):
    """torch's DistributedSampler, also without padding, and with any default device.

    Without padding, each rank gets a contiguous share of the order. The shares' lengths differ by
    at most one; the longer ones come first.

    Args:
        counts_epochs: Each iteration increments `epoch`, so that the next one is another epoch.

    Attributes:
        draws: The number of iterations so far.
    """

    def __init__(
        self,
        dataset: Any,
        rank: int,
        world_size: int,
        *,
        shuffle: bool,
        seed: int = 0,
        pad: bool = True,
        drop_last: bool = False,
        counts_epochs: bool = False,
    ) -> None:
        super().__init__(dataset, world_size, rank, shuffle, seed, drop_last)
        self.draws = 0
        self._counts_epochs = counts_epochs
        self._is_padded = pad
        self._rows: Sequence[int] | None = None  # of the last iteration; None before the first

    def __iter__(self) -> Iterator[int]:
        self._rows = self._draw()
        self.draws += 1
        if self._counts_epochs:
            self.epoch += 1
        return iter(self._rows)

    def __len__(self) -> int:
        return super().__len__() if self._is_padded else len(self._share())

    def rows(self) -> Sequence[int]:
        """Return the indices of this rank's rows in the last iteration; before it, in the first."""
        return self._draw() if self._rows is None else self._rows

    def _draw(self) -> Sequence[int]:
        """Return the indices of this rank's rows in an iteration of this epoch."""
        with torch.device("cpu"):  # torch's sampler draws on the default device
            if self._is_padded:
                return list(super().__iter__())
            share = self._share()
            if not self.shuffle:
                return share
            # Seeded as in torch's sampler, so that all ranks draw the same order
            generator = torch.Generator().manual_seed(self.seed + self.epoch)
            length = len(self.dataset)  # type: ignore[arg-type]
            order = torch.randperm(length, generator=generator).tolist()
        return order[share.start : share.stop]

    def _share(self) -> range:
        """Return the positions of this rank's rows in the order, without padding."""
        length = len(self.dataset)  # type: ignore[arg-type]  # a dataset with a length
        share, rest = divmod(length, self.num_replicas)
        # The first ranks share the rest, with one more row each
        longer_shares_before = min(self.rank, rest)
        start = self.rank * share + longer_shares_before
        if self.rank < rest:
            share += 1
        return range(start, start + share)

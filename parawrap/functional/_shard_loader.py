"""`shard_loader`: rebuild a DataLoader so that each rank reads its share of the rows."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any, TypeVar

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from parawrap.functional._collectives import find_place, gather_objects, require_group
from parawrap.functional._rank_samplers import (
    ContiguousShare,
    EachEpoch,
    EpochSampler,
    OrderedShare,
    PaddedShare,
    generators_of,
)
from parawrap.functional._seeded_loader import SEEDS, new_loader, share_of

__all__ = ["shard_loader"]

L = TypeVar("L", bound="DataLoader[Any]")

_OF_THE_SAMPLER = {"dataset", "shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"}


def shard_loader(loader: L, *, pad: bool = True) -> L:
    """Return a loader of the same class and options that reads this rank's share of the rows.

    Each iteration is a new epoch. A shuffled loader has a new order in each epoch, the same on all ranks, so iterate it the
    same number of times on every rank. To resume training, choose the next epoch with ``loader.sampler.set_epoch(epoch)``.
    The class of the new loader is derived from that of the loader.

    ``batch_size`` is per rank, as with torch's DistributedSampler, and a step reads ``batch_size * world_size`` rows. For
    the same steps as in one process, divide ``batch_size`` by the world size.

    - ``shuffle=True`` becomes a shuffled DistributedSampler. Its seed is rank 0's seed of the loader's ``generator``, or 0.
    - ``shuffle=False`` keeps the order of the dataset.
    - Any other sampler runs on every rank from the same seed, and rank r takes items r, r + world_size, ... of its order.
      A sampler with a different order on some rank is refused. A batch sampler's batches are distributed the same way.

    During an iteration, Python, numpy, and torch draw this rank's own random numbers, in the process and in each worker.
    They follow from the seed, the rank, and the epoch, so that augmentations and dropout differ between ranks and are
    reproducible. After the iteration, all ranks continue with the numbers from before it.

    Args:
        loader: A loader over a dataset with a length, not sharded yet. Call `shard_loader` on every rank.
        pad: True gives all ranks the same number of rows, as training with collectives requires. Some rows are then
            repeated, or dropped with ``drop_last=True``. False gives each row to exactly one rank, for evaluation. The
            ranks' row counts may then differ by one.

    Raises:
        TypeError: If the dataset is a stream, the loader is sharded already, or the sampler has no length or a different
            order on some rank.
        ValueError: If ``pad=False`` is combined with ``drop_last=True``, or a sampler yields more items than its length.
        PlatformError: If ranks must agree on a seed or an order, but ``ipc_groups=None`` forms no process group.

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
    _check(loader)
    batches = loader.batch_sampler
    options: dict[str, Any]
    if batches is None:  # batch_size=None: the dataset yields batches
        share = _make_share(loader.sampler, False, pad)
        return _loader_with(loader, {"batch_size": None, "sampler": EachEpoch(share)}, share)
    if loader.batch_size is not None:
        share = _make_share(loader.sampler, loader.drop_last, pad)
        options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": share}
        sharded = _loader_with(loader, options, share)
        sharded.batch_sampler.sampler = EachEpoch(share)  # type: ignore[union-attr]  # torch's BatchSampler
        return sharded
    if type(batches) is BatchSampler:
        share = _make_share(batches.sampler, batches.drop_last, pad)
        options = {"batch_sampler": BatchSampler(EachEpoch(share), batches.batch_size, batches.drop_last)}
    else:
        share = _make_share(batches, False, pad)
        options = {"batch_sampler": EachEpoch(share)}
    return _loader_with(loader, options, share)


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        msg = f"shard_loader takes a torch.utils.data.DataLoader, not a {type(loader).__qualname__}"
        raise TypeError(msg)
    name = type(loader.dataset).__qualname__
    if isinstance(loader.dataset, IterableDataset):
        msg = (
            f"{name} is a stream, so it has no sampler to shard. Yield this rank's rows in its __iter__: "
            "itertools.islice(rows, current_rank().global_rank, None, current_rank().world_size). "
            "With several workers, split them again by torch.utils.data.get_worker_info()."
        )
        raise TypeError(msg)
    sampler = share_of(loader)
    while sampler is not None:
        if isinstance(sampler, (DistributedSampler, EpochSampler, EachEpoch)) or hasattr(sampler, "num_replicas"):
            msg = (
                f"the loader's sampler, {type(sampler).__qualname__}, is already sharded. "
                "Use the loader as it is, or give shard_loader a loader without that sampler."
            )
            raise TypeError(msg)
        sampler = getattr(sampler, "sampler", None)


def _make_share(sampler: Any, drop_last: bool, pad: bool) -> Any:
    """Return this rank's share of the items of a sampler."""
    if drop_last and not pad:
        msg = "pad=False keeps every row, but the loader has drop_last=True. Use drop_last=False or pad=True."
        raise ValueError(msg)
    rank, world_size = find_place()
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if type(sampler) is SequentialSampler and not pad:
        return ContiguousShare(len(sampler), rank, world_size)
    if (whole and pad) or type(sampler) is SequentialSampler:
        seed = _agree_on_seed(sampler, world_size)
        data: Any = sampler.data_source
        return PaddedShare(data, world_size, rank, shuffle=whole, seed=seed, drop_last=drop_last)
    if not hasattr(sampler, "__len__"):
        msg = (
            f"the loader's sampler, {type(sampler).__qualname__}, has no __len__, so it may be endless. "
            "Give it one, or pass DataLoader a list of indices."
        )
        raise TypeError(msg)
    share = OrderedShare(sampler, rank, world_size, pad=pad, drop_last=drop_last, seed=_agree_on_seed(sampler, world_size))
    _check_order(share, world_size)
    return share


def _agree_on_seed(sampler: Any, world_size: int) -> int:
    """Return rank 0's seed of a sampler's generator; 0 without a generator."""
    found = generators_of(sampler)
    seed = found[0].initial_seed() % SEEDS if found else 0
    if not found or world_size == 1:
        return seed
    require_group("shard_loader with a generator")
    return gather_objects(seed)[0]


def _check_order(share: OrderedShare, world_size: int) -> None:
    """Draw the order of the first epoch, and raise if the ranks' orders differ."""
    digest = hashlib.blake2b(repr(share.order).encode()).hexdigest()
    if world_size == 1:
        return
    name = type(share.source).__qualname__
    require_group(f"shard_loader with a {name}")
    digests = gather_objects(digest)
    if other := next((rank for rank, each in enumerate(digests) if each != digests[0]), 0):
        msg = (
            f"the loader's sampler, {name}, has a different order on rank {other} than on rank 0. "
            "Let it draw from torch's, numpy's, or Python's global generator, or from a torch.Generator that it holds."
        )
        raise TypeError(msg)


def _loader_with(loader: L, options: Mapping[str, Any], share: Any) -> L:
    """Return a loader like `loader`, except for the options of its sampler.

    A subclass's own ``__init__`` is not called, because it may take other arguments. Its attributes are copied.
    """
    names = [name for name in inspect.signature(DataLoader).parameters if name not in _OF_THE_SAMPLER]
    sharded: L = new_loader(type(loader))
    DataLoader.__init__(sharded, loader.dataset, **{name: getattr(loader, name) for name in names}, **options)
    for name, value in vars(loader).items():
        if name not in vars(sharded):
            setattr(sharded, name, value)
    vars(sharded)["rank_share"] = share
    if "batch_sampler" in options:
        vars(sharded)["sampler"] = share  # torch sets a SequentialSampler, which has no set_epoch and is never read
    return sharded

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

from parawrap.functional._collectives import exchange_texts, require_group
from parawrap.functional._rank_samplers import (
    ContiguousShare,
    EachEpoch,
    EpochSampler,
    OrderedShare,
    PaddedShare,
    generators_of,
    place,
)

__all__ = ["shard_loader", "share_of"]

L = TypeVar("L", bound="DataLoader[Any]")

_OF_THE_SAMPLER = {"dataset", "shuffle", "sampler", "batch_sampler", "batch_size", "drop_last"}
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_SEEDS = 2**62  # seed + epoch stays within the range of torch's seeds


def shard_loader(loader: L, *, pad: bool = True) -> L:
    """Return a loader of the same class and options that reads this rank's share of the rows.

    Each iteration is a new epoch. A shuffled loader has a new order in each epoch, the same on all ranks, so iterate it the
    same number of times on every rank. To resume training, choose the next epoch with ``loader.sampler.set_epoch(epoch)``.

    ``batch_size`` is per rank, as with torch's DistributedSampler, and a step reads ``batch_size * world_size`` rows. For
    the same steps as in one process, divide ``batch_size`` by the world size.

    - ``shuffle=True`` becomes a shuffled DistributedSampler. Its seed is rank 0's seed of the loader's ``generator``, or 0.
    - ``shuffle=False`` keeps the order of the dataset.
    - Any other sampler runs on every rank from the same seed, and rank r takes items r, r + world_size, ... of its order.
      A sampler with a different order on some rank is refused. A batch sampler's batches are distributed the same way.

    Args:
        loader: A loader over a dataset with a length, not sharded yet. Call `shard_loader` on every rank.
        pad: True gives all ranks the same number of rows, as training with collectives requires. Some rows are then
            repeated, or dropped with ``drop_last=True``. False gives each row to exactly one rank, for evaluation. The
            ranks' row counts may then differ by one.

    Raises:
        TypeError: If the dataset is a stream, the loader is sharded already, the sampler has no length or a different order
            on some rank, or a subclass of DataLoader cannot be rebuilt.
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
    options: dict[str, Any]
    if loader.batch_sampler is None:  # batch_size=None: the dataset yields batches
        options = {"batch_size": None, "sampler": EachEpoch(_share(loader, loader.sampler, False, pad))}
        return _rebuilt(loader, options)
    if loader.batch_size is not None:
        share = _share(loader, loader.sampler, loader.drop_last, pad)
        options = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "sampler": share}
        sharded = _rebuilt(loader, options)
        sharded.batch_sampler.sampler = EachEpoch(share)  # type: ignore[union-attr]  # checked in _rebuilt
        return sharded
    batches = loader.batch_sampler
    if type(batches) is BatchSampler:
        rows = EachEpoch(_share(loader, batches.sampler, batches.drop_last, pad))
        return _rebuilt(loader, {"batch_sampler": BatchSampler(rows, batches.batch_size, batches.drop_last)})
    return _rebuilt(loader, {"batch_sampler": EachEpoch(_share(loader, batches, False, pad))})


def share_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that shards a loader: its sampler of rows, or its batch sampler."""
    batches = loader.batch_sampler
    sampler = loader.sampler if batches is None or loader.batch_size is not None else getattr(batches, "sampler", batches)
    return sampler.share if isinstance(sampler, EachEpoch) else sampler


def _check(loader: Any) -> None:
    if not isinstance(loader, DataLoader):
        msg = f"shard_loader takes a torch.utils.data.DataLoader, not a {type(loader).__qualname__}"
        raise TypeError(msg)
    name = type(loader.dataset).__qualname__
    if isinstance(loader.dataset, IterableDataset):
        msg = (
            f"{name} is a stream, so it has no sampler to shard. Yield this rank's rows in its __iter__: "
            "itertools.islice(rows, current_rank().global_rank, None, current_rank().world_size)."
        )
        raise TypeError(msg)
    sampler: Any = loader.sampler if loader.batch_size is not None or loader.batch_sampler is None else loader.batch_sampler
    while sampler is not None:
        if isinstance(sampler, (DistributedSampler, EpochSampler, EachEpoch)) or hasattr(sampler, "num_replicas"):
            msg = (
                f"the loader's sampler, {type(sampler).__qualname__}, is already sharded. "
                "Use the loader as it is, or give shard_loader a loader without that sampler."
            )
            raise TypeError(msg)
        sampler = getattr(sampler, "sampler", None)


def _share(loader: DataLoader[Any], sampler: Any, drop_last: bool, pad: bool) -> Any:
    """Return this rank's share of the items of a sampler."""
    if drop_last and not pad:
        msg = "pad=False keeps every row, but the loader has drop_last=True. Use drop_last=False or pad=True."
        raise ValueError(msg)
    rank, world_size = place()
    whole = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    if type(sampler) is SequentialSampler and not pad:
        return ContiguousShare(len(sampler), rank, world_size)
    if (whole and pad) or type(sampler) is SequentialSampler:
        seed = _agreed_seed(sampler, world_size)
        data: Any = sampler.data_source
        return PaddedShare(data, world_size, rank, shuffle=whole, seed=seed, drop_last=drop_last)
    if not hasattr(sampler, "__len__"):
        msg = (
            f"the loader's sampler, {type(sampler).__qualname__}, has no __len__, so it may be endless. "
            "Give it one, or pass DataLoader a list of indices."
        )
        raise TypeError(msg)
    share = OrderedShare(sampler, rank, world_size, pad=pad, drop_last=drop_last, seed=_agreed_seed(sampler, world_size))
    _check_order(share, world_size)
    return share


def _agreed_seed(sampler: Any, world_size: int) -> int:
    """Return rank 0's seed of a sampler's generator; 0 without a generator."""
    found = generators_of(sampler)
    seed = found[0].initial_seed() % _SEEDS if found else 0
    if not found or world_size == 1:
        return seed
    require_group("shard_loader with a generator")
    return int(exchange_texts(str(seed))[0])


def _check_order(share: OrderedShare, world_size: int) -> None:
    """Draw the order of the first epoch, and raise if the ranks' orders differ."""
    digest = hashlib.blake2b(repr(share.order).encode()).hexdigest()
    if world_size == 1:
        return
    name = type(share.source).__qualname__
    require_group(f"shard_loader with a {name}")
    digests = exchange_texts(digest)
    if other := next((rank for rank, each in enumerate(digests) if each != digests[0]), 0):
        msg = (
            f"the loader's sampler, {name}, has a different order on rank {other} than on rank 0. "
            "Let it draw from torch's, numpy's, or Python's global generator, or from a torch.Generator that it holds."
        )
        raise TypeError(msg)


def _rebuilt(loader: L, options: Mapping[str, Any]) -> L:
    """Return a loader of the same class and options as `loader`, except for the given options of the sampler."""
    kind = type(loader)
    taken = inspect.signature(kind).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    every = {**inspect.signature(DataLoader).parameters, **taken}
    names = [name for name, parameter in every.items() if parameter.kind not in _VARIADIC and name not in _OF_THE_SAMPLER]
    missing = [name for name in names if not hasattr(loader, name)]
    if missing:
        raise TypeError(_cannot_rebuild(kind, f"the loader has no attribute with the value of its argument {missing[0]!r}"))
    arguments = {name: getattr(loader, name) for name in names if takes_any or name in taken}
    try:
        rebuilt = kind(dataset=loader.dataset, **arguments, **options)
    except Exception as error:
        raise TypeError(_cannot_rebuild(kind, f"{type(error).__name__}: {error}")) from error
    kept = ("dataset", "batch_size", "drop_last", *names)
    lost = [name for name in kept if not _is_alike(getattr(rebuilt, name, None), getattr(loader, name))]
    lost += [
        name for name in ("sampler", "batch_sampler") if name in options and getattr(rebuilt, name) is not options[name]
    ]
    if lost or ("batch_size" in options and not _batches_of(rebuilt)):
        lost = lost or ["batch_sampler"]
        raise TypeError(_cannot_rebuild(kind, f"its __init__ changes {lost[0]!r}"))
    for name, value in vars(loader).items():
        if name not in vars(rebuilt):
            setattr(rebuilt, name, value)
    return rebuilt


def _cannot_rebuild(kind: type, reason: str) -> str:
    name = kind.__qualname__
    return (
        f"shard_loader cannot rebuild a {name} with another sampler: {reason}. "
        f"Give {name} the sampler functional.get_dataset_sampler(dataset) yourself."
    )


def _batches_of(rebuilt: DataLoader[Any]) -> bool:
    """True if a loader makes its batches from its sampler."""
    batches: Any = rebuilt.batch_sampler
    return batches is None or (type(batches) is BatchSampler and batches.sampler is rebuilt.sampler)


def _is_alike(one: Any, other: Any) -> bool:
    """True if both are one object, are equal, or are of one class with equal attributes."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    attributes, others = getattr(one, "__dict__", {}), getattr(other, "__dict__", {})
    if attributes and attributes.keys() == others.keys():
        return all(value is others[name] or _is_equal(value, others[name]) for name, value in attributes.items())
    return _is_equal(one, other)


def _is_equal(one: Any, other: Any) -> bool:
    try:
        return bool(one == other)
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors compare by element
        return False

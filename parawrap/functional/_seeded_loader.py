"""Random numbers of a rank's own, while the rank iterates a sharded loader and in the loader's workers."""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from parawrap.functional._collectives import find_place
from parawrap.launch import current_rank, inside_a_rank, seed_all

__all__ = ["SEEDS", "SeededItem", "new_loader", "reseed", "share_of"]

SEEDS = 2**62  # a seed below it, plus an epoch or the number of a worker, is a seed of torch

_seed_of_this_worker = -1


def reseed(seed: int, generators: Iterable[torch.Generator] = (), device: torch.device | None = None) -> Callable[[], None]:
    """Seed the generators of Python, numpy (if it is loaded), torch on the CPU and on a device, and the given ones.

    Returns:
        A function that restores all of them.
    """
    numpys = sys.modules["numpy"].random if "numpy" in sys.modules else None
    module: Any = None if device is None or device.type == "cpu" else torch.get_device_module(device)
    torchs = (torch.default_generator, *generators)
    states = [generator.get_state() for generator in torchs]
    of_python, of_numpy = random.getstate(), numpys.get_state() if numpys else None
    of_device = module.get_rng_state() if module else None

    random.seed(seed)
    for each in torchs:
        each.manual_seed(seed)
    if numpys:
        numpys.seed(seed % 2**32)
    if module:
        module.manual_seed(seed)

    def restore() -> None:
        random.setstate(of_python)
        for each, state in zip(torchs, states, strict=True):
            each.set_state(state)
        if numpys:
            numpys.set_state(of_numpy)
        if module:
            module.set_rng_state(of_device)

    return restore


class SeededItem:
    """An item of a sampler that seeds the worker process which receives it, once per seed. It arrives as the item itself.

    torch seeds workers when they start. Persistent workers need it to have other numbers in each epoch, and the same
    numbers if a training resumes with that epoch.
    """

    def __init__(self, item: Any, seed: int) -> None:
        self._item, self._seed = item, seed

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (self._item, self._seed)


def _receive(item: Any, seed: int) -> Any:
    global _seed_of_this_worker
    worker = get_worker_info()
    if worker is not None and seed != _seed_of_this_worker:
        _seed_of_this_worker = seed
        seed_all(seed + worker.id)
    return item


class _OwnNumbers:
    """A base class of sharded loaders, in front of DataLoader or a subclass of it.

    While such a loader is iterated, its process draws this rank's own random numbers.

    Attributes:
        rank_share: The sampler of this rank's rows or batches.
    """

    rank_share: Any

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self
        return _Batches(loader, super().__iter__)  # type: ignore[misc]  # pyright: ignore  # of DataLoader

    def __reduce__(self) -> tuple[Any, ...]:
        return new_loader, (type(self).__bases__[1],), vars(self)  # a class that is made here has no importable name


def new_loader(kind: Any) -> Any:
    """Return a loader without attributes of a class of sharded loaders, which is derived from this class of loaders."""
    made = _class_with_own_numbers(kind)
    return made.__new__(made)


def share_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that shards a loader, or the sampler of another loader: of its rows, or else of its batches."""
    if isinstance(loader, _OwnNumbers):
        return loader.rank_share
    is_by_batches = loader.batch_size is None and loader.batch_sampler is not None
    return loader.batch_sampler if is_by_batches else loader.sampler


@functools.cache
def _class_with_own_numbers(kind: type) -> Any:
    return type(f"Sharded{kind.__name__}", (_OwnNumbers, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Batches:
    """One iteration of a sharded loader. It ends with its last batch, or when it is deleted.

    Like torch's iterator, it belongs to one thread.
    """

    def __init__(self, loader: DataLoader[Any], iterate: Callable[[], Iterator[Any]]) -> None:
        self._stream = _Stream(loader)
        self._batches = iterate()
        self._stream.start()  # again: new workers have drawn a seed, persistent ones have not

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._stream.end()
            raise

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]  # torch's iterator has a length

    def __del__(self) -> None:
        self._stream.end()


class _Stream:
    """The random numbers of this rank during one iteration of a loader.

    A loader's next iteration ends its previous one. Streams of several loaders may be nested and may end in any order; the
    newest one is in effect.
    """

    _open: ClassVar[list[_Stream]] = []  # the oldest first
    _loader: weakref.ref[DataLoader[Any]]

    def __init__(self, loader: DataLoader[Any]) -> None:
        for each in [stream for stream in self._open if stream._loader() is loader]:
            each.end()
        self._loader = weakref.ref(loader)
        self._script_seed: int = self._open[0]._script_seed if self._open else torch.initial_seed()
        self._generators = [] if loader.generator is None else [loader.generator]
        seeds = [self._script_seed, *(generator.initial_seed() for generator in self._generators)]
        share: Any = share_of(loader)
        # The number of outer loops gives two loaders that are read together different numbers.
        self._seed = _hash(*seeds, find_place()[0], share.next_epoch, len(self._open))
        share.worker_seed = self._seed if loader.persistent_workers else None
        self._restore = self.start()
        self._open.append(self)

    def start(self) -> Callable[[], None]:
        """Put the stream into effect, from its start. Return a function that restores the previous numbers."""
        return reseed(self._seed, self._generators, current_rank().device if inside_a_rank() else None)

    def end(self) -> None:
        """Restore the previous numbers. A newer stream that is still open restores them when it ends."""
        if self in self._open:
            position = self._open.index(self)
            del self._open[position]
            if position < len(self._open):
                self._open[position]._restore = self._restore
            else:
                self._restore()


def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % SEEDS

"""A compiled model on NeuronCores, and the rows that its cores are given."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from parawrap.backends.neuron import NeuronCore, Signature, consecutive, modules_around, runtime
from parawrap.errors import SessionError, ShapeError
from parawrap.shards import balanced, in_units

__all__ = ["Batching", "PlacedModel"]


class PlacedModel:
    """Replicas of a compiled model, loaded when it is made and given back by `unplace`. Safe to share between threads.

    Consecutive cores are loaded in one call and have one replica between them, which takes them in turn. What stands around
    a compiled model, if anything, has the tensors of the module that was given, and follows its train and eval mode.

    Raises:
        ReplicaError: the model was not compiled for NeuronCores.
        ShapeError: with `dynamic`, batches of other sizes than the compiled one cannot be taken.
        RuntimeError: the runtime could not load it. Nothing is left on any core then, as after any other error.
    """

    def __init__(self, model: torch.nn.Module, cores: Sequence[NeuronCore], *, dynamic: bool) -> None:
        self.model = model
        self.cores = tuple(cores)
        self.dynamic = dynamic
        self._runtime = runtime()
        self.signature = self._runtime.signature(model)
        if dynamic and self.signature is not None:
            self.signature.refuse_fixed()  # before anything is loaded
        self._loaded: list[torch.nn.Module] = []
        self._replicas: dict[int, torch.nn.Module] = {}
        self._turns = itertools.count()
        self._shells: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self._counting = threading.Lock()
        self._calls = 0
        self._wanted = True
        try:
            for start, count in consecutive(core.index for core in cores):
                self._load(model, start, count)
        except BaseException:
            self.unplace()
            raise

    def on(self, core: NeuronCore) -> torch.nn.Module:
        """The replica that serves a core."""
        return self._replicas[core.index]

    def in_turn(self) -> torch.nn.Module:
        """The replica for a call by a thread that has no core."""
        return self.on(self.cores[next(self._turns) % len(self.cores)])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside the block the replicas stay on the cores: `unplace` frees them when the last such block ends.

        Raises:
            SessionError: they are free already.
        """
        with self._counting:
            if not self._wanted and not self._calls:
                msg = "the model was taken off its NeuronCores: call it inside the `with` block, and before close()"
                raise SessionError(msg)
            self._calls += 1
            for original, shell in self._shells:
                shell.training = original.training
        try:
            yield
        finally:
            with self._counting:
                self._calls -= 1
            self._free_if_over()

    def unplace(self) -> None:
        """Free the cores' memory, once no call is under way. Calling it twice does no harm."""
        self._wanted = False
        self._free_if_over()

    def _free_if_over(self) -> None:
        with self._counting:
            if self._wanted or self._calls:
                return
            loaded, self._loaded = self._loaded, []
            self._replicas, self._shells = {}, []
        for replica in loaded:
            self._runtime.unplace(replica)

    def _load(self, model: torch.nn.Module, start: int, count: int) -> None:
        replica = self._runtime.place(model, start, count)
        self._loaded.append(replica)
        self._shells += zip(modules_around(model), modules_around(replica), strict=True)
        if self.dynamic:
            replica = self._runtime.dynamic_batch(replica)
        self._replicas.update(dict.fromkeys(range(start, start + count), replica))


class Batching(NamedTuple):
    """How the rows of a call go to the cores.

    `compiled` is how many rows an inference computes, None where that is not known. With `dynamic` a replica takes any
    number and goes through them by itself; `why_fixed` says why it does not. `split_size` is the most that it is given at
    once.
    """

    cores: int
    dim: int
    compiled: int | None
    dynamic: bool
    split_size: int | None = None
    why_fixed: str = "it is off"

    @classmethod
    def of(cls, placed: PlacedModel, dim: int, split_size: int | None = None) -> Batching:
        """Return the batching of a placed model with the rows on `dim`."""
        compiled = None if placed.signature is None else _compiled_rows(placed.signature, dim)
        return cls(len(placed.cores), dim, compiled, placed.dynamic, split_size, _why_fixed(placed.signature, dim))

    @property
    def chunk(self) -> int | None:
        """The rows that a core is given at once of a call that it gets whole; None for all of them."""
        return self.split_size or (None if self.dynamic else self.compiled)

    def cut(self, rows: int, lanes: int) -> tuple[int, ...]:
        """The sizes of a call's shards; there may be more of them than lanes.

        Where it is known how many rows an inference computes, they are whole inferences, so that no core computes in vain.

        Raises:
            ShapeError: without dynamic batching, some core would not get the compiled size; zero rows are refused too.
        """
        if self.split_size is not None:
            return self._chunks(rows, self.split_size)
        if not self.dynamic:
            return (self._rows_of_each(rows),) * self.cores
        if self.compiled is None:
            return balanced(rows, self.cores)
        return in_units(rows, max(lanes, self.cores), self.compiled)

    def whole(self, rows: int, _: int = 1) -> tuple[int, ...]:
        """The sizes of what one core is given, one after the other, when it gets the whole call.

        Raises:
            ShapeError: without dynamic batching, they would not be of the compiled size.
        """
        return (rows,) if self.chunk is None else self._chunks(rows, self.chunk)

    def _chunks(self, rows: int, size: int) -> tuple[int, ...]:
        full, rest = divmod(rows, size)
        if not self.dynamic and (rest or not full or size != (self.compiled or size)):
            msg = (
                f"{rows} rows on dim {self.dim} in chunks of {size}: without dynamic batching every chunk must have "
                f"{self.compiled or size} rows. {self._no_dynamic_batching()}"
            )
            raise ShapeError(msg)
        return (size,) * full + ((rest,) if rest or not full else ())

    def _rows_of_each(self, rows: int) -> int:
        each = self.compiled or rows // self.cores
        if not rows or rows != each * self.cores:
            wanted = "the same whole number for each"
            if self.compiled is not None:
                wanted = f"{each}, as the model is compiled, so {each * self.cores} rows in all"
            msg = (
                f"{rows} rows on dim {self.dim} over {self.cores} NeuronCores are {rows / self.cores:g} a core: without "
                f"dynamic batching it must be {wanted}. {self._no_dynamic_batching()}"
            )
            raise ShapeError(msg)
        return each

    def _no_dynamic_batching(self) -> str:
        return f"Dynamic batching would take any number, but {self.why_fixed}"


def _compiled_rows(signature: Signature, dim: int) -> int | None:
    """Return the row count of the inputs on that dim, without single rows that are broadcast; None if they disagree."""
    sizes = {rows for spec in signature.inputs if (rows := spec.rows(dim)) is not None}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None


def _why_fixed(signature: Signature | None, dim: int) -> str:
    if dim != 0:
        return "there is none on other dims than 0"
    return (None if signature is None else signature.why_fixed()) or "it is off"

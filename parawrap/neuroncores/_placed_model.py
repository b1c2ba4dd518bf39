"""A compiled model on NeuronCores, and the number of rows that each core gets."""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from parawrap.engine.cut import balanced_sizes, sizes_in_units
from parawrap.errors import ReplicaError, SessionError, ShapeError, ShardError
from parawrap.neuroncores._choose_runtime import runtime
from parawrap.neuroncores._compiled_parts import modules_around
from parawrap.neuroncores._neuron_cores import NeuronCore, find_runs
from parawrap.neuroncores._signature import Signature

__all__ = ["Batching", "PlacedModel", "place"]

_NORMS = (
    *(torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm),
    *(torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d),
)


class PlacedModel:
    """Replicas of a compiled model. The constructor loads them, and `unplace` unloads them. Thread-safe.

    A run of consecutive cores is loaded in one call and shares one replica, which uses these cores in turn. Ordinary
    modules around a compiled model share the parameters and buffers of the given module, and follow its mode.

    Raises:
        ReplicaError: If the model was not compiled for NeuronCores.
        ShapeError: If `dynamic` is True, but the model only takes batches of its compiled size.
        RuntimeError: If the runtime cannot load the model. After this or any other error, no core keeps it.
    """

    def __init__(self, model: Any, cores: Sequence[NeuronCore], *, dynamic: bool) -> None:
        self.model: torch.nn.Module = model
        self.cores = tuple(cores)
        self.dynamic = dynamic
        self._runtime = runtime()
        self.signature = self._runtime.signature(model)
        if dynamic and self.signature is not None:
            self.signature.refuse_fixed()  # before anything is loaded
        self._replicas: dict[int, torch.nn.Module] = {}
        self._turns = itertools.count()
        self._shells: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        self._counting = threading.Lock()
        self._calls = 0
        self._is_open = True
        try:
            for start, count in find_runs(core.index for core in cores):
                self._load(model, start, count)
        except BaseException:
            self.unplace()
            raise
        self._parts = _parts_of(model)

    def on(self, core: NeuronCore) -> torch.nn.Module:
        """Return the replica on `core`."""
        return self._replicas[core.index]

    def in_turn(self) -> torch.nn.Module:
        """Return the replica on the next core in turn, for a call that is not bound to a core."""
        return self.on(self.cores[next(self._turns) % len(self.cores)])

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the replicas loaded inside the block: `unplace` waits until the last such block ends.

        Raises:
            SessionError: If the replicas are already unloaded.
            ReplicaError: If a submodule was replaced, or a normalization would update its running statistics.
        """
        with self._counting:
            if not self._is_open and not self._calls:
                msg = "the model was unloaded from its NeuronCores: call it inside the `with` block, and before close()"
                raise SessionError(msg)
            parts = _parts_of(self.model)
            if len(parts) != len(self._parts) or not all(map(operator.is_, parts, self._parts)):
                msg = (
                    f"a submodule of {type(self.model).__name__} was replaced after the model was loaded onto its "
                    "NeuronCores. Close it, and open it again"
                )
                raise ReplicaError(msg)
            for original, shell in self._shells:
                _follow(original, shell)
            self._calls += 1
        try:
            yield
        finally:
            with self._counting:
                self._calls -= 1
            self._free_if_over()

    def unplace(self) -> None:
        """Free the memory of the cores, once no call is in flight. May be called again."""
        with self._counting:
            self._is_open = False
        self._free_if_over()

    def _free_if_over(self) -> None:
        with self._counting:
            if not self._is_open and not self._calls:
                self._replicas, self._shells = {}, []

    def _load(self, model: torch.nn.Module, start: int, count: int) -> None:
        replica = self._runtime.place(model, start, count)
        self._shells += [(module, replica.get_submodule(name)) for name, module in modules_around(model)]
        if self.dynamic:
            replica = self._runtime.dynamic_batch(replica)
        self._replicas.update(dict.fromkeys(range(start, start + count), replica))


def _parts_of(model: Any) -> list[torch.nn.Module]:
    """Return the modules around compiled models, and their direct children, which include the compiled models."""
    around = [module for _, module in modules_around(model)]
    return [model, *(child for module in around for child in module.children())]


def _follow(original: torch.nn.Module, shell: torch.nn.Module) -> None:
    """Give a shell the mode, the parameters, and the buffers that the original module has now.

    Raises:
        ReplicaError: If a normalization would update its statistics: each core would do so for its own rows.
    """
    shell.training = original.training
    if original.training and isinstance(original, _NORMS) and original.track_running_stats:
        msg = (
            f"{type(original).__name__} around a compiled model is in train mode, and every core would update its "
            "statistics with other rows. Call its eval(), or set track_running_stats=False"
        )
        raise ReplicaError(msg)
    for name, tensor in (
        *original.named_parameters(recurse=False, remove_duplicate=False),
        *original.named_buffers(recurse=False, remove_duplicate=False),
    ):
        if getattr(shell, name, None) is not tensor:
            setattr(shell, name, tensor)


def place(
    model: Any,
    cores: Sequence[NeuronCore],
    dim: int,
    *,
    dynamic: bool = True,
    warn: Callable[[str], None] | None = None,
) -> PlacedModel:
    """Load the model onto cores, with dynamic batching if `dynamic` is True and the model supports it.

    If the model does not support it, call `warn` with the reason.

    Raises:
        ShardError: If `dim` is not a dim of the model's inputs.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        msg = f"dim={dim!r} is not an integer. Give one, such as dim=0"
        raise ShardError(msg)
    signature = runtime().signature(model)
    most = max((len(spec.shape) for spec in signature.inputs), default=0) if signature is not None else None
    if most is not None and not -most <= dim < most:
        msg = f"dim={dim} is out of range: the model is compiled for inputs with at most {most} dims"
        raise ShardError(msg)
    why_not = None
    if dynamic and dim == 0:
        try:
            return PlacedModel(model, cores, dynamic=True)
        except ShapeError as error:
            why_not = str(error)
    elif dynamic:
        why_not = f"dynamic batching is off because dim={dim}: it works only on dim 0"
    if why_not is not None and warn is not None:
        warn(why_not)
    return PlacedModel(model, cores, dynamic=False)


class Batching(NamedTuple):
    """The distribution of the rows of a call over the cores.

    `compiled` is the number of rows per inference, or None if it is unknown. With `dynamic`, a replica takes any number of
    rows and cuts them itself; otherwise `why_fixed` is the reason. A replica gets at most `split_size` rows at once.
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
        compiled = None if placed.signature is None else _count_compiled_rows(placed.signature, dim)
        return cls(len(placed.cores), dim, compiled, placed.dynamic, split_size, _why_fixed(placed.signature, dim))

    @property
    def chunk(self) -> int | None:
        """The number of rows that a core gets at once from a whole call; None means all rows."""
        return self.split_size or (None if self.dynamic else self.compiled)

    def cut(self, rows: int, lanes: int) -> tuple[int, ...]:
        """Return the sizes of a call's shards. There may be more shards than lanes.

        If the compiled number of rows is known, sizes are multiples of it, so that only the last inference is filled up.

        Raises:
            ShapeError: If dynamic batching is off, and a core would not get the compiled number of rows, or there are none.
        """
        if self.split_size is not None:
            return self._chunks(rows, self.split_size)
        if not self.dynamic:
            return (self._rows_of_each(rows),) * self.cores
        if self.compiled is None:
            return balanced_sizes(rows, self.cores)
        return sizes_in_units(rows, max(lanes, self.cores), self.compiled)

    def whole(self, rows: int, _: int = 1) -> tuple[int, ...]:
        """Return the sizes of the chunks that one core gets, one after another, if it gets the whole call.

        Raises:
            ShapeError: If dynamic batching is off, and a chunk would not have the compiled number of rows.
        """
        return (rows,) if self.chunk is None else self._chunks(rows, self.chunk)

    def _chunks(self, rows: int, size: int) -> tuple[int, ...]:
        full, rest = divmod(rows, size)
        if not self.dynamic and (rest or not full or size != (self.compiled or size)):
            cure = f"Set split_size to {self.compiled or 'None'}. " if self.split_size and size != self.compiled else ""
            msg = (
                f"{rows} rows on dim {self.dim} in chunks of {size}: without dynamic batching, every chunk must have "
                f"{self.compiled or size} rows. {cure}{self._no_dynamic_batching()}"
            )
            raise ShapeError(msg)
        return (size,) * full + ((rest,) if rest or not full else ())

    def _rows_of_each(self, rows: int) -> int:
        each = self.compiled or rows // self.cores
        if not rows or rows != each * self.cores:
            needed = f"the same number of rows. Pass a multiple of {self.cores}"
            if self.compiled is not None:
                needed = f"{each}, the compiled number of rows. Pass {each * self.cores} rows"
            msg = (
                f"{rows} rows on dim {self.dim} over {self.cores} NeuronCores are {rows / self.cores:g} per core, but "
                f"without dynamic batching each core takes {needed}. {self._no_dynamic_batching()}"
            )
            raise ShapeError(msg)
        return each

    def _no_dynamic_batching(self) -> str:
        return f"Dynamic batching accepts any number of rows, but {self.why_fixed}"


def _count_compiled_rows(signature: Signature, dim: int) -> int | None:
    """Return the row count of the inputs on that dim, without single rows that are broadcast; None if they disagree."""
    sizes = {rows for spec in signature.inputs if (rows := spec.rows(dim)) is not None}
    if len(sizes) > 1:
        sizes.discard(1)
    return sizes.pop() if len(sizes) == 1 else None


def _why_fixed(signature: Signature | None, dim: int) -> str:
    if dim != 0:
        return "it supports only dim 0"
    return (None if signature is None else signature.why_fixed()) or "it is off"

"""`neuron.DataParallel`: the name, signature and meaning of torch_neuronx.DataParallel on persistent lanes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, SupportsIndex

import torch

from parawrap.backends import warn_caller
from parawrap.backends.neuron import NeuronCore
from parawrap.engine import Entry
from parawrap.engine.neuron import Batching, NeuronSession, PlacedModel
from parawrap.errors import ShardError
from parawrap.faces._on_cores import WORKERS_PER_CORE, cores_of, place
from parawrap.faces._vector import vector
from parawrap.shards import Cutter, JoinRules, Parameters

__all__ = ["DataParallel"]


class DataParallel(torch.nn.Module):
    """A model that was compiled for NeuronCores, on several of them: torch_neuronx.DataParallel's API and torch.neuron's.

    Each core gets a replica, loaded here and now; consecutive cores in one call. A call is cut into whole inferences over
    the cores, and the outputs are joined in row order, rows in = rows out, nested inputs and outputs included. Lanes start
    at the first call and end with the module. Any number of threads may call it at once; a core runs one inference at a
    time, while the input of the next is brought to it.

    With dynamic batching (by default, on dim 0) a call may have any number of rows: the cores go through them in chunks of
    the compiled size. Without it, each core must get exactly that size. As in torch, 0-d outputs become a vector with one
    value a shard (with a warning).

    The differences from the vendor's: the threads are kept from call to call; where the compiled size is known, rows are
    cut so that no core computes in vain; `model` itself is never moved or changed; outputs have no gradients.

    Args:
        model: what `parawrap.neuron.trace` or the vendor's trace returned, or a module that holds such models.
        device_ids: indices or ``"nc:#"``, zero-based within the process; every core allocated to it by default.
        dim: the dim that the rows lie on. Any but 0 turns dynamic batching off, with a warning.
        set_dynamic_batching: whether to use dynamic batching where the model is eligible.

    Attributes:
        module: the model that was given. What is put in its place is seen by the replicas after `close`.
        device_ids: the indices of the cores, in the order given.
        num_workers: how many lanes serve the cores, 2 a core by default. May be set.
        split_size: the most rows that a core is given at once; None is whole inferences where the compiled size is known,
            else about ``rows // number of cores``. May be set.
        dim: the dim that was given.

    Raises:
        DeviceListError: `device_ids` is empty, names a core twice, or has an entry that is no core.
        DeviceUnavailableError: a core that this process does not have, or no runtime.
        ReplicaError: `model` was not traced for NeuronCores.
        ShardError: `dim` is no dim of the inputs; `num_workers` or `split_size` is set to less than 1.
        RuntimeError: of the runtime, when the model does not fit, say.

    Example:
        >>> import torch
        >>> from parawrap import neuron, testing
        >>> with testing.neuron_host(cores=2):
        ...     compiled = neuron.trace(torch.nn.Linear(8, 4), torch.zeros(1, 8))
        ...     net = neuron.DataParallel(compiled)
        ...     net(torch.randn(5, 8)).shape, net.device_ids
        (torch.Size([5, 4]), [0, 1])
    """

    def __init__(
        self,
        model: torch.nn.Module,
        device_ids: Sequence[int | str | NeuronCore] | None = None,
        dim: int = 0,
        set_dynamic_batching: bool = True,
    ) -> None:
        super().__init__()
        self._cores = cores_of(device_ids)
        self._dim = dim
        self._num_workers = WORKERS_PER_CORE * len(self._cores)
        self._split_size: int | None = None
        self._wants_dynamic = set_dynamic_batching
        self._changing = threading.RLock()
        self._session: NeuronSession | None = None
        self._placed: PlacedModel | None = place(model, self._cores, dim, dynamic=set_dynamic_batching, tell=_tell)
        self.module = model

    @property
    def device_ids(self) -> list[int]:
        return [core.index for core in self._cores]

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @num_workers.setter
    def num_workers(self, number: int) -> None:
        self._num_workers = _at_least_one("num_workers", number)
        self._end_lanes()

    @property
    def split_size(self) -> int | None:
        return self._split_size

    @split_size.setter
    def split_size(self, rows: int | None) -> None:
        self._split_size = None if rows is None else _at_least_one("split_size", rows)
        self._end_lanes()

    def disable_dynamic_batching(self) -> None:
        """Load the model anew, without dynamic batching: each core then gets exactly the compiled size."""
        with self._changing:
            self._wants_dynamic = False
            if self._placed is None or self._placed.dynamic:
                self.close()
                self._placed = place(self.module, self._cores, self.dim, dynamic=False)

    def close(self) -> None:
        """End the lanes and free the cores' memory. The next call starts them and loads the model again."""
        with self._changing:
            self._end_lanes()
            placed, self._placed = self._placed, None
        if placed is not None:
            placed.unplace()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter, apply, gather.

        Raises:
            ShapeError: the model is not compiled for such tensors; without dynamic batching, for so many rows.
            ShardError, GatherError: of what cannot be cut or joined.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"), self._in_use() as session:
            return session.call(Entry(self.module), inputs, kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy loads replicas and starts lanes of its own, at its first call.
        own = ("_session", "_placed", "_changing")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = {"_session": None, "_placed": None, "_changing": threading.RLock()}
        super().__setstate__({**state, **fresh})  # type: ignore[no-untyped-call]

    @contextmanager
    def _in_use(self) -> Iterator[NeuronSession]:
        """The engine, of which nobody takes the cores away inside the block."""
        with ExitStack() as held:
            with self._changing:
                session = self._opened()
                held.enter_context(session.in_use())
            yield session

    def _opened(self) -> NeuronSession:
        """The engine for the attributes as they are now."""
        with self._changing:
            if self._session is None:
                if self._placed is None:
                    self._placed = place(self.module, self._cores, self.dim, dynamic=self._wants_dynamic, tell=_tell)
                self._session = self._new_session(self._placed)
            return self._session

    def _new_session(self, placed: PlacedModel) -> NeuronSession:
        batching = Batching.of(placed, self.dim, self._split_size)
        cutter = Cutter(
            self.dim,
            parameters=Parameters(self.module.forward),
            lists_are_shared=True,
            sizes=partial(_sizes, batching),
        )
        rules = JoinRules(self.dim, reduce=vector, as_torch=True)
        return NeuronSession(placed, batching, self._num_workers, cutters={None: cutter}, rules=rules)

    def _end_lanes(self) -> None:
        with self._changing:
            session, self._session = self._session, None
        if session is not None:
            session.close()


def _tell(why_not: str) -> None:
    warn_caller(f"{why_not}. Each core must get exactly the compiled size; set_dynamic_batching=False agrees to that")


def _at_least_one(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        msg = f"{name}={value!r} is no whole number of at least 1"
        raise ShardError(msg)
    return value.__index__()


def _sizes(batching: Batching, rows: int, lanes: int) -> tuple[int, ...]:
    """The shards' sizes, with a warning where they leave cores idle."""
    sizes = batching.cut(rows, lanes)
    each = batching.split_size or batching.compiled or 1
    busy = -(-rows // each)
    if 0 < busy < batching.cores:
        keeps = "1 row keeps" if rows == 1 else f"{rows} rows keep"
        warn_caller(
            f"{keeps} {busy} of {batching.cores} NeuronCores busy; a number of rows that can be divided by "
            f"{batching.cores * each} uses all of them alike"
        )
    return sizes

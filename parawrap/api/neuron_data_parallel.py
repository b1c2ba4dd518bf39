"""`neuron.DataParallel`: a drop-in replacement for torch_neuronx.DataParallel."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, SupportsIndex

import torch

from parawrap.api.scatter_gather import torch_rules
from parawrap.backends import warn_caller
from parawrap.engine.call import Entry
from parawrap.engine.cut import Cutter
from parawrap.engine.in_dims import Parameters
from parawrap.errors import ShardError
from parawrap.neuroncores import (
    LANES_PER_CORE,
    CoreSession,
    NeuronCore,
    Placement,
    resolve_cores,
    runtime,
)


class DataParallel(torch.nn.Module):
    """Split each batch over several NeuronCores.

    It has the API of torch_neuronx.DataParallel and of torch.neuron.DataParallel.

    The constructor loads one replica of the compiled model onto each core, and onto consecutive
    cores in one call. Each call cuts the rows, runs them on the cores, and joins the outputs in row
    order. Inputs and outputs may be nested.

    With dynamic batching, a call may have any number of rows. Each core processes its rows in
    chunks of the compiled size. Dynamic batching works on dim 0, where it is the default. Without
    it, each core must get exactly the compiled size.

    Lanes start at the first call, and end when the `DataParallel` is deleted or closed. It is
    thread-safe. A core runs one inference at a time, and the next input is copied to it meanwhile.

    As in torch, 0-d outputs become a vector with one value per shard (with a warning). The
    differences from torch_neuronx:

    - Threads persist between calls.
    - If the compiled size is known, shards consist of whole inferences, so cores compute as few
      unused rows as possible.
    - `model` is not moved or changed.
    - Outputs of compiled models have no gradients.

    Args:
        model: A model from `parawrap.neuron.trace` or the vendor's trace, or a module that contains
            such models.
        device_ids: Indices or ``"nc:#"``, counted from zero within the process. By default, every
            core that is allocated to the process.
        dim: The dim that the rows lie on. A dim other than 0 turns dynamic batching off, with a
            warning.
        set_dynamic_batching: Use dynamic batching if the model supports it.

    Attributes:
        module: The given model. To load another one, set `module` and call `close`.
        device_ids: The indices of the cores, in the given order.
        num_workers: The number of lanes, by default 2 per core. Each lane serves one core. If you
            set it, the model is unloaded, and the next call loads it again.
        split_size: The largest number of rows that a core gets at once. By default None: whole
            inferences if the compiled size is known, and else about ``rows // number of cores``. If
            you set it, the model is unloaded, and the next call loads it again.
        dim: The given dim.

    Raises:
        DeviceListError: If `device_ids` is empty, repeats a core, or has an entry that is not a
            core.
        DeviceUnavailableError: If this process does not have one of the cores, the runtime is not
            installed, or the installed torch_neuronx makes NeuronCores torch devices.
        ReplicaError: If `model` was not traced for NeuronCores, or a module around a traced one
            cannot be copied.
        ShardError: If `dim` is not a dim of the inputs, or `num_workers` or `split_size` is set to
            less than 1.
        RuntimeError: If the runtime cannot load the model, for example because it does not fit into
            memory.

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
        self._cores = resolve_cores(device_ids, runtime().core_count())
        self._dim = dim
        self._num_workers = LANES_PER_CORE * len(self._cores)
        self._split_size: int | None = None
        self._wants_dynamic = set_dynamic_batching
        # Protects `_session`: threads that call at the same time load the model once. Reentrant,
        # because a signal handler may call `close` while its thread loads the model
        self._changing = threading.RLock()
        self.module = model
        self._session: CoreSession | None = None
        # Opened here, so that errors of the model come from the constructor
        why_fixed = self._open_session().placement.why_fixed
        if set_dynamic_batching and why_fixed is not None:
            warn_caller(
                f"{why_fixed}. Each core must get exactly the compiled size. To silence this "
                "warning, set set_dynamic_batching=False"
            )

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
        self.close()

    @property
    def split_size(self) -> int | None:
        return self._split_size

    @split_size.setter
    def split_size(self, rows: int | None) -> None:
        self._split_size = None if rows is None else _at_least_one("split_size", rows)
        self.close()

    def disable_dynamic_batching(self) -> None:
        """Reload the model without dynamic batching.

        Each core must then get exactly the compiled size.
        """
        if self._wants_dynamic:
            self._wants_dynamic = False
            self.close()
        # Opened here, so that errors of the model come from this method
        self._open_session()

    def close(self) -> None:
        """End the lanes and free the cores' memory.

        The next call starts lanes and loads the model again.
        """
        with self._changing:
            session, self._session = self._session, None
        # Closed without the lock, which a lane may need before it ends
        if session is not None:
            session.close()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Scatter the inputs, run the replicas, and gather the outputs.

        Raises:
            ShapeError: Without dynamic batching, if a core would not get the compiled number of
                rows. On emulated cores, also if the model is not compiled for the tensors' shapes
                or dtypes.
            ShardError: If an input cannot be cut.
            GatherError: If the outputs cannot be joined.
        """
        with torch.autograd.profiler.record_function("DataParallel.forward"):
            return self._open_session().call(Entry(self._call_plainly), inputs, kwargs)

    def _call_plainly(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run a call that the session did not run on its cores."""
        # The first call gives lazy parameters their shapes, and is on no core
        if self._open_session().replicas.state.survey.is_lazy:
            return self.module(*inputs, **kwargs)
        # Another thread has closed the session meanwhile. This one is new
        return self.forward(*inputs, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # A copy loads its own replicas and starts its own lanes at its first call
        own = ("_session", "_changing")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        fresh = {"_session": None, "_changing": threading.RLock()}
        super().__setstate__({**state, **fresh})  # type: ignore[no-untyped-call]

    def _open_session(self) -> CoreSession:
        """Return the session for the current attributes. A forked child opens its own."""
        with self._changing:
            if self._session is None or not self._session.lanes.is_alive:
                self._session = self._new_session()
            return self._session

    def _new_session(self) -> CoreSession:
        placement = Placement(
            self.module,
            self._cores,
            self._dim,
            dynamic=self._wants_dynamic,
            split_size=self._split_size,
        )
        cutter = Cutter(
            self._dim,
            parameters=Parameters(getattr(self.module, "forward", self.module)),
            lists_are_shared=True,
            sizes=placement.cut,
        )
        rules = torch_rules(self._dim)
        return CoreSession(
            self.module, placement, self._num_workers, cutters={None: cutter}, rules=rules
        )


def _at_least_one(name: str, value: Any) -> int:
    """Return the value as an int. Refuse a value that is not an integer of at least 1."""
    # Integers of other packages, such as numpy's, have `__index__`. A bool has it too
    is_integer = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    number: int = value.__index__() if is_integer else 0
    if number < 1:
        msg = f"{name}={value!r} is not a valid number. Use an integer of at least 1"
        raise ShardError(msg)
    return number

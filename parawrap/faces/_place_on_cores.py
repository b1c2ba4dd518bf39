"""NeuronCores in `parallel` and `neuron.DataParallel`: resolve cores, and load a model onto them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parawrap.backends.neuron import NeuronCore, resolve_cores, runtime
from parawrap.engine import Session
from parawrap.engine.neuron import Batching, PlacedModel
from parawrap.engine.neuron import open_session as open_on_cores
from parawrap.errors import ShapeError, ShardError
from parawrap.faces._check_arguments import Joining
from parawrap.shards import Cutter, Sizes

__all__ = ["WORKERS_PER_CORE", "cores_of", "open_session", "place"]

WORKERS_PER_CORE = 2
"""One lane runs while the other copies its input. Also the default of num_workers in torch_neuronx.DataParallel."""


def cores_of(devices: Any) -> tuple[NeuronCore, ...]:
    """Return the cores that `devices` names. None or a kind means every core of this process.

    Raises:
        DeviceListError: If `devices` is empty, repeats a core, or has an entry that is not a core.
        DeviceUnavailableError: If this process does not have one of the cores, or the runtime is not installed.
    """
    return resolve_cores(devices, runtime().core_count())


def place(
    model: Any, cores: Sequence[NeuronCore], dim: int, *, dynamic: bool = True, warn: Callable[[str], None] | None = None
) -> PlacedModel:
    """Load the model onto cores, with dynamic batching if `dynamic` is True and the model supports it.

    If the model does not support it, call `warn` with the reason.

    Raises:
        ShardError: If `dim` is not a dim of the model's inputs.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        msg = f"dim={dim!r} is not an integer. Give one, such as dim=0"
        raise ShardError(msg)
    _refuse_out_of_range(model, dim)
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


def _refuse_out_of_range(model: Any, dim: int) -> None:
    signature = runtime().signature(model)
    most = max((len(spec.shape) for spec in signature.inputs), default=0) if signature is not None else None
    if most is not None and not -most <= dim < most:
        msg = f"dim={dim} is out of range: the model is compiled for inputs with at most {most} dims"
        raise ShardError(msg)


def open_session(
    model: Any,
    cores: Sequence[NeuronCore],
    dim: int,
    cutter_of: Callable[[Sizes], Mapping[str | None, Cutter]],
    joining: Joining,
) -> Session:
    """Return a session that loads the model onto the cores, and frees them when it is closed.

    It does not warn if dynamic batching is off. A call that needs it raises ShapeError with the reason.
    """
    placed = place(model, cores, dim)
    batching = Batching.of(placed, dim)
    workers = WORKERS_PER_CORE * len(cores)
    return open_on_cores(placed, batching, workers, cutters=cutter_of(batching.cut), owns_placed=True, **joining)

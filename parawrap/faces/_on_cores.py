"""What the faces have in common on NeuronCores: which cores are meant, and how a model comes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from parawrap.backends.neuron import NeuronCore, resolve_cores, runtime
from parawrap.engine.neuron import Batching, NeuronSession, PlacedModel
from parawrap.errors import ShapeError, ShardError
from parawrap.faces._arguments import Joining
from parawrap.shards import Cutter, Sizes

__all__ = ["WORKERS_PER_CORE", "cores_of", "open_session", "place"]

WORKERS_PER_CORE = 2
"""One runs while the other one's input is brought over; also torch_neuronx.DataParallel's default of num_workers."""


def cores_of(devices: Any) -> tuple[NeuronCore, ...]:
    """The cores that `devices` names; None and a kind are all that this process has.

    Raises:
        DeviceListError: empty, with a duplicate, or with an entry that is no core.
        DeviceUnavailableError: a core that this process does not have, or no runtime.
    """
    return resolve_cores(devices, runtime().core_count())


def place(
    model: Any, cores: Sequence[NeuronCore], dim: int, *, dynamic: bool = True, tell: Callable[[str], None] | None = None
) -> PlacedModel:
    """The model on these cores: with dynamic batching, if that is wanted and can be had; `tell` is told why it cannot.

    Raises:
        ShardError: `dim` is no dim of the model's inputs.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        msg = f"dim={dim!r} is no dim: give a whole number, as in dim=0"
        raise ShardError(msg)
    _refuse_out_of_range(model, dim)
    why_not = None
    if dynamic and dim == 0:
        try:
            return PlacedModel(model, cores, dynamic=True)
        except ShapeError as error:
            why_not = str(error)
    elif dynamic:
        why_not = f"dynamic batching is off, since dim={dim}: it works on dim 0 alone"
    if why_not is not None and tell is not None:
        tell(why_not)
    return PlacedModel(model, cores, dynamic=False)


def _refuse_out_of_range(model: Any, dim: int) -> None:
    signature = runtime().signature(model)
    most = max((len(spec.shape) for spec in signature.inputs), default=0) if signature is not None else None
    if most is not None and not -most <= dim < most:
        msg = f"dim={dim} is out of range: the model is compiled for inputs of {most} dimensions at the most"
        raise ShardError(msg)


def open_session(
    model: Any,
    cores: Sequence[NeuronCore],
    dim: int,
    cutter_of: Callable[[Sizes], Mapping[str | None, Cutter]],
    joining: Joining,
) -> NeuronSession:
    """A session that loads the model onto the cores and frees them when it is closed.

    Without a word where dynamic batching is off: who names another dim knows, and a call of another size is told why.
    """
    placed = place(model, cores, dim)
    batching = Batching.of(placed, dim)
    workers = WORKERS_PER_CORE * len(cores)
    return NeuronSession(placed, batching, workers, cutters=cutter_of(batching.cut), owns_placed=True, **joining)

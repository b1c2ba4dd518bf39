"""Models that get no replicas: on several devices, with CUDA graphs, or with shared modules."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parawrap._private_names import BUFFERS, PARAMETERS, is_compiled_module, uses_cuda_graphs
from parawrap.engine.replica import Replica
from parawrap.engine.survey import Survey, home_of_target
from parawrap.errors import ReplicaError


def home_of(module: torch.nn.Module) -> torch.device | None:
    """Return the one device that the tensors of a module are on; None for a module without tensors.

    Raises:
        ReplicaError: If they are on several devices. The message names two of them.
    """
    home = home_of_target(module)
    refuse_devices(Survey(module), home)
    return home


def refuse_devices(survey: Survey, home: torch.device | None) -> None:
    """Refuse a model on several devices, or on the meta device. `home` is that of its first tensor.

    Raises:
        ReplicaError: If so.
    """
    if home is None:
        return
    # Parameters and buffers alone, which ``model.to(...)`` moves: another tensor may lie where the
    # user's code needs it
    registered = []
    for tensor in (*survey.params, *survey.tensors):
        kinds = {place.kind for place in survey.places_of(tensor)}
        if not kinds.isdisjoint((PARAMETERS, BUFFERS)):
            registered.append(tensor)
    first = survey.path_of(registered[0]) if registered else ""
    for tensor in registered:
        if tensor.device != home:
            other = survey.path_of(tensor)
            msg = (
                f"the model lies on several devices: {first!r} on {home} and {other!r} on "
                f"{tensor.device}. A replica of it would need as many devices again; put the model "
                "on one device, or make its parts parallel one by one"
            )
            raise ReplicaError(msg)
    if home.type == "meta":
        msg = f"no replica can be made: {first!r} is on the meta device and has no data to copy"
        raise ReplicaError(msg)


def refuse_shared_modules(survey: Survey, replicas: Sequence[Replica]) -> None:
    """Refuse a module with a ``__deepcopy__`` that returned one module for two lanes.

    Raises:
        ReplicaError: If there is one.
    """
    first, *others = replicas
    for other in others:
        for module in survey.modules:
            if first.of(module) is other.of(module):
                msg = (
                    f"no replica of {survey.path_of(module)!r} can be made: its copies for two "
                    "lanes are one module. Let its __deepcopy__ copy all attributes with "
                    "copy.deepcopy(value, memo), or remove the method"
                )
                raise ReplicaError(msg)


def refuse_cuda_graphs(survey: Survey, devices: Sequence[torch.device]) -> None:
    """Refuse a model that torch.compile runs as CUDA graphs, which torch keeps for one thread.

    Raises:
        ReplicaError: If so.
    """
    if devices[0].type != "cuda":  # the devices of a block are of one type
        return
    for module in survey.modules:
        if is_compiled_module(module) and uses_cuda_graphs(module):
            msg = (
                f"{survey.path_of(module)!r} is compiled to run as CUDA graphs, which only one "
                "thread can use, and each lane has its own. Compile it with torch.compile(model), "
                'or with mode="max-autotune-no-cudagraphs"'
            )
            raise ReplicaError(msg)

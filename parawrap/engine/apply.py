"""Run tasks in lanes, for `parallel_apply` and `Calls.apply`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parawrap._private_names import profiler_runs
from parawrap.backends import device_of, record_use
from parawrap.engine.device_streams import moments_of
from parawrap.engine.lane_errors import raise_first_failure
from parawrap.engine.lanes import Lanes, Turns
from parawrap.tree import flatten


def apply_tasks(
    lanes: Lanes,
    tasks: Sequence[Callable[[], Any]],
    leaves: Sequence[Any],
    turns: Turns = None,
    home: torch.device | None = None,
    output_device: torch.device | None = None,
) -> list[Any]:
    """Run task i in lane i, and return their values in lane order.

    `leaves` are the arguments of all tasks, and `home` is the device of the model. Without `turns`,
    tasks on one device take turns if an argument requires gradients.

    Raises:
        BaseException: If a lane fails: the error of the first such lane, with a note on lane and
            device. All other lanes have finished.
    """
    if turns is None:
        if torch.are_deterministic_algorithms_enabled() or profiler_runs():
            turns = "all"
        elif lanes.share_devices:
            tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
            learns = any(tensor.requires_grad for tensor in tensors)
            turns = "device" if learns else None
    devices = [lane.device for lane in lanes.all[: len(tasks)]]
    moments = moments_of(devices, (home, output_device, *map(device_of, leaves)))
    # Tasks that take turns draw in order, which needs no warning
    generators = lanes.read_generators() if turns is None else None
    outputs, errors = lanes.run(tasks, turns, home, moments)
    if errors:
        raise_first_failure(errors, len(tasks), lanes.all)
    if generators is not None:
        lanes.warn_of_draws(generators)
    if moments:
        # Lanes have made them on their streams. The caller's stream reads them from here on
        record_use(flatten(outputs)[0])
    return outputs

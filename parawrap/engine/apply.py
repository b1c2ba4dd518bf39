"""Run tasks in lanes, and raise the error of the first lane that failed."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from parawrap._private_names import profiler_runs
from parawrap.backends import device_of, record_use
from parawrap.engine.device_streams import moments_of
from parawrap.engine.lanes import Lanes
from parawrap.errors import add_note
from parawrap.tree import flatten


def apply_tasks(
    lanes: Lanes,
    tasks: Sequence[Callable[[], Any]],
    leaves: Sequence[Any],
    turns: str | None = None,
    home: torch.device | None = None,
    output_device: torch.device | None = None,
) -> list[Any]:
    """Run task i in lane i, and return their values in lane order.

    `leaves` are the arguments of all tasks. Lanes that share a device run in turns if one of them
    requires gradients.

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
    # Lanes that run one after another draw in order, which needs no warning
    generators = lanes.read_generators() if turns is None else None
    outputs, errors = lanes.run(tasks, turns, home, moments)
    if errors:
        raise_first_failure(errors, len(tasks), lanes.all)
    if generators is not None:
        lanes.warn_of_draws(generators)
    if moments:  # made on the lanes' streams, and read on the caller's from here on
        record_use(flatten(outputs)[0])
    return outputs


def raise_first_failure(
    errors: list[tuple[int, BaseException]],
    count: int,
    lanes: Sequence[object],
    describe: Callable[[int], str] | None = None,
) -> NoReturn:
    """Raise the error of the first lane that failed, with notes on its place and on other errors.

    `describe` returns the contents of a shard for the first note. An interrupt or an exit comes
    before any error, because no task failed with it. The list is emptied: the traceback holds
    frames that hold it, and a cycle would keep the tensors.
    """
    errors.sort(key=_order_of_failure)
    (shard, first), *others = errors
    errors.clear()
    place = f"in {lanes[shard % len(lanes)]}, shard {shard} of {count}"
    add_note(first, place if describe is None else f"{place}: {describe(shard)}")
    for index, other in others:
        # Lanes may raise one object, such as an error that the model keeps
        if other is not first:
            # It has a text also if the `__str__` of the error fails
            text = "".join(traceback.format_exception_only(other)).strip()
            place = f"in {lanes[index % len(lanes)]}, shard {index} of {count}"
            add_note(first, f"also {place}: {text}")
    try:
        raise first
    finally:
        del first, others  # the traceback holds this frame


def note_fixed_devices(
    errors: Sequence[tuple[int, BaseException]],
    home: torch.device | None,
    devices: Sequence[torch.device],
) -> None:
    """Add the cure to torch's error about tensors on two devices, in a lane away from the model."""
    for shard, error in errors:
        device = devices[shard % len(devices)]
        is_away = home is not None and device != home
        # torch has no class for this error
        is_of_devices = isinstance(error, RuntimeError) and "device" in str(error)
        if is_away and is_of_devices:
            add_note(
                error,
                f"the lane works on {device}, and the model lies on {home}. In forward, make "
                "tensors on the device of an argument (device=x.device), not on a device that is "
                "kept in an attribute, and register constant tensors as buffers",
            )


def _order_of_failure(failure: tuple[int, BaseException]) -> tuple[bool, int]:
    """Return a key that sorts interrupts and exits first, and then by shard."""
    shard, error = failure
    return isinstance(error, Exception), shard

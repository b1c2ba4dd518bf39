"""The error that a call raises if lanes fail: that of the first lane, with notes on its place."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch

from parawrap.errors import add_note


def raise_first_failure(
    errors: list[tuple[int, BaseException]],
    count: int,
    lanes: Sequence[object],
    describe: Callable[[int], str] | None = None,
) -> NoReturn:
    """Raise the error of the first lane that failed, with notes on its place and on other errors.

    `errors` has shards and their errors, and is emptied. `count` is the number of shards, and
    `describe` returns the rows of a shard. An interrupt or an exit comes before all errors, since
    it is not a failure of the model.
    """
    errors.sort(key=_order_of_failure)
    (shard, first), *others = errors
    # A frame in the traceback of the error holds the list: a cycle, which would keep the tensors
    errors.clear()
    place = f"in {lanes[shard % len(lanes)]}, shard {shard} of {count}"
    add_note(first, place if describe is None else f"{place}: {describe(shard)}")
    for index, other in others:
        if other is first:  # lanes may raise one object, such as an error that the model keeps
            continue
        # Not by `str`: the `__str__` of a user's error may fail
        text = "".join(traceback.format_exception_only(other)).strip()
        place = f"in {lanes[index % len(lanes)]}, shard {index} of {count}"
        add_note(first, f"also {place}: {text}")
    try:
        raise first
    finally:
        del first, others  # their tracebacks hold this frame: a cycle


def note_fixed_devices(
    errors: Sequence[tuple[int, BaseException]],
    home: torch.device | None,
    devices: Sequence[torch.device],
) -> None:
    """Add a cure to torch's errors about tensors on two devices, if the lane is not at `home`."""
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

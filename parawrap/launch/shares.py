"""The shares of a machine that launches which run on it at the same time have."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from parawrap.backends.cores import usable_cores
from parawrap.launch._devices import Device, count_visible
from parawrap.launch._platform_fields import PlatformFields

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"


@dataclass(frozen=True)
class CoreShare:
    """The cores of one launch.

    Attributes:
        count: The number of cores that the operators of all its ranks use together.
        pinned: The cores that its ranks are pinned to; empty if they run on any.
    """

    count: int
    pinned: tuple[int, ...] = ()

    def pin(self) -> None:
        """Pin this thread, and the threads and processes that it starts, to the cores."""
        if self.pinned:
            os.sched_setaffinity(0, self.pinned)


class Share(NamedTuple):
    """The platform with the devices of one of several launches, and the cores of the launch."""

    platform: PlatformFields
    cores: CoreShare


def share_out(platform: PlatformFields, launches: int) -> list[Share]:
    """Divide the devices and the cores of this machine among launches of a platform.

    Launches have different accelerators: there are fewer shares than launches if the devices do
    not suffice. On the CPU, launches have different cores if there are enough. Launches on
    accelerators may run on all cores, since some cores are near one device and some near another.
    """
    platforms = [platform] * launches
    if platform.device != Device.CPU:
        platforms = [
            replace(platform, device_ids=ids) for ids in _share_devices(platform)[:launches]
        ]
        # Without a share, because a variable hides the devices by now, one launch is tried. It
        # raises the error that names what is missing
        platforms = platforms or [platform]
    number = len(platforms)
    count = max(1, usable_cores() // number)  # with fewer cores than launches, they share them
    pinned: list[tuple[int, ...]] = [()] * number
    can_pin = hasattr(os, "sched_setaffinity")  # not on macOS
    if platform.device == Device.CPU and can_pin:
        pinned = _divide(_cores_by_place(), number)
    return [
        Share(each, CoreShare(count, cores)) for each, cores in zip(platforms, pinned, strict=True)
    ]


def _share_devices(platform: PlatformFields) -> list[tuple[int, ...]]:
    """Return the devices of each launch that may run at the same time.

    A device that `device_ids` names twice is in two shares.
    """
    left = list(range(count_visible(Device(platform.device))))
    if platform.device_ids is not None:
        left = list(platform.device_ids)
    shares = []
    size = platform.ranks_per_node
    while len(set(left)) >= size:
        different = dict.fromkeys(left)  # in order, unlike a set
        share = tuple(different)[:size]
        for device in share:
            left.remove(device)
        shares.append(share)
    return shares


def _divide(cores: list[int], number: int) -> list[tuple[int, ...]]:
    """Return neighboring cores for each of a number of launches.

    No launch is pinned if there are fewer cores than launches.
    """
    if len(cores) < number:
        return [()] * number
    # Parts of nearly equal size: a remainder is spread over all of them
    ends = [len(cores) * each // number for each in range(number + 1)]
    return [tuple(cores[begin:end]) for begin, end in pairwise(ends)]


def _cores_by_place() -> list[int]:
    """Return the cores that this process may run on, so that close ones are neighbors.

    Two hardware threads of one core have distant numbers on many machines.
    """
    return sorted(os.sched_getaffinity(0), key=_place_of)


def _place_of(core: int) -> tuple[int, int, int]:
    try:
        package = _read_topology(core, "physical_package_id")
        number = _read_topology(core, "core_id")
    except (OSError, ValueError):  # a container without /sys, or an architecture without packages
        return 0, core, core
    return package, number, core


def _read_topology(core: int, name: str) -> int:
    return int(Path(_TOPOLOGY.format(core, name)).read_text())

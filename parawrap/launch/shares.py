"""Divide the devices and cores of this machine among launches that run at the same time."""

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
    """The share of one launch: the platform with its devices, and its cores."""

    platform: PlatformFields
    cores: CoreShare


def share_out(platform: PlatformFields, launches: int) -> list[Share]:
    """Divide the devices and the cores of this machine among launches of a platform.

    Each share has its own accelerators: there are fewer shares than launches if the devices do not
    suffice. On the CPU, each share has its own cores if there are enough. Launches on accelerators
    may run on all cores, because the cores near a device are not known.
    """
    platforms = [platform] * launches
    if platform.device != Device.CPU:
        shares = _share_devices(platform)[:launches]
        platforms = [replace(platform, device_ids=devices) for devices in shares]
        # Empty if a variable that was set since hides the devices: the launch then raises the error
        # that names it
        platforms = platforms or [platform]
    number = len(platforms)
    count = max(1, usable_cores() // number)  # launches share cores if there are fewer
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
    if platform.device_ids is None:
        left = list(range(count_visible(platform.device)))
    else:
        left = list(platform.device_ids)
    shares = []
    size = platform.ranks_per_node  # 0 if all devices are used, and a variable hides them now
    while left and len(set(left)) >= size:
        different = dict.fromkeys(left)  # in order, unlike a set
        share = tuple(different)[:size]
        for device in share:
            left.remove(device)
        shares.append(share)
    return shares


def _divide(cores: list[int], number: int) -> list[tuple[int, ...]]:
    """Divide cores among a number of launches, so that each gets neighbors in the list.

    With fewer cores than launches, no launch gets any, and none is pinned.
    """
    if len(cores) < number:
        return [()] * number
    # Parts of nearly equal size: a remainder is spread over all of them
    ends = [len(cores) * each // number for each in range(number + 1)]
    return [tuple(cores[begin:end]) for begin, end in pairwise(ends)]


def _cores_by_place() -> list[int]:
    """Return the cores that this process may run on, ordered by their place in the machine.

    The two hardware threads of a core are neighbors then. Their numbers are often far apart.
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

"""The NeuronCores of this process, as users name them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from parawrap.backends import CORE_KINDS
from parawrap.errors import DeviceListError, DeviceUnavailableError

_ADVICE = "Set NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES to allocate more cores"


@dataclass(frozen=True, order=True, slots=True)
class NeuronCore:
    """A core, by its index within the process. ``str(NeuronCore(0))`` is "nc:0"."""

    index: int

    def __str__(self) -> str:
        return f"nc:{self.index}"


def resolve_cores(devices: Any, visible: int) -> tuple[NeuronCore, ...]:
    """Return the cores that `devices` names.

    Args:
        devices: An index, or "nc:#", counted from zero within the process; a sequence of these;
            or None or "nc" for all cores.
        visible: The number of cores of this process.

    Raises:
        DeviceListError: If `devices` is empty, names a core twice, or has an entry that is not a
            core.
        DeviceUnavailableError: If the process does not have a named core. The message lists the
            cores that it has.
    """
    is_kind = isinstance(devices, str) and devices.lower() in CORE_KINDS
    if devices is None or is_kind:
        if visible == 0:
            msg = f"no NeuronCore is allocated to this process. {_ADVICE}"
            raise DeviceUnavailableError(msg)
        return tuple(map(NeuronCore, range(visible)))
    is_single = isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable)
    entries = [devices] if is_single else list(devices)
    if not entries:
        msg = (
            "the list of NeuronCores is empty: give at least one index or 'nc:#', or omit the list "
            "to use all cores"
        )
        raise DeviceListError(msg)
    cores = tuple(NeuronCore(_read_index(entry)) for entry in entries)
    repeated = [core for position, core in enumerate(cores) if core in cores[:position]]
    if repeated:
        shown = [*map(str, cores)]
        msg = (
            f"{repeated[0]} is named twice in {shown}, but a core holds one replica. Name "
            "each core once; num_workers of parawrap.neuron.DataParallel sets the number of threads"
        )
        raise DeviceListError(msg)
    missing = [core for core in cores if core.index >= visible]
    if missing:
        seen = "no NeuronCore"
        if visible == 1:
            seen = "only nc:0"
        elif visible > 1:
            seen = f"nc:0 to nc:{visible - 1}"
        msg = (
            f"'{missing[0]}' is not available: this process sees {seen}, counted from zero within "
            f"the process. {_ADVICE}"
        )
        raise DeviceUnavailableError(msg)
    return cores


def find_runs(cores: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive cores, each as (first core, length).

    >>> find_runs([0, 1, 2, 5, 7, 6])
    [(0, 3), (5, 3)]
    """
    runs: list[tuple[int, int]] = []
    first = length = 0
    for core in sorted(cores):
        if runs and core == first + length:
            length += 1
            runs[-1] = (first, length)
        else:
            first, length = core, 1
            runs.append((first, length))
    return runs


def _read_index(entry: Any) -> int:
    """Return the index of the core that an entry names.

    Raises:
        DeviceListError: If it names no core.
    """
    if isinstance(entry, NeuronCore):
        return entry.index
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    if isinstance(entry, str):
        kind, _, index = entry.partition(":")
        # `isdecimal` is true for the digits of other scripts too
        if kind.lower() in CORE_KINDS and index.isascii() and index.isdecimal():
            return int(index)
    # The repr of a torch.device does not look like an entry of the list
    shown = str(entry) if isinstance(entry, torch.device) else repr(entry)
    msg = (
        f"{shown} is not a NeuronCore: give an index or 'nc:#', counted from zero within the "
        "process, as in 'nc:0'"
    )
    raise DeviceListError(msg)

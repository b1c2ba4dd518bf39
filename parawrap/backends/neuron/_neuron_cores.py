"""Names of NeuronCores: parse the user's list of cores, and the cores that the environment allocates to this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parawrap.backends._backend_registry import CORE_KINDS
from parawrap.errors import DeviceListError, DeviceUnavailableError

__all__ = ["NeuronCore", "cores_given", "resolve_cores"]

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_ADVICE = "Set NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES to allocate more cores"


@dataclass(frozen=True, order=True, slots=True)
class NeuronCore:
    """One core, by its index within the process. ``str(NeuronCore(0))`` is "nc:0"."""

    index: int

    def __str__(self) -> str:
        return f"nc:{self.index}"


def resolve_cores(devices: Any, visible: int) -> tuple[NeuronCore, ...]:
    """Return the cores that `devices` names, out of the first `visible` cores of this process. None means all of them.

    An entry is an index or "nc:#", counted from zero within the process.

    Raises:
        DeviceListError: If `devices` is empty, names a core twice, or has an entry that is not a core.
        DeviceUnavailableError: If the process does not have a named core. The message lists the cores that it has.
    """
    if devices is None or devices in CORE_KINDS:
        if visible == 0:
            msg = f"no NeuronCore is allocated to this process. {_ADVICE}"
            raise DeviceUnavailableError(msg)
        return tuple(map(NeuronCore, range(visible)))
    entries = [devices] if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable) else list(devices)
    if not entries:
        msg = "the list of NeuronCores is empty: give at least one index or 'nc:#', or omit the list to use all cores"
        raise DeviceListError(msg)
    cores = tuple(NeuronCore(_index(entry)) for entry in entries)
    twice = [core for place, core in enumerate(cores) if core in cores[:place]]
    if twice:
        msg = (
            f"{twice[0]} is named twice in {[str(core) for core in cores]}, but a core holds one replica. Name each core "
            "once; num_workers of parawrap.neuron.DataParallel sets the number of threads per core"
        )
        raise DeviceListError(msg)
    for core in cores:
        if core.index >= visible:
            raise DeviceUnavailableError(_unavailable(core, visible))
    return cores


def cores_given(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the number of NeuronCores that the environment allocates to this process; None if it sets none.

    NEURON_RT_VISIBLE_CORES ("0-6", "3", "0,2-4") takes precedence over NEURON_RT_NUM_CORES (a number), as in the Neuron
    runtime (https://awsdocs-neuron.readthedocs-hosted.com, "NeuronX Runtime Configuration").

    Raises:
        DeviceListError: If one of the variables is malformed.

    >>> cores_given({"NEURON_RT_VISIBLE_CORES": "0,2-4"}), cores_given({"NEURON_RT_NUM_CORES": "8"}), cores_given({})
    (4, 8, None)
    """
    numbers = core_numbers_given(environ)
    return None if numbers is None else len(numbers)


def core_numbers_given(environ: Mapping[str, str] | None = None) -> list[int] | None:
    """Return the numbers, on this machine, of the NeuronCores that the environment allocates; None if it sets none.

    Raises:
        DeviceListError: If one of the variables is malformed.

    >>> core_numbers_given({"NEURON_RT_VISIBLE_CORES": "0,2-4"}), core_numbers_given({"NEURON_RT_NUM_CORES": "2"})
    ([0, 2, 3, 4], [0, 1])
    """
    environ = os.environ if environ is None else environ
    listed = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if listed:
        return [core for span in _listed(listed) for core in span]
    number = environ.get("NEURON_RT_NUM_CORES", "").strip()
    if not number:
        return None
    if not number.isdecimal():
        msg = f"NEURON_RT_NUM_CORES={number!r} is not a number of cores. Use NEURON_RT_NUM_CORES=2, or 0 for all"
        raise DeviceListError(msg)
    return list(range(int(number))) or None


def _listed(listed: str) -> list[range]:
    spans: list[range] = []
    for part in listed.split(","):
        span = _span(part.strip())
        why = "is neither a core nor a range" if span is None else "runs backwards" if not span else ""
        if span and any(max(span.start, other.start) < min(span.stop, other.stop) for other in spans):
            why = "repeats a core"
        if why or span is None:
            msg = (
                f"NEURON_RT_VISIBLE_CORES={listed!r}: {part.strip()!r} {why}. List cores and ranges, each core once, as in "
                "'0-6', '3' or '0,2-4'"
            )
            raise DeviceListError(msg)
        spans.append(span)
    return spans


def _span(part: str) -> range | None:
    """Parse "3" or "0-6" into a range, empty if it runs backwards; None if `part` is neither a core nor a range."""
    found = _SPAN.fullmatch(part)
    return None if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)


def _index(entry: Any) -> int:
    """Return the index that one entry of a list names."""
    entry = entry.index if isinstance(entry, NeuronCore) else entry
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    if isinstance(entry, str):
        kind, _, index = entry.partition(":")
        if kind in CORE_KINDS and index.isascii() and index.isdecimal():
            return int(index)
    shown = str(entry) if isinstance(entry, torch.device) else repr(entry)
    msg = f"{shown} is not a NeuronCore: give an index or 'nc:#', counted from zero within the process, as in 'nc:0'"
    raise DeviceListError(msg)


def _unavailable(core: NeuronCore, visible: int) -> str:
    seen = f"nc:0 to nc:{visible - 1}" if visible > 1 else "only nc:0" if visible else "no NeuronCore"
    return f"{str(core)!r} is not available: this process sees {seen}, counted from zero within the process. {_ADVICE}"

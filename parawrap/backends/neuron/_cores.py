"""The names of NeuronCores: what a user writes, and what the environment gives to this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parawrap.backends._registry import CORE_KINDS
from parawrap.errors import DeviceListError, DeviceUnavailableError

__all__ = ["NeuronCore", "cores_given", "resolve_cores"]

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, order=True, slots=True)
class NeuronCore:
    """One core, by its index within the process; ``str`` gives "nc:0"."""

    index: int

    def __str__(self) -> str:
        return f"nc:{self.index}"


def resolve_cores(devices: Any, visible: int) -> tuple[NeuronCore, ...]:
    """The cores that `devices` names, of the `visible` ones that this process has; None is all of them.

    An entry is an index or "nc:#", zero-based within the process.

    Raises:
        DeviceListError: empty, with a duplicate, or with an entry that is no core.
        DeviceUnavailableError: a core that this process does not have; the message says which it has.
    """
    if devices is None or devices in CORE_KINDS:
        if visible == 0:
            msg = f"no NeuronCore is allocated to this process: {_cure()}"
            raise DeviceUnavailableError(msg)
        return tuple(map(NeuronCore, range(visible)))
    entries = [devices] if isinstance(devices, (str, bytes)) or not isinstance(devices, Iterable) else list(devices)
    if not entries:
        msg = "no NeuronCore is named: give at least one index or 'nc:#', or leave the list out to take all of them"
        raise DeviceListError(msg)
    cores = tuple(NeuronCore(_index(entry)) for entry in entries)
    twice = [core for place, core in enumerate(cores) if core in cores[:place]]
    if twice:
        msg = (
            f"{twice[0]} is named twice in {[str(core) for core in cores]}: a core holds one replica, which two workers "
            "keep busy already (num_workers of parawrap.neuron.DataParallel sets how many)"
        )
        raise DeviceListError(msg)
    for core in cores:
        if core.index >= visible:
            raise DeviceUnavailableError(_not_there(core, visible))
    return cores


def cores_given(environ: Mapping[str, str] | None = None) -> int | None:
    """How many NeuronCores the environment gives to this process; None where it does not say.

    NEURON_RT_VISIBLE_CORES ("0-6", "3", "0,2-4") goes before NEURON_RT_NUM_CORES (a number), as in the Neuron runtime
    (https://awsdocs-neuron.readthedocs-hosted.com, "NeuronX Runtime Configuration").

    Raises:
        DeviceListError: one of them is malformed.

    >>> cores_given({"NEURON_RT_VISIBLE_CORES": "0,2-4"}), cores_given({"NEURON_RT_NUM_CORES": "8"}), cores_given({})
    (4, 8, None)
    """
    numbers = core_numbers_given(environ)
    return None if numbers is None else len(numbers)


def core_numbers_given(environ: Mapping[str, str] | None = None) -> list[int] | None:
    """Return the machine's numbers of the NeuronCores that the environment gives to this process; None if it gives none.

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
        msg = f"NEURON_RT_NUM_CORES={number!r} is no number of cores: give one, as in NEURON_RT_NUM_CORES=2, or 0 for all"
        raise DeviceListError(msg)
    return list(range(int(number))) or None


def _listed(listed: str) -> list[range]:
    spans: list[range] = []
    for part in listed.split(","):
        span = _span(part.strip())
        why = "is no core and no range" if span is None else "runs backwards" if not span else ""
        if span and any(max(span.start, other.start) < min(span.stop, other.stop) for other in spans):
            why = "names a core again"
        if why or span is None:
            msg = (
                f"NEURON_RT_VISIBLE_CORES={listed!r}: {part.strip()!r} {why}; give cores and ranges, each core once, as in "
                "'0-6', '3' or '0,2-4'"
            )
            raise DeviceListError(msg)
        spans.append(span)
    return spans


def _span(part: str) -> range | None:
    """The cores of "3" or "0-6", none of them for a range that runs backwards; None for what is neither."""
    found = _SPAN.fullmatch(part)
    return None if found is None else range(int(found[1]), int(found[2] or found[1]) + 1)


def _index(entry: Any) -> int:
    """The index that one entry of a list names."""
    entry = entry.index if isinstance(entry, NeuronCore) else entry
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    if isinstance(entry, str):
        kind, _, index = entry.partition(":")
        if kind in CORE_KINDS and index.isascii() and index.isdecimal():
            return int(index)
    shown = str(entry) if isinstance(entry, torch.device) else repr(entry)
    msg = f"{shown} is no NeuronCore: give an index or 'nc:#', counted from zero within the process, as in 'nc:0'"
    raise DeviceListError(msg)


def _not_there(core: NeuronCore, visible: int) -> str:
    seen = f"nc:0 to nc:{visible - 1}" if visible > 1 else "nc:0 alone" if visible else "no NeuronCore"
    return f"{str(core)!r} is not there: this process sees {seen}, counted from zero within the process; {_cure()}"


def _cure() -> str:
    return "NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES allocates more to it"

"""The NeuronCores of this process: read the user's list, the environment, and the vendor's `neuron-ls`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from parawrap.backends import CORE_KINDS
from parawrap.errors import DeviceListError, DeviceUnavailableError

EMULATED_CORES = 2
"""The number of emulated cores, unless the environment sets another: an inf2.xlarge has two."""

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_LS_FOLDER = "/opt/aws/neuron/bin"  # of aws-neuronx-tools; often not on PATH
_LS_TIMEOUT_S = 60.0  # a guess: the tool prints within a second
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
    cores = tuple(NeuronCore(_read_index(entry)) for entry in entries)
    twice = [core for place, core in enumerate(cores) if core in cores[:place]]
    if twice:
        msg = (
            f"{twice[0]} is named twice in {[str(core) for core in cores]}, but a core holds one replica. Name each core "
            "once; num_workers of parawrap.neuron.DataParallel sets the number of threads"
        )
        raise DeviceListError(msg)
    missing = [core for core in cores if core.index >= visible]
    if missing:
        seen = f"nc:0 to nc:{visible - 1}" if visible > 1 else "only nc:0" if visible else "no NeuronCore"
        msg = f"'{missing[0]}' is not available: this process sees {seen}, counted from zero within the process. {_ADVICE}"
        raise DeviceUnavailableError(msg)
    return cores


def read_core_numbers(environ: Mapping[str, str] | None = None) -> list[int] | None:
    """Return the numbers, on this machine, of the NeuronCores that the environment allocates; None if it sets none.

    NEURON_RT_VISIBLE_CORES ("0-6", "3", "0,2-4") takes precedence over NEURON_RT_NUM_CORES (a number), as in the Neuron
    runtime (https://awsdocs-neuron.readthedocs-hosted.com, "NeuronX Runtime Configuration").

    Raises:
        DeviceListError: If one of the variables is malformed.

    >>> read_core_numbers({"NEURON_RT_VISIBLE_CORES": "0,2-4"}), read_core_numbers({"NEURON_RT_NUM_CORES": "2"})
    ([0, 2, 3, 4], [0, 1])
    """
    environ = os.environ if environ is None else environ
    listed = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if listed:
        return _read_spans(listed)
    number = environ.get("NEURON_RT_NUM_CORES", "").strip()
    if not number:
        return None
    if not number.isdecimal():
        msg = f"NEURON_RT_NUM_CORES={number!r} is not a number of cores. Use NEURON_RT_NUM_CORES=2, or 0 for all"
        raise DeviceListError(msg)
    return list(range(int(number))) or None


def count_listed_cores() -> int:
    """Count the NeuronCores of the machine.

    The count is the sum of ``nc_count`` over the devices in ``neuron-ls --json-output`` ("Neuron LS User Guide"). On Trn2
    these are logical cores: a process numbers its cores by them.

    Raises:
        DeviceUnavailableError: If `neuron-ls` is not found, fails, or prints something else.
    """
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_LS_FOLDER) or "neuron-ls"
    try:
        ended = subprocess.run([tool, "--json-output"], capture_output=True, text=True, timeout=_LS_TIMEOUT_S, check=True)
        return sum(int(device["nc_count"]) for device in json.loads(ended.stdout))
    except (OSError, subprocess.SubprocessError, KeyError, TypeError, ValueError) as error:
        msg = (
            f"the number of NeuronCores of this process is unknown: {tool} --json-output gave no list of devices with an "
            f"nc_count each ({getattr(error, 'stderr', None) or error}). Set NEURON_RT_NUM_CORES or "
            f"NEURON_RT_VISIBLE_CORES, or install aws-neuronx-tools, which has neuron-ls in {_LS_FOLDER}"
        )
        raise DeviceUnavailableError(msg) from error


def find_runs(cores: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive cores, each as (first core, length). A runtime loads one run per call.

    >>> find_runs([0, 1, 2, 5, 7, 6])
    [(0, 3), (5, 3)]
    """
    runs: list[tuple[int, int]] = []
    for core in sorted(cores):
        if runs and core == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((core, 1))
    return runs


def _read_spans(listed: str) -> list[int]:
    """Return the cores in "0,2-4"."""
    cores: list[int] = []
    for part in listed.split(","):
        span = _SPAN.fullmatch(part.strip())
        found = range(int(span[1]), int(span[2] or span[1]) + 1) if span else ()
        if not found or not set(found).isdisjoint(cores):
            msg = (
                f"NEURON_RT_VISIBLE_CORES={listed!r}: {part.strip()!r} is neither a core nor a range of further cores. "
                "List cores and ranges, each core once, as in '0-6', '3' or '0,2-4'"
            )
            raise DeviceListError(msg)
        cores += found
    return cores


def _read_index(entry: Any) -> int:
    """Return the index that one entry of a list names."""
    entry = entry.index if isinstance(entry, NeuronCore) else entry
    if isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
        return entry
    if isinstance(entry, str):
        kind, _, index = entry.partition(":")
        if kind.lower() in CORE_KINDS and index.isascii() and index.isdecimal():
            return int(index)
    shown = str(entry) if isinstance(entry, torch.device) else repr(entry)
    msg = f"{shown} is not a NeuronCore: give an index or 'nc:#', counted from zero within the process, as in 'nc:0'"
    raise DeviceListError(msg)

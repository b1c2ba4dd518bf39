"""Tell the two generations of torch_neuronx apart, and count the NeuronCores of this process.

Two packages of different generations have this name:

generation | machines         | offers                                    | used by
---------- | ---------------- | ----------------------------------------- | ----------------------
older      | inf2, trn1, trn2 | ``trace``, which compiles a model; it     | `parawrap.neuroncores`
           |                  | builds on torch_xla                       |
newer      | trn2, trn3       | a torch device of kind "neuron"           | `Backend`, as for CUDA
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from parawrap.backends._backend_registry import is_torch_device
from parawrap.errors import DeviceListError, DeviceUnavailableError

EMULATED_CORES = 2
"""The number of emulated cores, unless the environment sets another: an inf2.xlarge has two."""

_SPAN = re.compile(r"(?P<first>\d+)(?:-(?P<last>\d+))?")  # such as "3" or "2-4"
_LS_FOLDER = "/opt/aws/neuron/bin"  # of aws-neuronx-tools; often not on PATH
_LS_TIMEOUT_S = 60.0  # a guess: the tool prints within a second

overriding_runtimes: list[Any] = []
"""The runtimes of open blocks of `parawrap.testing.neuron_host`. The last one is in effect."""


def neuron_is_device() -> bool:
    """True if "neuron" names torch devices; False if it names the cores of compiled models.

    Emulated cores take precedence, because PARAWRAP_NEURON_RUNTIME=host and
    `parawrap.testing.neuron_host` ask for them.
    """
    return is_torch_device("neuron") and not emulates_cores()


def neuron_runtime_name() -> str:
    """Return the value of PARAWRAP_NEURON_RUNTIME, empty if it is not set."""
    return os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip()


def emulates_cores() -> bool:
    """True if the environment, or a block of `parawrap.testing.neuron_host`, emulates cores."""
    return bool(overriding_runtimes) or neuron_runtime_name() == "host"


# -- the number of NeuronCores, from the environment and the vendor's `neuron-ls`


def read_core_numbers(environ: Mapping[str, str] | None = None) -> list[int] | None:
    """Return the numbers, on this machine, of the NeuronCores that the environment allocates.

    None if it allocates none, so that the process may use all. `environ` is the environment of the
    process by default.

    NEURON_RT_VISIBLE_CORES ("0-6", "3", "0,2-4") takes precedence over NEURON_RT_NUM_CORES (a
    number), as in the Neuron runtime (https://awsdocs-neuron.readthedocs-hosted.com, "NeuronX
    Runtime Configuration").

    Raises:
        DeviceListError: If one of the variables is malformed.

    >>> read_core_numbers({"NEURON_RT_VISIBLE_CORES": "0,2-4"})
    [0, 2, 3, 4]
    >>> read_core_numbers({"NEURON_RT_NUM_CORES": "2"})
    [0, 1]
    """
    if environ is None:
        environ = os.environ
    listed = environ.get("NEURON_RT_VISIBLE_CORES", "").strip()
    if listed:
        return _read_spans(listed)
    number = environ.get("NEURON_RT_NUM_CORES", "").strip()
    if not number:
        return None
    if not number.isdecimal():
        msg = (
            f"NEURON_RT_NUM_CORES={number!r} is not a number of cores. Use NEURON_RT_NUM_CORES=2, "
            "or 0 for all"
        )
        raise DeviceListError(msg)
    return list(range(int(number))) or None  # 0 stands for all cores


def count_listed_cores() -> int:
    """Count the NeuronCores of the machine.

    The count is the sum of ``nc_count`` over the devices in ``neuron-ls --json-output`` ("Neuron LS
    User Guide"). On Trn2 these are logical cores: a process numbers its cores by them.

    Raises:
        DeviceUnavailableError: If `neuron-ls` is not found, fails, or prints something else.
    """
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_LS_FOLDER)
    tool = tool or "neuron-ls"  # not found: `run` raises, and the message names it
    try:
        process = subprocess.run(
            [tool, "--json-output"],
            capture_output=True,
            text=True,
            timeout=_LS_TIMEOUT_S,
            check=True,
        )
        return sum(int(device["nc_count"]) for device in json.loads(process.stdout))
    except (OSError, subprocess.SubprocessError, KeyError, TypeError, ValueError) as error:
        reason = getattr(error, "stderr", None) or error
        msg = (
            f"the number of NeuronCores of this process is unknown: {tool} --json-output gave no "
            f"list of devices with an nc_count each ({reason}). Set NEURON_RT_NUM_CORES or "
            "NEURON_RT_VISIBLE_CORES, or install aws-neuronx-tools, which has neuron-ls in "
            f"{_LS_FOLDER}"
        )
        raise DeviceUnavailableError(msg) from error


def _read_spans(listed: str) -> list[int]:
    """Return the cores in "0,2-4"."""
    cores: list[int] = []
    for part in listed.split(","):
        span = _SPAN.fullmatch(part.strip())
        found = range(0)
        if span:
            first = int(span["first"])
            last = int(span["last"] or first)
            found = range(first, last + 1)  # of "4-2", no cores
        has_repeated = not set(found).isdisjoint(cores)
        if not found or has_repeated:
            msg = (
                f"NEURON_RT_VISIBLE_CORES={listed!r}: {part.strip()!r} is neither a core nor a "
                "range of further cores. List cores and ranges, each core once, as in '0-6', '3' "
                "or '0,2-4'"
            )
            raise DeviceListError(msg)
        cores += found
    return cores

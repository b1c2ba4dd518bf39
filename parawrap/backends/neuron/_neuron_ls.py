"""How many NeuronCores the machine has, as the vendor's `neuron-ls` tells it."""

from __future__ import annotations

import json
import shutil
import subprocess

from parawrap.errors import DeviceUnavailableError

__all__ = ["cores_listed"]

_FOLDER = "/opt/aws/neuron/bin"  # of aws-neuronx-tools, which not every PATH has
_PATIENCE_S = 60.0


def cores_listed() -> int:
    """The sum of what ``neuron-ls --json-output`` gives as ``nc_count`` of each device ("Neuron LS User Guide").

    On Trn2 these are logical cores, which is what a process counts in.

    Raises:
        DeviceUnavailableError: there is no `neuron-ls`, or it does not tell.
    """
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_FOLDER)
    if tool is None:
        msg = f"there is no neuron-ls on PATH or in {_FOLDER}"
        raise _untold(msg)
    try:
        ended = subprocess.run([tool, "--json-output"], capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"{tool} cannot be run ({error})"
        raise _untold(msg) from error
    if ended.returncode != 0:
        msg = f"{tool} --json-output ended with {ended.returncode}: {ended.stderr.strip()[-200:]!r}"
        raise _untold(msg)
    try:
        return sum(int(device["nc_count"]) for device in json.loads(ended.stdout))
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{tool} --json-output printed no list of devices with an nc_count each: {ended.stdout[:200]!r}"
        raise _untold(msg) from error


def _untold(why: str) -> DeviceUnavailableError:
    msg = (
        f"how many NeuronCores this process has cannot be told: {why}. Set NEURON_RT_NUM_CORES or "
        "NEURON_RT_VISIBLE_CORES, or install aws-neuronx-tools, which has neuron-ls"
    )
    return DeviceUnavailableError(msg)

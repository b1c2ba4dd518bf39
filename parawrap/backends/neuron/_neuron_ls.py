"""Count the NeuronCores of the machine with the vendor's `neuron-ls`."""

from __future__ import annotations

import json
import shutil
import subprocess

from parawrap.errors import DeviceUnavailableError

__all__ = ["cores_listed"]

_FOLDER = "/opt/aws/neuron/bin"  # of aws-neuronx-tools; often not on PATH
_TIMEOUT_S = 60.0


def cores_listed() -> int:
    """Return the sum of ``nc_count`` over the devices in ``neuron-ls --json-output`` ("Neuron LS User Guide").

    On Trn2 these are logical cores, the unit in which a process numbers its cores.

    Raises:
        DeviceUnavailableError: If `neuron-ls` is not found, fails, or prints something else.
    """
    tool = shutil.which("neuron-ls") or shutil.which("neuron-ls", path=_FOLDER)
    if tool is None:
        msg = f"neuron-ls is neither on PATH nor in {_FOLDER}"
        raise _unknown_count(msg)
    try:
        ended = subprocess.run([tool, "--json-output"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"{tool} cannot be run ({error})"
        raise _unknown_count(msg) from error
    if ended.returncode != 0:
        msg = f"{tool} --json-output exited with status {ended.returncode}: {ended.stderr.strip()[-200:]!r}"
        raise _unknown_count(msg)
    try:
        return sum(int(device["nc_count"]) for device in json.loads(ended.stdout))
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{tool} --json-output did not print a list of devices with an nc_count each: {ended.stdout[:200]!r}"
        raise _unknown_count(msg) from error


def _unknown_count(why: str) -> DeviceUnavailableError:
    msg = (
        f"the number of NeuronCores of this process is unknown: {why}. Set NEURON_RT_NUM_CORES or "
        "NEURON_RT_VISIBLE_CORES, or install aws-neuronx-tools, which includes neuron-ls"
    )
    return DeviceUnavailableError(msg)

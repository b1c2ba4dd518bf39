"""Which runtime serves the NeuronCores of this process. It is imported when first asked for, and then kept."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parawrap.backends._warn import warn_caller
from parawrap.backends.neuron._contract import NeuronRuntime
from parawrap.errors import DeviceUnavailableError

__all__ = ["runtime", "using"]

_VENDORS = {
    "torch_neuronx": "parawrap.backends.neuron._torch_neuronx:TorchNeuronx",
    "torch_neuron": "parawrap.backends.neuron._torch_neuron:TorchNeuron",
}
# By name, since the emulation is a test double that people may use: it stands above this room.
_RUNTIMES = {"host": "parawrap.testing:NeuronHost", **_VENDORS}
_PACKAGES = {"torch_neuronx": "torch-neuronx neuronx-cc", "torch_neuron": "torch-neuron neuron-cc[tensorflow]"}
_INDEX = "https://pip.repos.neuron.amazonaws.com"
_WRONG_PACKAGE = "wrong package"  # what the placeholders on PyPI raise, in capitals

_choosing = threading.RLock()
_chosen: NeuronRuntime | None = None
_instead: list[NeuronRuntime] = []  # inside `using` blocks: the one that was entered last serves


def runtime() -> NeuronRuntime:
    """The runtime of this process: the one that PARAWRAP_NEURON_RUNTIME names (host, torch_neuronx or torch_neuron).

    Without it, the first of a vendor's that can be imported; else the emulated one, with a warning.

    Raises:
        DeviceUnavailableError: the one that is named is not installed, or what is installed is PyPI's placeholder.
        ImportError: the one that is named is installed and cannot be imported.
    """
    global _chosen
    with _choosing:
        if _instead:
            return _instead[-1]
        if _chosen is None:
            named = os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip()
            _chosen = _load(named) if named else _first_there_is()
        return _chosen


@contextmanager
def using(other: NeuronRuntime) -> Iterator[NeuronRuntime]:
    """Have this runtime serve the whole process inside the block: all threads, so blocks belong to one of them."""
    with _choosing:
        _instead.append(other)
    try:
        yield other
    finally:
        with _choosing:
            _instead.remove(other)


def _first_there_is() -> NeuronRuntime:
    broken = ""
    for name in _VENDORS:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return _load(name)
        except ImportError as error:
            broken += f" ({name} is installed and cannot be imported: {error})"
    warn_caller(
        f"no NeuronCore runtime is installed{broken}: NeuronCores are emulated on the CPU. PARAWRAP_NEURON_RUNTIME=host "
        "says that this is wanted"
    )
    return _load("host")


def _load(name: str) -> NeuronRuntime:
    if name not in _RUNTIMES:
        msg = f"PARAWRAP_NEURON_RUNTIME={name!r} is no runtime: it is one of {', '.join(_RUNTIMES)}"
        raise DeviceUnavailableError(msg)
    module, _, maker = _RUNTIMES[name].partition(":")
    make: Callable[[], NeuronRuntime] = getattr(importlib.import_module(module), maker)
    try:
        return make()
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise DeviceUnavailableError(_cure(name, "is not installed")) from error
    except ImportError as error:
        if _WRONG_PACKAGE not in str(error).lower():
            raise
        what = "is installed from PyPI, where only a placeholder has this name: it is not the real package; uninstall it"
        raise DeviceUnavailableError(_cure(name, what)) from error


def _cure(name: str, what: str) -> str:
    return (
        f"{name} {what}. The real one is on the vendor's index: pip install --extra-index-url {_INDEX} {_PACKAGES[name]}. "
        "PARAWRAP_NEURON_RUNTIME=host emulates NeuronCores on the CPU"
    )

"""Choose the NeuronCore runtime of this process. It is imported on first use and then kept."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from parawrap.backends._warnings import warn_caller
from parawrap.backends.neuron._runtime import NeuronRuntime
from parawrap.errors import DeviceUnavailableError

__all__ = ["emulates_cores", "runtime", "using"]

_VENDORS = {
    "torch_neuronx": "parawrap.backends.neuron._torch_neuronx:TorchNeuronx",
    "torch_neuron": "parawrap.backends.neuron._torch_neuron:TorchNeuron",
}
# By name: this package must not import parawrap.testing, which imports it.
_RUNTIMES = {"host": "parawrap.testing:NeuronHost", **_VENDORS}
_PACKAGES = {"torch_neuronx": "'torch-neuronx==2.9.*' neuronx-cc", "torch_neuron": "torch-neuron neuron-cc[tensorflow]"}
_INDEX = "https://pip.repos.neuron.amazonaws.com"
_WRONG_PACKAGE = "wrong package"  # from the error of the placeholder packages on PyPI, in lower case

_choosing = threading.RLock()
_chosen: NeuronRuntime | None = None
_overrides: list[NeuronRuntime] = []  # the runtimes of active `using` blocks; the last one is in effect


def runtime() -> NeuronRuntime:
    """Return the runtime that PARAWRAP_NEURON_RUNTIME names: host, torch_neuronx, or torch_neuron.

    Without the variable, return the first vendor runtime that can be imported. If there is none, warn and return the
    emulated runtime.

    Raises:
        DeviceUnavailableError: If the named runtime is unknown or not installed, if a placeholder from PyPI is installed,
            or if the installed torch_neuronx makes NeuronCores torch devices and has no trace.
        ImportError: If the named runtime is installed but cannot be imported.
    """
    global _chosen
    with _choosing:
        if _overrides:
            return _overrides[-1]
        if _chosen is None:
            named = os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip()
            _chosen = _load(named) if named else _first_installed()
        return _chosen


def emulates_cores() -> bool:
    """True if PARAWRAP_NEURON_RUNTIME=host or a `using` block selects the runtime. It imports no runtime."""
    with _choosing:
        return bool(_overrides) or os.environ.get("PARAWRAP_NEURON_RUNTIME", "").strip() == "host"


@contextmanager
def using(other: NeuronRuntime) -> Iterator[NeuronRuntime]:
    """Use `other` as the runtime inside the block. It applies to all threads, so enter such blocks from one thread only."""
    with _choosing:
        _overrides.append(other)
    try:
        yield other
    finally:
        with _choosing:
            _overrides.remove(other)


def _first_installed() -> NeuronRuntime:
    broken = ""
    for name in _VENDORS:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            return _load(name)
        except ImportError as error:
            broken += f" ({name} is installed but cannot be imported: {error})"
    warn_caller(
        f"no NeuronCore runtime is installed{broken}, so parawrap emulates NeuronCores on the CPU. Set "
        "PARAWRAP_NEURON_RUNTIME=host to do this without a warning"
    )
    return _load("host")


def _load(name: str) -> NeuronRuntime:
    if name not in _RUNTIMES:
        msg = f"PARAWRAP_NEURON_RUNTIME={name!r} is not a known runtime. Set it to one of {', '.join(_RUNTIMES)}"
        raise DeviceUnavailableError(msg)
    module, _, maker = _RUNTIMES[name].partition(":")
    make: Callable[[], NeuronRuntime] = getattr(importlib.import_module(module), maker)
    try:
        return make()
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise DeviceUnavailableError(_with_advice(name, "is not installed")) from error
    except ImportError as error:
        if _WRONG_PACKAGE not in str(error).lower():
            raise
        fault = "is installed from PyPI, which has only a placeholder of this name. Uninstall it"
        raise DeviceUnavailableError(_with_advice(name, fault)) from error


def _with_advice(name: str, fault: str) -> str:
    return (
        f"{name} {fault}. Install it from the vendor's index: pip install --extra-index-url {_INDEX} {_PACKAGES[name]}. "
        "Or set PARAWRAP_NEURON_RUNTIME=host to emulate NeuronCores on the CPU"
    )

"""Choose the NeuronCore runtime of this process. The first use makes it, and all others get it."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from parawrap.backends import EMULATED_CORES, neuron_runtime_name, overriding_runtimes, warn_caller
from parawrap.errors import DeviceUnavailableError
from parawrap.neuroncores._emulated_cores import NeuronHost
from parawrap.neuroncores._runtime import NeuronRuntime
from parawrap.neuroncores._vendor_runtimes import TorchNeuron, TorchNeuronx

_RUNTIMES = {each.name: each for each in (NeuronHost, TorchNeuronx, TorchNeuron)}
_PACKAGES = {
    "torch_neuronx": "'torch-neuronx==2.9.*' neuronx-cc",
    "torch_neuron": "torch-neuron neuron-cc[tensorflow]",
}
_INDEX = "https://pip.repos.neuron.amazonaws.com"

# Guards `_chosen`: threads that need the runtime at the same time load it once. If that fails, the
# next thread tries again. Reentrant: a handler of the warning below may need the runtime
_choosing = threading.RLock()
_chosen: NeuronRuntime | None = None


def runtime() -> NeuronRuntime:
    """Return the runtime that PARAWRAP_NEURON_RUNTIME names: host, torch_neuronx, or torch_neuron.

    Without the variable, return the first vendor runtime that is installed. If there is none, warn
    and return the emulated runtime.

    Raises:
        DeviceUnavailableError: If the runtime is unknown, not installed, a placeholder from PyPI,
            or cannot be imported; or if the installed torch_neuronx makes NeuronCores torch devices
            and has no trace.
    """
    global _chosen
    with _choosing:
        if overriding_runtimes:
            chosen: NeuronRuntime = overriding_runtimes[-1]
            return chosen
        if _chosen is None:
            _chosen = _load(neuron_runtime_name() or _find_installed())
        return _chosen


@contextmanager
def using(other: NeuronRuntime) -> Iterator[NeuronRuntime]:
    """Use `other` as the runtime inside the block.

    It applies to all threads, so enter such blocks from one thread only.
    """
    overriding_runtimes.append(other)
    try:
        yield other
    finally:
        overriding_runtimes.remove(other)


@contextmanager
def neuron_host(
    cores: int | None = EMULATED_CORES, *, latency_s: float = 0.0
) -> Iterator[NeuronHost]:
    """Use emulated NeuronCores in the whole process inside the block.

    The arguments are the same as for :class:`NeuronHost`.

    >>> import torch
    >>> from parawrap import neuron
    >>> from parawrap.testing import neuron_host
    >>> with neuron_host(cores=2) as host:
    ...     net = neuron.DataParallel(neuron.trace(torch.nn.ReLU(), torch.ones(4, 3)))
    ...     y = net(-torch.ones(8, 3))
    ...     net.close()
    ...     [core.inferences for core in host.stats()]
    [1, 1]
    """
    host = NeuronHost(cores, latency_s=latency_s)
    with using(host):
        yield host


def _find_installed() -> str:
    """Return the name of the first runtime of the vendor that is installed.

    If there is none, return that of the emulated one, with a warning.
    """
    for name in _PACKAGES:
        if importlib.util.find_spec(name) is not None:
            return name
    warn_caller(
        "no NeuronCore runtime is installed, so parawrap emulates NeuronCores on the CPU. Set "
        "PARAWRAP_NEURON_RUNTIME=host to do this without a warning"
    )
    return "host"


def _load(name: str) -> NeuronRuntime:
    """Make the runtime of a name. Its constructor imports the vendor's package."""
    if name not in _RUNTIMES:
        msg = (
            f"PARAWRAP_NEURON_RUNTIME={name!r} is not a known runtime. Set it to one of "
            f"{', '.join(_RUNTIMES)}"
        )
        raise DeviceUnavailableError(msg)
    try:
        return _RUNTIMES[name]()
    except DeviceUnavailableError:
        raise
    # The import of a vendor's package, or of PyPI's placeholder, may fail in any way
    except Exception as error:
        msg = (
            f"{name} cannot be imported ({type(error).__name__}: {error}). Install it from the "
            "vendor's index, as PyPI has only placeholders: pip install --extra-index-url "
            f"{_INDEX} {_PACKAGES[name]}. Or set PARAWRAP_NEURON_RUNTIME=host to emulate "
            "NeuronCores on the CPU"
        )
        raise DeviceUnavailableError(msg) from error

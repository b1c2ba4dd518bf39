"""The vendor's runtimes: torch_neuronx on Inf2 and Trn instances, and torch_neuron on Inf1 instances.

They use only names that the vendor documents. A vendor's compiled model reports neither its shapes nor its cores, so
`trace` records them here for as long as the model lives.
"""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from parawrap._documentation import cite
from parawrap.backends import is_torch_device
from parawrap.errors import DeviceUnavailableError
from parawrap.neuroncores._emulated_cores import find_programs
from parawrap.neuroncores._example_call import ExampleCall, copy_for_trial, quiet_about_torchscript
from parawrap.neuroncores._neuron_cores import count_listed_cores, read_core_numbers
from parawrap.neuroncores._runtime import NeuronRuntime, Signature, no_dynamic_batching, save_to_memory
from parawrap.tree import flatten

# The vendor's placement context is per process: "using multiple core placement contexts from multiple threads may not
# correctly place models" (PyTorch NeuronX NeuronCore Placement APIs).
_placing = threading.Lock()

_NO_TRACE = (
    "the installed torch_neuronx has no trace, so 'nc:0' and parawrap.neuron cannot run compiled models: it makes "
    "NeuronCores torch devices. Pass the plain model to parallel(model, ['neuron:0', 'neuron:1']) or to "
    "parawrap.DataParallel(model). For compiled models, install torch-neuronx==2.9.* with torch 2.9, or set "
    "PARAWRAP_NEURON_RUNTIME=host to emulate NeuronCores"
)


class _Traced(NamedTuple):
    """The record of a traced model. `signature` is None if the model cannot run on the CPU."""

    signature: Signature | None
    options: Mapping[str, Any]


class _VendorRuntime(NeuronRuntime):
    """A vendor's package, which the constructor imports."""

    def __init__(self) -> None:
        self._vendor: Any = importlib.import_module(self.name)
        self._traced: WeakKeyDictionary[torch.nn.Module, _Traced] = WeakKeyDictionary()
        self._cores_listed: int | None = None

    def core_count(self) -> int:
        given = read_core_numbers()
        if given is not None:
            return len(given)
        if self._cores_listed is None:
            self._cores_listed = count_listed_cores()
        return self._cores_listed

    def trace(
        self, model: Any, example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
    ) -> torch.jit.ScriptModule:
        """Call the vendor's trace, after one run on the CPU that records the outputs, which the vendor does not report."""
        example = ExampleCall.of(model, example_inputs, example_kwarg_inputs)
        trace = self._find_documented("trace")
        if example_kwarg_inputs is not None:
            self._refuse_without(trace, "example_kwarg_inputs")
        signature = _observe(model, example)
        options = self._options(compiler, signature)
        given = (example_inputs,) if example_kwarg_inputs is None else ()
        named = {} if example_kwarg_inputs is None else {"example_kwarg_inputs": example_kwarg_inputs}
        compiled: torch.jit.ScriptModule = trace(model, *given, **named, **options)
        self._traced[compiled] = _Traced(signature, options)
        return compiled

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the recorded signature for models that `trace` returned and for copies that `load` made of them."""
        traced = self._traced.get(model)
        return None if traced is None else traced.signature

    def load(self, parts: Sequence[torch.jit.ScriptModule], start: int, count: int) -> list[torch.nn.Module]:
        """Load each model in the placement context, which the vendor documents as the most efficient way."""
        if any(map(find_programs, parts)):
            msg = (
                f"the model is compiled for emulated NeuronCores, but this process uses the runtime {self.name}. Trace the "
                "model again with that runtime, or set PARAWRAP_NEURON_RUNTIME=host"
            )
            raise DeviceUnavailableError(msg)
        context = self._find_documented("neuron_cores_context")
        files = [save_to_memory(part) for part in parts]
        with _placing, quiet_about_torchscript(), context(start_nc=start, nc_count=count):
            loaded: list[torch.nn.Module] = [torch.jit.load(file) for file in files]
        for part, copied in zip(parts, loaded, strict=True):
            if part in self._traced:
                self._traced[copied] = self._traced[part]
        return loaded

    def _options(self, compiler: dict[str, Any], signature: Signature | None) -> dict[str, Any]:
        """Return the options for the vendor's trace."""
        return compiler

    def _refuse_without(self, trace: Any, name: str) -> None:
        """Raise DeviceUnavailableError unless the vendor's trace has the parameter. `**options` would not use it."""
        if name not in inspect.signature(trace).parameters:
            msg = (
                f"the trace of this release of {self.name} has no {name}. Give the inputs by position, in the order of "
                "forward: trace(model, (first, second)). If forward needs names, trace a module that calls it with them"
            )
            raise DeviceUnavailableError(msg)

    def _find_documented(self, name: str) -> Any:
        """Return a vendor function from its current place, or from the ``experimental`` module of older releases."""
        for module in (self._vendor, getattr(self._vendor, "experimental", None)):
            found = getattr(module, name, None)
            if found is not None:
                return found
        msg = (
            f"this release of {self.name} has neither {self.name}.{name} nor {self.name}.experimental.{name}. "
            f"For the packages and what they offer, see {cite('neuron_hardware')}"
        )
        raise DeviceUnavailableError(msg)


class TorchNeuronx(_VendorRuntime):
    """torch_neuronx, the generation on torch_xla: NeuronCores of Inf2 and Trn instances.

    Raises:
        ImportError: If torch_neuronx is not installed, or lacks a package that it needs.
        DeviceUnavailableError: If the package is of the newer generation, which has torch devices and no trace.
    """

    name = "torch_neuronx"

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self._vendor, "trace") and is_torch_device("neuron"):
            raise DeviceUnavailableError(_NO_TRACE)

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        """Call the vendor's function. Its runtime cuts and fills the chunks."""
        try:
            self._find_documented("dynamic_batch")(part)
        except (ValueError, RuntimeError) as error:
            raise no_dynamic_batching(error) from error


class TorchNeuron(_VendorRuntime):
    """torch_neuron: NeuronCores of Inf1 instances. Dynamic batching is an option of its trace.

    `trace` sets this option, ``dynamic_batch_size``, for each model that can use it. It cannot be enabled afterwards.

    Raises:
        ImportError: If torch_neuron is not installed, or cannot be imported.
    """

    name = "torch_neuron"

    def _options(self, compiler: dict[str, Any], signature: Signature | None) -> dict[str, Any]:
        is_eligible = signature is not None and signature.why_fixed() is None
        return {"dynamic_batch_size": True, **compiler} if is_eligible else compiler

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        traced = self._traced.get(part)
        if traced is None:
            why = (
                "it is from a file or from another trace. Trace it in this process with parawrap.neuron.trace. If it was "
                "traced with dynamic_batch_size=True, use it as it is: it takes any number of rows already"
            )
            raise no_dynamic_batching(why)
        if not traced.options.get("dynamic_batch_size"):
            why = "it was traced without dynamic_batch_size. Trace it with dynamic_batch_size=True"
            raise no_dynamic_batching(why)


def _observe(model: Any, example: ExampleCall) -> Signature | None:
    """Run the model once on the CPU and return its signature; None if it fails."""
    try:
        with torch.no_grad():
            returned = copy_for_trial(model)(*example.args, **example.kwargs)
    except Exception:  # noqa: BLE001 (the model may have kernels for NeuronCores only; the vendor's trace reports mistakes)
        return None
    inputs, takes = flatten(tuple(example))
    return Signature.of(inputs, takes, *flatten(returned))

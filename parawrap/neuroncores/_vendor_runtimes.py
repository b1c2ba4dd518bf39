"""The vendor's runtimes: torch_neuronx on Inf2 and Trn instances, and torch_neuron on Inf1.

They use only names that the vendor documents. A compiled model of the vendor does not report its
shapes, so `trace` records them here for as long as the model lives.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from parawrap.backends import count_listed_cores, is_torch_device, read_core_numbers
from parawrap.errors import DeviceUnavailableError
from parawrap.neuroncores._emulated_cores import find_programs
from parawrap.neuroncores._runtime import (
    NeuronRuntime,
    Signature,
    copy_for_trial,
    no_dynamic_batching,
    quiet_about_torchscript,
    read_examples,
    save_to_memory,
)
from parawrap.tree import flatten, unflatten

# One thread at a time places models: "using multiple core placement contexts from multiple threads
# may not correctly place models" (PyTorch NeuronX NeuronCore Placement APIs)
_placing = threading.Lock()

_NO_TRACE = (
    "the installed torch_neuronx has no trace, so 'nc:0' and parawrap.neuron cannot run compiled "
    "models: it makes NeuronCores torch devices. Pass the plain model to parallel(model, "
    "['neuron:0', 'neuron:1']) or to parawrap.DataParallel(model). For compiled models, install "
    "torch-neuronx==2.9.* with torch 2.9, or set PARAWRAP_NEURON_RUNTIME=host to emulate "
    "NeuronCores"
)


class _VendorRuntime(NeuronRuntime):
    """A vendor's package, which the constructor imports."""

    def __init__(self) -> None:
        self._vendor: Any = importlib.import_module(self.name)
        # Weak: a model that the user drops must free its memory on the core
        self._signatures: WeakKeyDictionary[torch.nn.Module, Signature | None] = WeakKeyDictionary()
        # The models that were traced with torch_neuron's option for dynamic batching
        self._dynamic: WeakSet[torch.nn.Module] = WeakSet()
        self._cores_listed: int | None = None  # None until the vendor's tool has listed the cores

    def core_count(self) -> int:
        given = read_core_numbers()
        if given is not None:
            return len(given)
        if self._cores_listed is None:
            self._cores_listed = count_listed_cores()
        return self._cores_listed

    def trace(
        self,
        model: Any,
        example_inputs: Any = None,
        *,
        example_kwarg_inputs: Any = None,
        **compiler: Any,
    ) -> torch.jit.ScriptModule:
        """Call the vendor's trace, after a run on the CPU that shows the shapes of the outputs."""
        args, kwargs = read_examples(model, example_inputs, example_kwarg_inputs)
        signature = _observe(model, args, kwargs)
        options = self._options(compiler, signature)
        trace = self._find_documented("trace")
        compiled: torch.jit.ScriptModule
        if example_kwarg_inputs is None:
            compiled = trace(model, example_inputs, **options)
        else:  # a trace without this option raises TypeError, as it should
            compiled = trace(model, example_kwarg_inputs=example_kwarg_inputs, **options)
        self._signatures[compiled] = signature
        if options.get("dynamic_batch_size"):
            self._dynamic.add(compiled)
        return compiled

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the recorded signature of a model from `trace`, or of a copy from `load`."""
        return self._signatures.get(model)

    def load(
        self, parts: Sequence[torch.jit.ScriptModule], start: int, count: int
    ) -> list[torch.nn.Module]:
        """Load each model in the placement context, the most efficient way for the vendor."""
        if any(map(find_programs, parts)):
            msg = (
                "the model is compiled for emulated NeuronCores, but this process uses the "
                f"runtime {self.name}. Trace the model again with that runtime, or set "
                "PARAWRAP_NEURON_RUNTIME=host"
            )
            raise DeviceUnavailableError(msg)
        context = self._find_documented("neuron_cores_context")
        # Before the lock: only `torch.jit.load` places a model
        files = [save_to_memory(part) for part in parts]
        with _placing, quiet_about_torchscript(), context(start_nc=start, nc_count=count):
            loaded: list[torch.nn.Module] = [torch.jit.load(file) for file in files]
        for part, copied in zip(parts, loaded, strict=True):
            if part in self._signatures:
                self._signatures[copied] = self._signatures[part]
            if part in self._dynamic:
                self._dynamic.add(copied)
        return loaded

    def _options(self, compiler: dict[str, Any], signature: Signature | None) -> dict[str, Any]:
        """Return the options for the vendor's trace, from those that the user gave."""
        return compiler

    def _find_documented(self, name: str) -> Any:
        """Return a vendor function. Older releases have it in their ``experimental`` module."""
        return getattr(self._vendor, name, None) or getattr(self._vendor.experimental, name)


class TorchNeuronx(_VendorRuntime):
    """torch_neuronx, the generation on torch_xla: NeuronCores of Inf2 and Trn instances.

    Raises:
        ImportError: If torch_neuronx is not installed, or lacks a package that it needs.
        DeviceUnavailableError: If the package is of the newer generation, which has torch devices
            and no trace.
    """

    name = "torch_neuronx"

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self._vendor, "trace") and is_torch_device("neuron"):
            raise DeviceUnavailableError(_NO_TRACE)

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        """Call the vendor's function: its runtime then cuts calls into inferences."""
        try:
            self._find_documented("dynamic_batch")(part)
        except (ValueError, RuntimeError) as error:
            raise no_dynamic_batching(error) from error


class TorchNeuron(_VendorRuntime):
    """torch_neuron: NeuronCores of Inf1 instances. Dynamic batching is an option of its trace.

    `trace` sets this option, ``dynamic_batch_size``, for each model that can use it. It cannot be
    enabled afterwards.

    Raises:
        ImportError: If torch_neuron is not installed, or cannot be imported.
    """

    name = "torch_neuron"

    def _options(self, compiler: dict[str, Any], signature: Signature | None) -> dict[str, Any]:
        is_eligible = signature is not None and signature.why_fixed() is None
        return {"dynamic_batch_size": True, **compiler} if is_eligible else compiler

    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        if part not in self._dynamic:
            why = (
                "only its trace can enable it. Trace it in this process with "
                "parawrap.neuron.trace and dynamic_batch_size=True. If it is from a file, and was "
                "traced so, use it as it is: it takes any rows"
            )
            raise no_dynamic_batching(why)


def _observe(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature | None:
    """Run the model once on the CPU and return its signature; None if it fails."""
    leaves, spec = flatten((args, kwargs))
    # Clones: the model may write into its inputs, which are the user's examples
    clones = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    args, kwargs = unflatten(spec, clones)
    try:
        with torch.no_grad():
            returned = copy_for_trial(model)(*args, **kwargs)
    # Kernels of the model may exist for NeuronCores only. Mistakes are errors of the vendor's trace
    except Exception:  # noqa: BLE001
        return None
    return Signature.of(leaves, flatten(returned)[0])

"""The common base of the vendor's two runtimes: trace models, place them, and count cores.

It uses only names that the vendor documents. A vendor's compiled model reports neither its shapes nor its cores, so
`trace` records them here for as long as the model lives.
"""

from __future__ import annotations

import importlib
import inspect
import io
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from parawrap.backends.neuron._compiled_submodules import copy_around
from parawrap.backends.neuron._neuron_cores import cores_given
from parawrap.backends.neuron._neuron_ls import cores_listed
from parawrap.backends.neuron._runtime import NeuronRuntime, Signature, TensorSpec, not_traced
from parawrap.backends.neuron._tracing import ExampleCall, buffers_kept, quiet_about_torchscript
from parawrap.errors import DeviceUnavailableError
from parawrap.tree import TreeSpec, addresses, flatten

__all__ = ["VendorRuntime"]

# The vendor's placement context is per process: "using multiple core placement contexts from multiple threads may not
# correctly place models" (PyTorch NeuronX NeuronCore Placement APIs).
_placing = threading.Lock()


class _Traced(NamedTuple):
    """The record of a traced model. `signature` and `outputs` are None if the model cannot run on the CPU."""

    signature: Signature | None
    outputs: TreeSpec | None
    options: Mapping[str, Any]


class VendorRuntime(NeuronRuntime):
    """A vendor's package, which the constructor imports. Thread-safe."""

    def __init__(self) -> None:
        self._vendor: Any = importlib.import_module(self.name)
        self._traced: WeakKeyDictionary[torch.nn.Module, _Traced] = WeakKeyDictionary()
        self._cores_listed: int | None = None

    def core_count(self) -> int:
        given = cores_given()
        if given is not None:
            return given
        if self._cores_listed is None:
            self._cores_listed = cores_listed()
        return self._cores_listed

    def trace(
        self, model: Any, example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
    ) -> torch.jit.ScriptModule:
        """Call the vendor's trace, after one run on the CPU that records the outputs, which the vendor does not report."""
        example = ExampleCall.of(model, example_inputs, example_kwarg_inputs)
        trace = self._documented("trace")
        if example_kwarg_inputs is not None:
            self._refuse_without(trace, "example_kwarg_inputs")
        signature, outputs = _observed(model, example)
        given = (example_inputs,) if example_kwarg_inputs is None else ()
        named = {} if example_kwarg_inputs is None else {"example_kwarg_inputs": example_kwarg_inputs}
        compiled: torch.jit.ScriptModule = trace(model, *given, **named, **compiler)
        self._traced[compiled] = _Traced(signature, outputs, compiler)
        return compiled

    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """Save each compiled part and load it on its cores, which the vendor documents as the most efficient way.

        Modules around the compiled parts are copied, but share their tensors with the original.
        """
        parts = _compiled_parts(model)
        context = self._documented("neuron_cores_context")
        saved = [_saved(part) for part in parts]
        with _placing, quiet_about_torchscript(), context(start_nc=start, nc_count=count):
            loaded = [torch.jit.load(buffer) for buffer in saved]
        copies = list(zip(parts, loaded, strict=True))
        placed = copy_around(model, {id(part): copied for part, copied in copies})
        for original, copied in ((model, placed), *copies):
            if original in self._traced:
                self._traced[copied] = self._traced[original]
        return placed

    def unplace(self, placed: torch.nn.Module) -> None:
        """Do nothing: the vendor unloads a model when its last reference goes, and documents no other way."""

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the recorded signature for models that `trace` returned and for copies that `place` made of them."""
        traced = self._traced.get(model)
        return None if traced is None else traced.signature

    def _eligible_parts(self, model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
        """Return the compiled parts of a model that may use dynamic batching.

        Raises:
            ReplicaError: If the model has no compiled part.
            ShapeError: If a part is known to take only batches of its compiled size.
        """
        parts = _compiled_parts(model)
        for part in parts:
            signature = self.signature(part)
            if signature is not None:
                signature.refuse_fixed()
        return parts

    def _refuse_without(self, trace: Any, name: str) -> None:
        """Raise DeviceUnavailableError unless the vendor's trace has the parameter. `**options` would not use it."""
        if name not in inspect.signature(trace).parameters:
            msg = (
                f"the trace of this release of {self.name} has no {name}. Give the inputs by position, in the order of "
                "forward: trace(model, (first, second)). If forward needs names, trace a module that calls it with them"
            )
            raise DeviceUnavailableError(msg)

    def _documented(self, name: str) -> Any:
        """Return a vendor function from its current place, or from the ``experimental`` module of older releases."""
        for module in (self._vendor, getattr(self._vendor, "experimental", None)):
            found = getattr(module, name, None)
            if found is not None:
                return found
        msg = (
            f"this release of {self.name} has neither {self.name}.{name} nor {self.name}.experimental.{name}. "
            "docs/neuron_hardware.md shows the packages and what they offer"
        )
        raise DeviceUnavailableError(msg)


def _compiled_parts(model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
    """Return the compiled parts of a module. The vendor's functions silently ignore modules without one.

    Raises:
        ReplicaError: If the module has no compiled part.
    """
    parts = _scripted(model)
    if not parts:
        raise not_traced(model)
    return parts


def _scripted(model: object) -> list[torch.jit.ScriptModule]:
    """Return the outermost ScriptModules in a module, which may be the module itself, each once."""
    if isinstance(model, torch.jit.ScriptModule):
        return [model]
    children = model.children() if isinstance(model, torch.nn.Module) else ()
    found = {id(part): part for child in children for part in _scripted(child)}
    return list(found.values())


def _saved(part: torch.jit.ScriptModule) -> io.BytesIO:
    buffer = io.BytesIO()
    with quiet_about_torchscript():
        torch.jit.save(part, buffer)
    buffer.seek(0)
    return buffer


def _observed(model: Any, example: ExampleCall) -> tuple[Signature | None, TreeSpec | None]:
    """Run the model once on the CPU; return its signature and the structure of its output, or None for both if it fails."""
    try:
        with torch.no_grad(), buffers_kept(model):
            returned = model(*example.args, **example.kwargs)
    except Exception:  # noqa: BLE001 (the model may have kernels for NeuronCores only; the vendor's trace reports mistakes)
        return None, None
    (inputs, input_spec), (outputs, output_spec) = flatten(tuple(example)), flatten(returned)
    signature = Signature(
        _specs(inputs, addresses(input_spec, ("args", "kwargs"))), _specs(outputs, addresses(output_spec, ("output",)))
    )
    return signature, output_spec


def _specs(leaves: list[Any], where: list[str]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec.of(leaf, address) for leaf, address in zip(leaves, where, strict=True) if isinstance(leaf, torch.Tensor)
    )

"""What the vendor's two runtimes share: how models are traced and placed, and how many cores there are.

Knows the vendor's documented names, and no others. Of a compiled model the vendor tells neither shapes nor cores, so what
`trace` was given is remembered here, beside the model, for as long as the model lives.
"""

from __future__ import annotations

import importlib
import io
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from parawrap.backends.neuron._around import copy_around
from parawrap.backends.neuron._contract import NeuronRuntime, Signature, TensorSpec, not_traced
from parawrap.backends.neuron._cores import cores_given
from parawrap.backends.neuron._neuron_ls import cores_listed
from parawrap.backends.neuron._tracing import arguments_of, buffers_kept, quiet_about_torchscript
from parawrap.errors import DeviceUnavailableError
from parawrap.tree import TreeSpec, addresses, flatten

__all__ = ["VendorRuntime"]

# The vendor's context is one for the process: "using multiple core placement contexts from multiple threads may not
# correctly place models" (PyTorch NeuronX NeuronCore Placement APIs).
_placing = threading.Lock()


class _Traced(NamedTuple):
    """What is remembered of a model that was traced here. No signature: the model runs nowhere but on NeuronCores."""

    signature: Signature | None
    outputs: TreeSpec | None
    options: Mapping[str, Any]


class VendorRuntime(NeuronRuntime):
    """A vendor's package, imported when this is made. Any number of threads may use it."""

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

    def trace(self, model: Any, example_inputs: Any, **compiler: Any) -> torch.jit.ScriptModule:
        """The vendor's trace. The model runs once more on the CPU, as the vendor does not tell what it gives."""
        signature, outputs = _observed(model, example_inputs)
        compiled: torch.jit.ScriptModule = self._documented("trace")(model, example_inputs, **compiler)
        self._traced[compiled] = _Traced(signature, outputs, compiler)
        return compiled

    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """Loads a saved copy where it is to be: the most efficient way, says the vendor, and the one that is documented.

        What stands around the compiled parts is copied, but for its tensors.
        """
        parts = _compiled_parts(model)
        context = self._documented("neuron_cores_context")
        saved = [_saved(part) for part in parts]
        with _placing, quiet_about_torchscript(), context(start_nc=start, nc_count=count):
            loaded = [torch.jit.load(buffer) for buffer in saved]
        copies = list(zip(parts, loaded, strict=True))
        placed = copy_around(model, {id(part): there for part, there in copies})
        for original, there in ((model, placed), *copies):
            if original in self._traced:
                self._traced[there] = self._traced[original]
        return placed

    def unplace(self, placed: torch.nn.Module) -> None:
        """Nothing is called: the vendor unloads a model with the last reference to it, and documents no other way."""

    def signature(self, model: torch.nn.Module) -> Signature | None:
        """What `trace` was given, for the models that it returned and for copies that `place` made of them."""
        traced = self._traced.get(model)
        return None if traced is None else traced.signature

    def _eligible_parts(self, model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
        """The compiled parts of a model of which none is known not to take batches of other sizes.

        Raises:
            ReplicaError: there is none.
            ShapeError: one is.
        """
        parts = _compiled_parts(model)
        for part in parts:
            signature = self.signature(part)
            if signature is not None:
                signature.refuse_fixed()
        return parts

    def _documented(self, name: str) -> Any:
        """A function of the vendor's by its name of today, else by the one that it had while it was experimental."""
        for module in (self._vendor, getattr(self._vendor, "experimental", None)):
            found = getattr(module, name, None)
            if found is not None:
                return found
        msg = (
            f"this release of {self.name} has neither {self.name}.{name} nor {self.name}.experimental.{name}: install a "
            "later one"
        )
        raise DeviceUnavailableError(msg)


def _compiled_parts(model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
    """The compiled parts of a module. The vendor would do nothing with another module, and not say so.

    Raises:
        ReplicaError: it has none.
    """
    parts = _scripted(model)
    if not parts:
        raise not_traced(model)
    return parts


def _scripted(model: object) -> list[torch.jit.ScriptModule]:
    """The outermost ScriptModules in a module, itself included, each once."""
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


def _observed(model: Any, example_inputs: Any) -> tuple[Signature | None, TreeSpec | None]:
    """The tensors that a model takes and gives, seen by running it as it is."""
    try:
        args = arguments_of(example_inputs)
        with torch.no_grad(), buffers_kept(model):
            given = model(*args)
    except Exception:  # noqa: BLE001 (a kernel for NeuronCores alone; what is a mistake, the vendor's trace reports)
        return None, None
    (taken, of_inputs), (outputs, of_outputs) = flatten(args), flatten(given)
    signature = Signature(
        _specs(taken, addresses(of_inputs, ("args",))), _specs(outputs, addresses(of_outputs, ("output",)))
    )
    return signature, of_outputs


def _specs(leaves: list[Any], where: list[str]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec.of(leaf, address) for leaf, address in zip(leaves, where, strict=True) if isinstance(leaf, torch.Tensor)
    )

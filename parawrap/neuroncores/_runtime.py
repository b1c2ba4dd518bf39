"""The interface of NeuronCore runtimes, of the vendor's and of the double; and what a model was compiled for."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parawrap.errors import ReplicaError, ShapeError
from parawrap.neuroncores._example_call import quiet_about_torchscript
from parawrap.tree import TreeSpec, addresses


class TensorSpec(NamedTuple):
    """The address of one tensor in a call or an output, and the shape that it was compiled for."""

    address: str
    shape: tuple[int, ...]


class Signature(NamedTuple):
    """The inputs and outputs that a model was compiled for, in the order of `parawrap.tree.flatten`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, inputs: Sequence[Any], takes: TreeSpec, outputs: Sequence[Any], gives: TreeSpec) -> Signature:
        """Return the signature of a call with these leaves and structures. Values other than tensors have no spec."""
        return cls(_specs(inputs, addresses(takes, ("args", "kwargs"))), _specs(outputs, addresses(gives, ("output",))))

    @property
    def most_dims(self) -> int:
        """The largest number of dims of an input."""
        return max((len(spec.shape) for spec in self.inputs), default=0)

    def rows(self, dim: int) -> int | None:
        """Return the compiled number of rows on `dim`, next to single rows; None if the inputs disagree on it."""
        sizes = {spec.shape[dim] for spec in self.inputs if -len(spec.shape) <= dim < len(spec.shape)}
        if len(sizes) > 1:
            sizes.discard(1)
        return sizes.pop() if len(sizes) == 1 else None

    def why_fixed(self) -> str | None:
        """Return the reason why the model only takes batches of the compiled size; None if it takes any size."""
        if not self.inputs:
            return "it takes no tensors"
        first = self.inputs[0]
        for spec in (*self.inputs, *self.outputs):
            if not spec.shape:
                return f"{spec.address} has no batch dimension: its compiled shape is ()"
            if spec.shape[0] == 0:
                return f"{spec.address} is compiled for 0 rows"
            if spec.shape[0] != first.shape[0]:
                rows = f"{first.shape[0]} rows on dim 0, and {spec.address} for {spec.shape[0]}"
                return f"{first.address} is compiled for {rows}"
        return None


class NeuronRuntime(ABC):
    """Runs compiled models on NeuronCores. Thread-safe; one instance lives as long as the process.

    Cores are numbered from zero within the process. The runtime runs one inference at a time on each core. Several threads
    may call a model on a core at once.
    """

    name: str
    """The value of PARAWRAP_NEURON_RUNTIME that selects this runtime."""

    @abstractmethod
    def core_count(self) -> int:
        """Return the number of NeuronCores allocated to this process.

        Raises:
            DeviceUnavailableError: If the number cannot be determined. The message says how to set it.
            DeviceListError: If NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed.
        """

    @abstractmethod
    def trace(
        self, model: Any, example_inputs: Any = None, *, example_kwarg_inputs: Any = None, **compiler: Any
    ) -> torch.jit.ScriptModule:
        """Compile a module or function for the shapes and dtypes of the examples: a tensor or tuple, or a dict by name.

        `compiler` holds options of the runtime's compiler.

        Raises:
            TypeError: If both or neither kind of examples are given, or a dict is given by position.
            DeviceUnavailableError: If the runtime cannot trace inputs by name.
        """

    @abstractmethod
    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the inputs and outputs that the model was compiled for; None if the runtime does not report them."""

    @abstractmethod
    def load(self, parts: Sequence[torch.jit.ScriptModule], start: int, count: int) -> list[torch.nn.Module]:
        """Return copies of compiled models, loaded onto the cores ``start .. start + count - 1`` in one call.

        A copy uses the cores in turn, one call each. The cores' memory is free again when the last reference to the copy
        goes: the vendor documents no other way.

        Raises:
            DeviceUnavailableError, ValueError: If the process does not have these cores.
            RuntimeError: If the runtime cannot load a model, for instance because a core is out of memory.
        """

    @abstractmethod
    def _make_dynamic(self, part: torch.jit.ScriptModule) -> None:
        """Enable dynamic batching of a compiled model.

        Raises:
            ShapeError: If the model cannot take other batch sizes. The message says why.
        """

    def place(self, model: torch.jit.ScriptModule, start: int, count: int) -> torch.nn.Module:
        """Return a copy of a compiled model, loaded onto the cores ``start .. start + count - 1``."""
        return self.load([model], start, count)[0]

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let a model take batches of any size on dim 0, in place, and return it.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores.
            ShapeError: If a part cannot take other batch sizes. The message says why.
        """
        parts = _find_compiled(model)
        for part in parts:
            signature = self.signature(part)
            why = None if signature is None else signature.why_fixed()
            if why is not None:
                raise no_dynamic_batching(why)
        for part in parts:
            self._make_dynamic(part)
        return model


def not_traced(model: object) -> ReplicaError:
    """Return the error for a model that has no part compiled for NeuronCores."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
    return ReplicaError(f"{name} was not traced for NeuronCores. Call parawrap.neuron.trace(model, example_inputs) first")


def no_dynamic_batching(why: object) -> ShapeError:
    """Return the error for a model that cannot use dynamic batching."""
    return ShapeError(f"this model cannot use dynamic batching: {why}")


def save_to_memory(part: torch.jit.ScriptModule) -> io.BytesIO:
    """Return a file in memory that holds a compiled model."""
    file = io.BytesIO()
    with quiet_about_torchscript():
        torch.jit.save(part, file)
    file.seek(0)
    return file


def _find_compiled(model: torch.nn.Module) -> list[torch.jit.ScriptModule]:
    """Return the outermost ScriptModules in a module, which may be the module itself, each once.

    Raises:
        ReplicaError: If the module has none. The vendor's functions silently ignore such a module.
    """
    found: list[torch.jit.ScriptModule] = []
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):
            found.append(module)
        elif isinstance(module, torch.nn.Module):
            waiting += [child for child in module.children() if id(child) not in seen]
            seen.update(map(id, module.children()))
    if not found:
        raise not_traced(model)
    return found


def _specs(leaves: Sequence[Any], where: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(address, tuple(leaf.shape))
        for leaf, address in zip(leaves, where, strict=True)
        if isinstance(leaf, torch.Tensor)
    )

"""The interface that each NeuronCore runtime implements, both the vendor's and the emulated one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from parawrap.errors import ReplicaError, ShapeError

__all__ = ["NeuronRuntime", "Signature", "TensorSpec", "consecutive", "no_dynamic_batching", "not_traced"]


class TensorSpec(NamedTuple):
    """The shape and dtype of one input or output of a compiled model, and its address in the call or output."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: str

    @classmethod
    def of(cls, tensor: torch.Tensor, address: str) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, address)

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"

    def rows(self, dim: int) -> int | None:
        """Return the size on `dim`; None if the tensor has no such dim."""
        return self.shape[dim] if -len(self.shape) <= dim < len(self.shape) else None

    def misfit(self, tensor: torch.Tensor) -> str:
        """Return an error message for a tensor that does not match this spec."""
        return f"{self.address} is {TensorSpec.of(tensor, self.address)}, but the model is compiled for {self}"


class Signature(NamedTuple):
    """The inputs and outputs of a compiled model, in the order in which `parawrap.tree` flattens them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def batch(self) -> int | None:
        """The rows per inference: the size of all inputs and outputs on dim 0. None if these differ."""
        return self.inputs[0].shape[0] if self.why_fixed() is None else None

    def refuse_fixed(self) -> None:
        """Raise an error if the model cannot use dynamic batching.

        Raises:
            ShapeError: If an input or output has no batch dimension, or a different batch size. The message names it.
        """
        why = self.why_fixed()
        if why is not None:
            raise no_dynamic_batching(why)

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
    may call a placed model at once: the inputs of one call are copied to the core while another call runs.
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
    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """Return a copy of a compiled model, loaded onto the cores ``start .. start + count - 1`` in one call.

        The copy uses the cores in turn, one inference each. The model itself does not change. If `model` is an ordinary
        module that contains compiled models, the copy shares the parameters and buffers around them.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores, or a module around that part cannot be copied.
            ValueError, DeviceUnavailableError: If the process does not have these cores.
            RuntimeError: If the runtime cannot load the model, for instance because a core is out of memory.
        """

    @abstractmethod
    def unplace(self, placed: torch.nn.Module) -> None:
        """Free the memory that `place` took on the cores. Do not call `placed` afterwards."""

    @abstractmethod
    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return a model that takes batches of any size on dim 0, in chunks of the compiled size.

        This is `model` itself, changed in place, if the runtime supports that; otherwise a module around it.

        Raises:
            ReplicaError: If the model has no part compiled for NeuronCores.
            ShapeError: If the model cannot take other batch sizes. The message says why.
        """

    @abstractmethod
    def signature(self, model: torch.nn.Module) -> Signature | None:
        """Return the inputs and outputs that the model was compiled for; None if the runtime does not report them."""


def no_dynamic_batching(why: object) -> ShapeError:
    """Return the error for a model that cannot use dynamic batching."""
    return ShapeError(f"this model cannot use dynamic batching: {why}")


def not_traced(model: object) -> ReplicaError:
    """Return the error for a model that has no part compiled for NeuronCores."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
    return ReplicaError(f"{name} was not traced for NeuronCores. Call parawrap.neuron.trace(model, example_inputs) first")


def consecutive(cores: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive cores, each as (first core, length). A runtime loads one run per call.

    >>> consecutive([0, 1, 2, 5, 7, 6])
    [(0, 3), (5, 3)]
    """
    runs: list[tuple[int, int]] = []
    for core in sorted(cores):
        if runs and core == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((core, 1))
    return runs

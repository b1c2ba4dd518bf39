"""The contract: what the rooms above may ask of a NeuronCore runtime, emulated or a vendor's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from parawrap.errors import ReplicaError, ShapeError

__all__ = ["NeuronRuntime", "Signature", "TensorSpec", "consecutive", "no_dynamic_batching", "not_traced"]


class TensorSpec(NamedTuple):
    """The shape and dtype of one tensor that a compiled model takes or gives, and where in the call or output it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    address: str

    @classmethod
    def of(cls, tensor: torch.Tensor, address: str) -> TensorSpec:
        """That of a tensor as it is."""
        return cls(tuple(tensor.shape), tensor.dtype, address)

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"

    def rows(self, dim: int) -> int | None:
        """Its size on that dim; None where it has no such dim."""
        return self.shape[dim] if -len(self.shape) <= dim < len(self.shape) else None

    def misfit(self, tensor: torch.Tensor) -> str:
        """What to say of a tensor that was given for it, and is not like it."""
        return f"{self.address} is {TensorSpec.of(tensor, self.address)}, and the model is compiled for {self}"


class Signature(NamedTuple):
    """The tensors that a compiled model takes and gives, in the order in which `parawrap.tree` flattens them."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @property
    def batch(self) -> int | None:
        """The rows that an inference takes: what all inputs and outputs have on dim 0. None where they do not agree."""
        return self.inputs[0].shape[0] if self.why_fixed() is None else None

    def refuse_fixed(self) -> None:
        """Raise what dynamic batching is refused with, of a model that cannot have it.

        Raises:
            ShapeError: an input or output has no batch dimension, or not that of the others; the message names it.
        """
        why = self.why_fixed()
        if why is not None:
            raise no_dynamic_batching(why)

    def why_fixed(self) -> str | None:
        """Why batches of other sizes than the compiled one cannot be taken; None where they can."""
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
    """What runs compiled models on NeuronCores. One lives as long as the process; any number of threads may use it.

    Cores are numbered from zero within the process. A core runs one inference at a time: the runtime sees to that, so that
    several threads may call a placed model at once, and the input of one call is brought to the core while another runs.
    """

    name: str
    """As in PARAWRAP_NEURON_RUNTIME."""

    @abstractmethod
    def core_count(self) -> int:
        """How many NeuronCores are allocated to this process.

        Raises:
            DeviceUnavailableError: that cannot be found out; the message says how to tell.
            DeviceListError: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES is malformed.
        """

    @abstractmethod
    def trace(self, model: Any, example_inputs: Any, **compiler: Any) -> torch.jit.ScriptModule:
        """Compile a module or function for the shapes and dtypes of `example_inputs`, a tensor or a tuple.

        `compiler` are the runtime's own options.
        """

    @abstractmethod
    def place(self, model: torch.nn.Module, start: int, count: int) -> torch.nn.Module:
        """A copy of a compiled model, loaded onto the cores ``start .. start + count - 1`` in one call.

        The copy takes the cores in turn, one inference each. The model itself stays what and where it is. Of a module that
        holds compiled models the copy has the parameters and buffers around them: not copies of these.

        Raises:
            ReplicaError: nothing in the model was compiled for NeuronCores, or something around it cannot be copied.
            ValueError, DeviceUnavailableError: there are no such cores.
            RuntimeError: the runtime could not load it; there is no memory left on a core, say.
        """

    @abstractmethod
    def unplace(self, placed: torch.nn.Module) -> None:
        """Give back what `place` took on the cores. `placed` is not called any more."""

    @abstractmethod
    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """What takes batches of any size on dim 0, a chunk of the compiled size at a time.

        The model itself, changed in place, where the runtime can do that; else something around it.

        Raises:
            ReplicaError: nothing in the model was compiled for NeuronCores.
            ShapeError: it is not eligible; the message says why.
        """

    @abstractmethod
    def signature(self, model: torch.nn.Module) -> Signature | None:
        """What the model was compiled for; None where the runtime does not tell."""


def no_dynamic_batching(why: object) -> ShapeError:
    """The error for a model of which dynamic batching cannot be had."""
    return ShapeError(f"dynamic batching cannot be had of this model: {why}")


def not_traced(model: object) -> ReplicaError:
    """The error for what was not compiled for NeuronCores, and has no part that was."""
    what = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
    return ReplicaError(f"{what} was not traced for NeuronCores: parawrap.neuron.trace(model, example_inputs) first")


def consecutive(cores: Iterable[int]) -> list[tuple[int, int]]:
    """The runs of consecutive cores, each as its first core and how many: a runtime loads a run in one call.

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

"""The inputs and outputs that a model was compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from parawrap.errors import ShapeError
from parawrap.tree import TreeSpec, addresses

__all__ = ["Signature", "TensorSpec", "no_dynamic_batching"]


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
    """The inputs and outputs of a compiled model, in the order of `parawrap.tree.flatten`."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @classmethod
    def of(cls, inputs: Sequence[Any], takes: TreeSpec, outputs: Sequence[Any], gives: TreeSpec) -> Signature:
        """Return the signature of a call with these leaves and structures. Values other than tensors have no spec."""
        return cls(_specs(inputs, addresses(takes, ("args", "kwargs"))), _specs(outputs, addresses(gives, ("output",))))

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


def no_dynamic_batching(why: object) -> ShapeError:
    """Return the error for a model that cannot use dynamic batching."""
    return ShapeError(f"this model cannot use dynamic batching: {why}")


def _specs(leaves: Sequence[Any], where: Sequence[str]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec.of(leaf, address) for leaf, address in zip(leaves, where, strict=True) if isinstance(leaf, torch.Tensor)
    )

"""Check a call against the inputs that a model was compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parawrap.engine.declarations import Parameters
from parawrap.errors import ShapeError, ShardError
from parawrap.neuroncores._signature import Signature, TensorSpec
from parawrap.tree import flatten_call, unflatten

__all__ = ["Fitting"]


class Fitting:
    """Raises an error for calls that a compiled model cannot take with any number of rows. Immutable.

    The error is raised before the call is cut. The runtime would raise it later, in a lane, for a shard of the call.
    """

    def __init__(self, signature: Signature | None, dim: int, parameters: Parameters | None) -> None:
        self._signature = signature
        self._dim = dim
        self._parameters = parameters
        sizes = {spec.rows(dim) for spec in signature.inputs} if signature is not None else set()
        self._rows_are_alike = len(sizes) == 1 and None not in sizes

    def fit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with keywords as positional arguments and single rows repeated.

        Raises:
            ShapeError: If the model is not compiled for these shapes and dtypes.
            ShardError: If the tensors differ in their number of rows.
        """
        if self._signature is None:
            return args, kwargs
        args, kwargs = self._in_places(args, kwargs)
        if kwargs:
            return args, kwargs
        leaves, spec = flatten_call(args, kwargs)
        self._refuse_unlike(self._signature.inputs, leaves)
        rows = {leaf.shape[self._dim] for leaf in leaves} if self._rows_are_alike else set()
        if len(rows) < 2:
            return args, kwargs
        if len(rows - {1}) > 1:
            raise self._disagreement(self._signature.inputs, leaves)
        fitted: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(spec, self._expand(leaves, sum(rows) - 1))
        return fitted

    def _in_places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call with keywords as positional arguments, if the names of the model's parameters are known."""
        if not kwargs or self._parameters is None:
            return args, kwargs
        names = [self._parameters.at(len(args) + place) for place in range(len(kwargs))]
        if set(names) == set(kwargs):
            return (*args, *(kwargs[name] for name in names if name is not None)), {}
        if all(map(self._parameters.names, kwargs)) and None in names:
            return args, kwargs
        unlike = ", ".join(map(repr, kwargs))
        msg = f"the call names {unlike} after {len(args)} positional values, but the model takes {self._parameters}"
        raise ShapeError(msg)

    def _refuse_unlike(self, specs: Sequence[TensorSpec], leaves: Sequence[Any]) -> None:
        if len(leaves) != len(specs):
            compiled = ", ".join(f"{spec.address} {spec}" for spec in specs)
            msg = f"the call has {len(leaves)} values, but the model is compiled for {len(specs)} tensors: {compiled}"
            raise ShapeError(msg)
        for leaf, spec in zip(leaves, specs, strict=True):
            if not isinstance(leaf, torch.Tensor):
                given = repr(leaf) if isinstance(leaf, (int, float, str, type(None))) else f"a {type(leaf).__name__}"
                msg = f"{spec.address} is {given}, but the model is compiled for a tensor: {spec}"
                raise ShapeError(msg)
            if leaf.dtype != spec.dtype or self._without_rows(leaf.shape) != self._without_rows(spec.shape):
                msg = (
                    f"{spec.misfit(leaf)}. Only the size of dim {self._dim}, the rows, may differ. Trace the model for "
                    "this shape and dtype, or convert the tensor"
                )
                raise ShapeError(msg)

    def _without_rows(self, shape: Sequence[int]) -> list[int]:
        sizes = list(shape)
        if -len(sizes) <= self._dim < len(sizes):
            sizes[self._dim] = -1
        return sizes

    def _disagreement(self, specs: Sequence[TensorSpec], leaves: Sequence[torch.Tensor]) -> ShardError:
        found: dict[int, str] = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            found.setdefault(leaf.shape[self._dim], spec.address)
        found.pop(1, None)
        (rows, first), (other_rows, other), *_ = found.items()
        return ShardError(
            f"the rows of the call disagree: {other} has {other_rows} on dim {self._dim}, {first} has {rows}. Give all "
            "inputs of a compiled model the same number of rows, or one row"
        )

    def _expand(self, leaves: Sequence[torch.Tensor], rows: int) -> list[torch.Tensor]:
        """Return the leaves with single rows broadcast to `rows`, because a core does not broadcast."""
        expanded = []
        for leaf in leaves:
            sizes = list(leaf.shape)
            sizes[self._dim] = rows
            expanded.append(leaf.expand(sizes))
        return expanded

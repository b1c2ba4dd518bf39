"""torch_neuron: NeuronCores of Inf1 instances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from parawrap.backends.neuron._dynamic_batching import in_chunks
from parawrap.backends.neuron._runtime import Signature, no_dynamic_batching
from parawrap.backends.neuron._vendor_runtime import VendorRuntime
from parawrap.tree import TreeSpec, flatten, unflatten

__all__ = ["TorchNeuron"]


class TorchNeuron(VendorRuntime):
    """The vendor's runtime for Inf1. Thread-safe; one instance lives as long as the process.

    Raises:
        ImportError: If torch_neuron is not installed, or cannot be imported.
    """

    name = "torch_neuron"

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return `model` if it was traced with ``dynamic_batch_size=True``, else a module around it that cuts the batch.

        torch_neuron offers dynamic batching only as an option of its trace. It cannot be enabled afterwards.
        """
        parts = [self._traced.get(part) for part in self._eligible_parts(model)]
        if isinstance(model, _InChunks) or all(part and part.options.get("dynamic_batch_size") for part in parts):
            return model
        traced = self._traced.get(model)
        if traced is None or traced.signature is None or traced.outputs is None:
            why = (
                "it is from a file or from another trace, so its compiled shapes are unknown. Trace it in this process "
                "with parawrap.neuron.trace. If it was traced with dynamic_batch_size=True, use it as it is: it takes any "
                "number of rows already"
            )
            raise no_dynamic_batching(why)
        around = _InChunks(model, traced.signature, traced.outputs)
        self._traced[around] = traced
        return around


class _InChunks(torch.nn.Module):
    """A compiled model that takes batches of any size. Thread-safe."""

    def __init__(self, compiled: torch.nn.Module, signature: Signature, outputs: TreeSpec) -> None:
        super().__init__()
        self.compiled = compiled
        self._signature = signature
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors, call = flatten((args, kwargs))
        outputs = self._outputs  # used for a batch with 0 rows, which runs no inference

        def infer(chunk: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal outputs
            some_args, some_kwargs = unflatten(call, chunk)
            leaves, outputs = flatten(self.compiled(*some_args, **some_kwargs))
            return leaves

        leaves = in_chunks(infer, tensors, self._signature)
        return unflatten(outputs, leaves)

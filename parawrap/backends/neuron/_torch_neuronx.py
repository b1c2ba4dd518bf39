"""torch_neuronx: NeuronCores of Inf2 and Trn instances."""

from __future__ import annotations

import torch

from parawrap.backends.neuron._runtime import no_dynamic_batching
from parawrap.backends.neuron._vendor_runtime import VendorRuntime

__all__ = ["TorchNeuronx"]


class TorchNeuronx(VendorRuntime):
    """The vendor's runtime for Inf2 and Trn. Thread-safe; one instance lives as long as the process.

    Raises:
        ImportError: If torch_neuronx is not installed, or cannot be imported.
    """

    name = "torch_neuronx"

    def dynamic_batch(self, model: torch.nn.Module) -> torch.nn.Module:
        """Enable dynamic batching in place, in every compiled part. The vendor's runtime cuts and fills the chunks."""
        parts = self._eligible_parts(model)
        dynamic_batch = self._documented("dynamic_batch")
        for part in parts:
            try:
                dynamic_batch(part)
            except (ValueError, RuntimeError) as error:
                raise no_dynamic_batching(error) from error
        return model

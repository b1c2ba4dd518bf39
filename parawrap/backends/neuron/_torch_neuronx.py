"""torch_neuronx, the generation on torch_xla: NeuronCores of Inf2 and Trn instances."""

from __future__ import annotations

import torch

from parawrap.backends._backend_registry import is_torch_device
from parawrap.backends.neuron._runtime import no_dynamic_batching
from parawrap.backends.neuron._vendor_runtime import VendorRuntime
from parawrap.errors import DeviceUnavailableError

__all__ = ["TorchNeuronx"]

_NO_TRACE = (
    "the installed torch_neuronx has no trace, so 'nc:0' and parawrap.neuron cannot run compiled models: it makes "
    "NeuronCores torch devices. Pass the plain model to parallel(model, ['neuron:0', 'neuron:1']) or to "
    "parawrap.DataParallel(model). For compiled models, install torch-neuronx==2.9.* with torch 2.9, or set "
    "PARAWRAP_NEURON_RUNTIME=host to emulate NeuronCores"
)


class TorchNeuronx(VendorRuntime):
    """The vendor's runtime for Inf2 and Trn. Thread-safe; one instance lives as long as the process.

    Raises:
        ImportError: If torch_neuronx is not installed, or lacks a package that it needs.
        DeviceUnavailableError: If the package is of the newer generation, which has torch devices and no trace.
    """

    name = "torch_neuronx"

    def __init__(self) -> None:
        super().__init__()
        if not hasattr(self._vendor, "trace") and is_torch_device("neuron"):
            raise DeviceUnavailableError(_NO_TRACE)

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

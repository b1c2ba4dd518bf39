"""Tell the two generations of torch_neuronx apart. They share one package name, and offer different names in it.

The newer generation (trn2, trn3) registers a torch device of kind "neuron", which the accelerator backend uses. The older
generation (inf2, trn1, trn2) builds on torch_xla and offers ``trace``. `parawrap.backends.neuron` uses its compiled models.
"""

from __future__ import annotations

from parawrap.backends._backend_registry import is_torch_device

__all__ = ["neuron_is_device"]


def neuron_is_device() -> bool:
    """True if "neuron" names torch devices; False if it names the cores of compiled models.

    Emulated cores take precedence, because PARAWRAP_NEURON_RUNTIME=host and `parawrap.testing.neuron_host` ask for them.
    """
    if not is_torch_device("neuron"):
        return False
    from parawrap.backends.neuron import emulates_cores  # imported only if torch has NeuronCores

    return not emulates_cores()

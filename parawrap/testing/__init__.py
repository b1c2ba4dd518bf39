"""Checks for models, and test doubles for hardware that the machine does not have.

`check_rowwise` checks that a model treats rows independently. :class:`NeuronHost` emulates NeuronCores on the CPU: it
compiles models for fixed shapes, loads them into the memory of cores, and runs one inference at a time on each core.

Import this module before ``torch.jit.load`` of a compiled model: it defines the operator that such a model calls.
"""

from parawrap.faces.check_rowwise import check_rowwise
from parawrap.testing import _inference_operator as _inference_operator  # defines the operator that compiled models call
from parawrap.testing._emulated_cores import CoreStats
from parawrap.testing._neuron_host import NeuronHost, neuron_host

__all__ = ["CoreStats", "NeuronHost", "check_rowwise", "neuron_host"]

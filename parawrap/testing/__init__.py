"""Checks for models, and test doubles for hardware that the machine does not have.

`check_rowwise` shows if a model treats rows independently. :class:`NeuronHost` emulates NeuronCores on the CPU: it compiles
models for fixed shapes, loads them into the memory of cores, and runs one inference at a time there.

A model that was compiled and saved needs this module imported before ``torch.jit.load``: its operator is defined here.
"""

from parawrap.faces.rowwise import check_rowwise
from parawrap.testing import _operator as _operator  # defines the operator that compiled models consist of
from parawrap.testing._cores import CoreStats
from parawrap.testing._neuron_host import NeuronHost, neuron_host

__all__ = ["CoreStats", "NeuronHost", "check_rowwise", "neuron_host"]

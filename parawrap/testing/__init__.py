"""Test doubles that ship with parawrap, for hardware that the machine at hand does not have.

Knows how to stand in for hardware; refuses to know who asks. :class:`NeuronHost` emulates NeuronCores on the CPU: models
are compiled for fixed shapes, loaded into the memory of cores and run there one inference at a time, so that what is
written on a laptop is what is deployed.

A model that was compiled and saved needs this module imported before ``torch.jit.load``: its one operator is defined here.
"""

from parawrap.testing import _operator as _operator  # defines the operator that compiled models consist of
from parawrap.testing._cores import CoreStats
from parawrap.testing._neuron_host import NeuronHost, neuron_host

__all__ = ["CoreStats", "NeuronHost", "neuron_host"]

"""Checks for models, and a double of NeuronCores for machines that have none.

`check_rowwise` checks that a model treats rows independently. `neuron_host` runs models for
NeuronCores on the CPU: it compiles them for fixed shapes, and runs one inference at a time on each
core.
"""

from __future__ import annotations

from parawrap.api.check_rowwise import check_rowwise
from parawrap.neuroncores import NeuronHost, neuron_host

__all__ = ["NeuronHost", "check_rowwise", "neuron_host"]

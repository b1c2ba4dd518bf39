"""The engine on NeuronCores: place a compiled model once, and feed its cores from a pool of lanes.

This package uses the interface of the runtime and the engine's session. It is imported when a call first names cores.
"""

from parawrap.engine.neuron._neuron_pool import open_session
from parawrap.engine.neuron._placed_model import Batching, PlacedModel

__all__ = ["Batching", "PlacedModel", "open_session"]

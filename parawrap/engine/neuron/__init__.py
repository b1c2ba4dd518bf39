"""The engine on NeuronCores: place a compiled model once, and run a session with lanes that feed its cores.

This package uses the interface of the runtime and the engine's session. It is imported when a call first names cores.
"""

from parawrap.engine.neuron._neuron_session import NeuronSession
from parawrap.engine.neuron._placed_model import Batching, PlacedModel

__all__ = ["Batching", "NeuronSession", "PlacedModel"]

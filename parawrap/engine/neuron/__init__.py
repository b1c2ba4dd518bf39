"""The engine on NeuronCores: a compiled model that is placed once, and a session with lanes that feed its cores.

Knows the runtime's contract and the engine's session; refuses to know faces. Imported where cores are named, not before.
"""

from parawrap.engine.neuron._neuron_session import NeuronSession
from parawrap.engine.neuron._placed import Batching, PlacedModel

__all__ = ["Batching", "NeuronSession", "PlacedModel"]

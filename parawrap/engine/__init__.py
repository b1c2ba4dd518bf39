"""Where the four verbs meet: scatter, replicate, apply, gather.

Knows every room below and no face. A session owns the lanes and the replicas of one target; a stream sends whole
batches through them.
"""

from parawrap.engine._entry import Entry, LanesAwaitThread, Ticket
from parawrap.engine._in_place import InPlace
from parawrap.engine._session import Session
from parawrap.engine._stats import LaneStats, Stats
from parawrap.engine._stream import stream
from parawrap.engine._trace import Trace
from parawrap.replicas import ReplicaSet, original_method

__all__ = [
    "Entry",
    "InPlace",
    "LaneStats",
    "LanesAwaitThread",
    "ReplicaSet",
    "Session",
    "Stats",
    "Ticket",
    "Trace",
    "original_method",
    "stream",
]

"""Where the four verbs meet: scatter, replicate, apply, gather.

Knows every room below and no face. A session owns the lanes and the replicas of one target; a stream sends whole
batches through them.
"""

from parawrap.engine._call import LanesAwaitThread, Ticket
from parawrap.engine._entry import Entry
from parawrap.engine._in_place import InPlace
from parawrap.engine._planned import PlannedSession
from parawrap.engine._session import Session
from parawrap.engine._stats import LaneStats, Stats
from parawrap.engine._stream import stream
from parawrap.engine._trace import Trace
from parawrap.engine.plan import Plan, plan_of
from parawrap.replicas import ReplicaSet, original_method

__all__ = [
    "Entry",
    "InPlace",
    "LaneStats",
    "LanesAwaitThread",
    "Plan",
    "PlannedSession",
    "ReplicaSet",
    "Session",
    "Stats",
    "Ticket",
    "Trace",
    "original_method",
    "plan_of",
    "stream",
]

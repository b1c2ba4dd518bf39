"""One MODULE on many devices: its replicas, and the cache that keeps them fresh.

Knows modules, parameters and buffers; refuses to know threads and calls. A replica on the module's own device shares
its parameters; one on another device has copies, written in place when the originals change and never rebuilt for it.
"""

from parawrap.replicas._set import Freshness, LaneReplica, ReplicaSet, home_of
from parawrap.replicas._stand_in import StandIn, original_method, put, restore, without_stand_ins
from parawrap.replicas._watch import module_tree

__all__ = [
    "Freshness",
    "LaneReplica",
    "ReplicaSet",
    "StandIn",
    "home_of",
    "module_tree",
    "original_method",
    "put",
    "restore",
    "without_stand_ins",
]

"""Replicas of a model, one per lane, and what keeps them up to date.

Knows modules, parameters, buffers, and Python objects; knows no threads and no calls. A replica is a copy of everything
that the model holds. On the model's device it has views of the parameters; on another device it has copies, and their
gradients return to the parameters.
"""

from parawrap.replicas._batched_copies import lasting
from parawrap.replicas._hidden_modules import names_of_globals
from parawrap.replicas._ledger import Ledger, buffers_written_unseen, may_be_written_unseen, with_other_buffers
from parawrap.replicas._method_stand_ins import PlainView, StandIn, original_method, put, restore
from parawrap.replicas._private_names import COMPILED_CALL, buffers_of, compiler, version_of
from parawrap.replicas._replica_set import Freshness, LaneReplica, ReplicaSet, home_of
from parawrap.replicas._snapshot import Snapshot
from parawrap.replicas._survey import Survey

__all__ = [
    "COMPILED_CALL",
    "Freshness",
    "LaneReplica",
    "Ledger",
    "PlainView",
    "ReplicaSet",
    "Snapshot",
    "StandIn",
    "Survey",
    "buffers_of",
    "buffers_written_unseen",
    "compiler",
    "home_of",
    "lasting",
    "may_be_written_unseen",
    "names_of_globals",
    "original_method",
    "put",
    "restore",
    "version_of",
    "with_other_buffers",
]

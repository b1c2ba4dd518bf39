"""How a CALL is cut into shards, and how the outputs of the shards are joined.

Knows rows, leaves and the devices that shards go to; refuses to know threads and modules. Nothing is ever padded,
truncated or dropped: the rows of the shards, in lane order, are the rows of the call.
"""

from parawrap.shards._cutter import Cutter, Sizes
from parawrap.shards._gather import GatherRules, Originals, Reduce, gather
from parawrap.shards._parameters import Parameters
from parawrap.shards._plan import CALL_ROOTS, FlatCall, Piece, Shard, ShardPlan, balanced, in_proportion, in_units
from parawrap.shards._split import register_split
from parawrap.shards._verify import check_equal

__all__ = [
    "CALL_ROOTS",
    "Cutter",
    "FlatCall",
    "GatherRules",
    "Originals",
    "Parameters",
    "Piece",
    "Reduce",
    "Shard",
    "ShardPlan",
    "Sizes",
    "balanced",
    "check_equal",
    "gather",
    "in_proportion",
    "in_units",
    "register_split",
]

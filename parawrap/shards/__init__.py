"""How a call is cut into shards, and how the outputs of the shards are joined.

Knows rows, leaves, and the devices that shards go to; knows no threads and no modules. The rows of the shards, in lane
order, are the rows of the call: nothing is padded, truncated, or dropped.
"""

from parawrap.shards._cut import Cutter, FlatCall, InDim, Piece, Shard, ShardPlan
from parawrap.shards._join import Evidence, Originals, join, with_originals
from parawrap.shards._join_rules import JoinRules, OutDims, Reduce
from parawrap.shards._parameters import Parameters
from parawrap.shards._sizes import Sizes, balanced, in_units
from parawrap.shards._split import register_split
from parawrap.shards._verify import check_equal
from parawrap.shards._whole import check_whole

__all__ = [
    "Cutter",
    "Evidence",
    "FlatCall",
    "InDim",
    "JoinRules",
    "Originals",
    "OutDims",
    "Parameters",
    "Piece",
    "Reduce",
    "Shard",
    "ShardPlan",
    "Sizes",
    "balanced",
    "check_equal",
    "check_whole",
    "in_units",
    "join",
    "register_split",
    "with_originals",
]

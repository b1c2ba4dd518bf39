"""How a call is cut into shards, and how the outputs of the shards are joined.

Knows rows, leaves, and the devices that shards go to; knows no threads and no modules. The rows of the shards, in lane
order, are the rows of the call: nothing is padded, truncated, or dropped.
"""

from parawrap.shards._check_whole_output import check_whole
from parawrap.shards._cut import Cutter, FlatCall, InDim, Piece, Shard, ShardPlan
from parawrap.shards._join_outputs import Evidence, Originals, join, with_originals
from parawrap.shards._output_options import JoinRules, OutDims, Reduce
from parawrap.shards._parameter_names import Parameters
from parawrap.shards._register_split import register_split
from parawrap.shards._shard_sizes import Sizes, balanced, in_units
from parawrap.shards._verify_output import check_equal

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

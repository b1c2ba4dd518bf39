"""How a call is cut into shards, and how the outputs of the shards are joined.

Knows rows, leaves, and the devices that shards go to; knows no threads and no modules. The rows of the shards, in lane
order, are the rows of the call: nothing is padded, truncated, or dropped.
"""

from parawrap.shards._concatenate import have_one_scale
from parawrap.shards._cut import Cutter, FlatCall, InDim, Parameters, Piece, Shard, ShardPlan
from parawrap.shards._join_outputs import Originals, join, with_originals
from parawrap.shards._join_rules import JoinRules, OutDims, Reduce, as_tree, entries_of
from parawrap.shards._register_split import register_split
from parawrap.shards._shard_sizes import Sizes, balanced_sizes, equal_sizes, sizes_in_units, uneven_sizes

__all__ = [
    "Cutter",
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
    "as_tree",
    "balanced_sizes",
    "entries_of",
    "equal_sizes",
    "have_one_scale",
    "join",
    "register_split",
    "sizes_in_units",
    "uneven_sizes",
    "with_originals",
]

"""What a VALUE is: nested containers, their leaves, and an address for each leaf.

Knows containers; refuses to know devices, rows and modules. Every walk over a nested value in parawrap goes through
this room, and this room goes through optree: list, tuple, namedtuple, dict, OrderedDict, defaultdict and deque are
optree's own; dataclasses and the subclasses of Mapping, list and tuple are learnt the first time that one is seen, and
are rebuilt as the type they were.
"""

from parawrap.tree._nested import (
    Opaque,
    TreeSpec,
    address,
    addresses,
    flatten,
    flatten_call,
    flatten_outside_sequences,
    keep_whole,
    keep_whole_if,
    mismatch,
    replace_nodes,
    sequences,
    unflatten,
)
from parawrap.tree._search import tensors_in

__all__ = [
    "Opaque",
    "TreeSpec",
    "address",
    "addresses",
    "flatten",
    "flatten_call",
    "flatten_outside_sequences",
    "keep_whole",
    "keep_whole_if",
    "mismatch",
    "replace_nodes",
    "sequences",
    "tensors_in",
    "unflatten",
]

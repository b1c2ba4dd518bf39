"""Nested values: flatten containers to leaves, rebuild them, and give each leaf an address.

All code in parawrap that walks over nested values uses this package, which uses optree. It has no code for devices, rows,
or modules. optree supports list, tuple, namedtuple, dict, OrderedDict, defaultdict, and deque. This package registers
dataclasses and subclasses of Mapping, list, and tuple when it first meets each class, and rebuilds values as that class.
"""

from parawrap.tree._find_tensors import tensors_in
from parawrap.tree._flatten import (
    TreeSpec,
    WholeLeaf,
    address,
    addresses,
    flatten,
    flatten_call,
    flatten_outside_sequences,
    keep_whole,
    keep_whole_if,
    mismatch,
    named_children,
    replace_nodes,
    sequences,
    unflatten,
    with_children,
)

__all__ = [
    "TreeSpec",
    "WholeLeaf",
    "address",
    "addresses",
    "flatten",
    "flatten_call",
    "flatten_outside_sequences",
    "keep_whole",
    "keep_whole_if",
    "mismatch",
    "named_children",
    "replace_nodes",
    "sequences",
    "tensors_in",
    "unflatten",
    "with_children",
]

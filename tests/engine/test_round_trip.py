"""Joining the shards of a call gives the call again: no row is padded, dropped,
repeated, or moved.
"""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from parawrap.engine.cut import Cutter
from parawrap.engine.join import join
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.shard_sizes import balanced_sizes, uneven_sizes
from parawrap.tree import flatten, unflatten
from tests.helpers.properties import given, st
from tests.helpers.same import assert_same
from tests.helpers.shards import CPU

rules = st.sampled_from([balanced_sizes, uneven_sizes])
Pair = namedtuple("Pair", "first second")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
]


@dataclasses.dataclass(frozen=True)
class Record:
    value: Any
    label: str = "a record"


class Tagged(list):
    """A list subclass, which is always a container and never a list with one item per row."""


def tensors(rows: int, dim: int):
    """Strategy for tensors with `rows` rows on `dim` and different numbers in each row."""

    def made(rest: list[int], dtype: torch.dtype) -> torch.Tensor:
        shape = [*rest, rows] if dim == -1 else [*rest[:dim], rows, *rest[dim:]]
        return torch.arange(math.prod(shape)).reshape(shape).to(dtype)

    return st.builds(
        made,
        st.lists(st.integers(1, 3), min_size=1 if dim == 1 else 0, max_size=2),
        st.sampled_from(DTYPES),
    )


def trees(leaves):
    def grown(values):
        few = st.lists(values, min_size=1, max_size=3)
        items = st.dictionaries(st.sampled_from("abcd"), values, min_size=1, max_size=3)
        pairs = st.builds(Pair, values, values) | st.builds(Record, values)
        return few | few.map(tuple) | items | items.map(OrderedDict) | pairs

    return st.recursive(leaves, grown, max_leaves=6)


@st.composite
def calls(draw):
    rows, dim = draw(st.integers(0, 20)), draw(st.sampled_from([0, 1, -1]))
    numbers = st.integers() | st.floats(allow_nan=True) | st.builds(torch.tensor, st.floats(0, 1))
    tree = trees(tensors(rows, dim) | st.none() | st.text("abc", max_size=2) | numbers)
    args = tuple(draw(st.lists(tree, max_size=2)))
    kwargs = draw(st.dictionaries(st.sampled_from(["x", "mask"]), tree, max_size=2))
    return args, kwargs, rows, dim, draw(st.integers(1, 8))


def cut(call, sizes):
    args, kwargs, _, dim, lanes = call
    used = Cutter(dim, lists_are_shared=True, sizes=sizes)
    flat = used.flatten(args, kwargs)
    plan = used.plan(flat, lanes)
    return flat, plan, plan.scatter(flat, [CPU] * len(plan.sizes))


def declared(plan, value):
    """Return the tree of `out_dims` for the call itself: the dim of each cut leaf, and None for the
    other leaves.
    """
    leaves, spec = flatten(value)
    return as_tree(unflatten(spec, [SimpleNamespace(dim=dim) for dim in plan.dims[: len(leaves)]]))


def as_tree(value):
    if isinstance(value, SimpleNamespace):
        return value.dim
    if isinstance(value, Mapping):
        return {key: as_tree(below) for key, below in value.items()}
    return as_tree(vars(value)) if isinstance(value, Record) else tuple(map(as_tree, value))


def is_number(leaf):
    return isinstance(leaf, (int, float)) or (isinstance(leaf, torch.Tensor) and leaf.ndim == 0)


@given(calls(), rules)
def test_joined_shards_are_the_call(call, sizes):
    """With declared dims, join(scatter(tree)) equals tree for any tree, row count, dim, dtype, and
    number of lanes.

    Without `out_dims`, uneven shards are joined to the call if it holds neither numbers nor lists.
    """
    value = call[:2]
    flat, plan, shards = cut(call, sizes)
    assert len(shards) == len(plan.sizes) <= call[4]
    assert [shard.rows for shard in shards] == list(plan.sizes) == list(sizes(plan.rows, call[4]))
    assert plan.rows in (call[2], 0, 1)
    leaves = [flatten((shard.args, shard.kwargs))[0] for shard in shards]
    for shard, found in zip(shards, leaves, strict=True):
        for leaf, dim, original in zip(found, plan.dims, flat.leaves, strict=True):
            assert leaf is original if dim is None else leaf.shape[dim] == shard.rows
    rules = JoinRules(call[3], out_dims=declared(plan, value))
    assert_same(join([(shard.args, shard.kwargs) for shard in shards], plan.sizes, rules), value)
    if sizes is uneven_sizes and len(shards) > 1:
        outputs = [
            Tagged(leaf for leaf in found if not is_number(leaf))
            for found in (*leaves, flat.leaves)
        ]
        assert_same(join(outputs[:-1], plan.sizes, JoinRules(call[3])), outputs[-1])

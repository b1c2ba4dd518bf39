"""Joining the shards of a call gives the call again: no row is padded, dropped, repeated, or moved."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parawrap.shards import Cutter, JoinRules, balanced, equal, join, uneven
from parawrap.tree import flatten, unflatten

CPU = torch.device("cpu")
rules = st.sampled_from([balanced, uneven, equal])
Pair = namedtuple("Pair", "first second")

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@dataclasses.dataclass(frozen=True)
class Record:
    value: Any
    label: str = "a record"


class Fields(UserDict):
    """A Mapping that is not a dict."""


def tensors(rows: int, dim: int):
    """Strategy for tensors with `rows` rows on `dim` and different numbers in each row."""

    def made(rest: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shape = list(rest)
        shape.insert(len(shape) if dim == -1 else dim, rows)
        count = torch.Size(shape).numel()
        return torch.arange(count).reshape(shape).to(dtype)

    least = 1 if dim == 1 else 0
    rests = st.lists(st.integers(1, 3), min_size=least, max_size=2).map(tuple)
    return st.builds(made, rests, st.sampled_from(DTYPES))


def trees(leaves):
    def grown(values):
        few = st.lists(values, min_size=1, max_size=3)
        items = st.dictionaries(st.sampled_from("abcd"), values, min_size=1, max_size=3)
        return st.one_of(
            few,
            few.map(tuple),
            items,
            items.map(OrderedDict),
            items.map(Fields),
            st.builds(Pair, values, values),
            st.builds(Record, values),
        )

    return st.recursive(leaves, grown, max_leaves=6)


@st.composite
def calls(draw):
    rows, dim = draw(st.integers(0, 20)), draw(st.sampled_from([0, 1, -1]))
    shared = (
        st.none()
        | st.integers()
        | st.floats(allow_nan=True)
        | st.text(max_size=2)
        | st.builds(torch.tensor, st.floats(0, 1))
    )
    tree = trees(tensors(rows, dim) | shared)
    args = tuple(draw(st.lists(tree, max_size=2)))
    kwargs = draw(st.dictionaries(st.sampled_from(["x", "mask"]), tree, max_size=2))
    return args, kwargs, rows, dim, draw(st.integers(1, 8))


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
    return type(one) is type(other) and (one == other or (one != one and other != other))


def cut(call, sizes=balanced):
    args, kwargs, _, dim, lanes = call
    cutter = Cutter(dim, lists_are_shared=True, sizes=sizes)
    flat = cutter.flatten(args, kwargs)
    plan = cutter.plan(flat, lanes)
    return flat, plan, plan.scatter(flat, [CPU] * len(plan.sizes))


def declared(plan, value):
    """Return the tree of `out_dims` for the call itself: the dim of each cut leaf, and None for the other leaves."""
    leaves, spec = flatten(value)
    marks = iter(plan.dims)
    return _as_tree(unflatten(spec, [_Mark(next(marks)) for _ in leaves]))


class _Mark:
    def __init__(self, dim):
        self.dim = dim


def _as_tree(value):
    if isinstance(value, _Mark):
        return value.dim
    if isinstance(value, Mapping):
        return {key: _as_tree(below) for key, below in value.items()}
    if isinstance(value, Record):
        return {"value": _as_tree(value.value), "label": _as_tree(value.label)}
    return tuple(map(_as_tree, value))


def assert_same(joined, value):
    before, spec = flatten(value)
    after, spec_after = flatten(joined)
    assert spec == spec_after
    assert all(map(same, after, before))


@given(calls(), rules)
@settings(deadline=None)
def test_joining_the_shards_of_a_call_gives_the_call(call, sizes):
    """With declared dims, join(scatter(tree)) equals tree for any tree, row count, dim, dtype, and number of lanes."""
    value = call[:2]
    _, plan, shards = cut(call, sizes)
    assert len(shards) == len(plan.sizes) <= call[4]
    assert [shard.rows for shard in shards] == list(plan.sizes)
    rules = JoinRules(call[3], out_dims=declared(plan, value))
    assert_same(join([(shard.args, shard.kwargs) for shard in shards], plan.sizes, rules), value)


@given(calls())
@settings(deadline=None)
def test_shards_of_different_sizes_show_how_to_join_them(call):
    """Without `out_dims`, shards of different sizes are joined to the call if it holds neither numbers nor lists."""
    _, plan, shards = cut(call, uneven)
    if len(plan.sizes) == 1:
        return
    outputs = [tuple(leaf for leaf in flatten((shard.args, shard.kwargs))[0] if not number(leaf)) for shard in shards]
    whole = tuple(leaf for leaf in flatten(call[:2])[0] if not number(leaf))
    assert_same(join([Tagged(output) for output in outputs], plan.sizes, JoinRules(call[3])), Tagged(whole))


class Tagged(list):
    """A list subclass, which is always a container and never a list with one item per row."""


def number(leaf):
    return isinstance(leaf, (int, float)) or (isinstance(leaf, torch.Tensor) and leaf.ndim == 0)


@given(calls(), rules)
@settings(deadline=None)
def test_every_shard_has_its_rows(call, sizes):
    """Each cut leaf has its shard's row count on its dim. Other leaves are the caller's objects."""
    rows = call[2]
    flat, plan, shards = cut(call, sizes)
    assert plan.rows in (rows, 0, 1)
    assert plan.sizes == sizes(plan.rows, call[4])
    for shard in shards:
        for leaf, dim, original in zip(flatten((shard.args, shard.kwargs))[0], plan.dims, flat.leaves, strict=True):
            if dim is None:
                assert leaf is original
            else:
                assert leaf.shape[dim] == shard.rows


def split(x, lanes=2):
    flat = Cutter().flatten((x,), {})
    plan = Cutter().plan(flat, lanes)
    return plan, plan.scatter(flat, [CPU] * lanes)


def test_shards_on_the_same_device_are_views():
    """Shards on the input's device share its memory."""
    x = torch.arange(6.0)
    first, second = split(x)[1]
    assert first.args[0].data_ptr() == x.data_ptr()
    second.args[0][0] = 9
    assert x[3] == 9


def test_gradients_flow_through_scatter_and_join():
    """Cutting and joining is differentiable."""
    x = torch.arange(5.0, requires_grad=True)
    plan, shards = split(x)
    join([shard.args[0] ** 2 for shard in shards], plan.sizes, JoinRules()).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())

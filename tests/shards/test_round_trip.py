"""Whatever is cut is whole again when it is joined: no row is padded, dropped, doubled or moved."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from parawrap.errors import GatherError
from parawrap.shards import Cutter, GatherRules, balanced, gather
from parawrap.tree import flatten

CPU = torch.device("cpu")
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
    """A Mapping that is no dict."""


def tensors(rows: int, dim: int):
    """Tensors that have so many rows on `dim`, and hold numbers that tell the rows apart."""

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


@given(calls())
@settings(deadline=None)
def test_joining_the_shards_of_a_call_gives_the_call(call):
    """gather(scatter(tree)) == tree, for any tree, count of rows, dim, dtypes and number of lanes."""
    args, kwargs, _, dim, lanes = call
    plan, leaves = Cutter(dim, lists_are_shared=True).plan(args, kwargs, lanes)
    shards = plan.scatter(leaves, [CPU] * lanes)
    assert len(shards) == len(plan.sizes) <= max(1, lanes)
    assert [shard.rows for shard in shards] == list(plan.sizes)

    try:
        joined = gather([(shard.args, shard.kwargs) for shard in shards], plan.sizes, GatherRules(dim), None)
    except GatherError as error:
        assume("one item a row" not in str(error))  # a list that every lane returned, as long as its shard
        raise

    before, spec = flatten((args, kwargs))
    after, spec_after = flatten(joined)
    assert spec == spec_after
    assert all(map(same, after, before))


@given(calls())
@settings(deadline=None)
def test_every_shard_has_the_rows_that_it_says(call):
    """Each cut leaf has, on its dim, as many rows as its shard; the rest is shared as it is."""
    args, kwargs, rows, dim, lanes = call
    plan, leaves = Cutter(dim, lists_are_shared=True).plan(args, kwargs, lanes)
    assert plan.rows in (rows, 0, 1)
    assert max(plan.sizes) - min(plan.sizes) <= 1
    for shard in plan.scatter(leaves, [CPU] * lanes):
        for leaf, cut, original in zip(flatten((shard.args, shard.kwargs))[0], plan.dims, leaves.leaves, strict=True):
            if cut is None:
                assert leaf is original
            else:
                assert leaf.shape[cut] == shard.rows


@given(st.integers(0, 200), st.integers(1, 16))
def test_balanced_sizes_add_up_and_differ_by_at_most_one(rows, parts):
    """The larger come first, none is empty, and there are as many as there is work for."""
    sizes = balanced(rows, parts)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) == max(1, min(rows, parts))


def test_shards_on_the_same_device_are_views():
    """Rows that lie on the lane's device are not copied."""
    x = torch.arange(6.0)
    plan, leaves = Cutter().plan((x,), {}, 2)
    first, second = plan.scatter(leaves, [CPU, CPU])
    assert first.args[0].data_ptr() == x.data_ptr()
    second.args[0][0] = 9
    assert x[3] == 9


def test_gradients_flow_through_scatter_and_gather():
    """Cutting and joining is differentiable, row by row."""
    x = torch.arange(5.0, requires_grad=True)
    plan, leaves = Cutter().plan((x,), {}, 2)
    outputs = [shard.args[0] ** 2 for shard in plan.scatter(leaves, [CPU] * 2)]
    gather(outputs, plan.sizes, GatherRules(), None).sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())

"""Row counts of shards: balanced, uneven (so that sizes show which outputs follow the rows), equal, and in units."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parawrap.errors import ShardError
from parawrap.shards import Cutter, balanced, equal, in_units, uneven

EVERY = list(product(range(201), range(1, 17)))
"""Rows and lanes."""

counts = st.integers(0, 10_000)
lanes = st.integers(1, 64)


def are_descending(sizes):
    return all(one >= other for one, other in pairwise(sizes))


@given(counts, lanes)
def test_balanced_sizes_add_up_and_differ_by_at_most_one(rows, parts):
    """Larger sizes are first, sizes are positive unless `rows` is 0, and there are at most `parts` sizes."""
    sizes = balanced(rows, parts)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert are_descending(sizes)
    assert len(sizes) == max(1, min(rows, parts))


# Uneven sizes


def test_uneven_sizes_by_example():
    """The sizes are those of the design."""
    examples = {
        (9, 2): (5, 4),
        (8, 2): (5, 3),
        (16, 2): (9, 7),
        (8, 4): (3, 3, 2),
        (6, 3): (4, 2),
        (6, 2): (4, 2),
        (4, 4): (2, 1, 1),
        (3, 3): (2, 1),
        (4, 2): (4,),
        (2, 2): (2,),
        (2, 8): (2,),
        (1, 2): (1,),
        (0, 2): (0,),
    }
    assert {each: uneven(*each) for each in examples} == examples


def test_uneven_sizes_add_up():
    """The sizes add up to `rows`, the larger first; none is zero unless `rows` is; there are at most `parts`."""
    for rows, parts in EVERY:
        sizes = uneven(rows, parts)
        assert sum(sizes) == rows
        assert are_descending(sizes)
        assert min(sizes) > 0 or sizes == (0,)
        assert len(sizes) <= parts


def test_uneven_sizes_are_never_all_equal():
    """Several shards have at least two sizes, so a size that does not come from the rows cannot match all of them."""
    for rows, parts in EVERY:
        sizes = uneven(rows, parts)
        assert len(sizes) == 1 or sizes[0] > sizes[-1], (rows, parts, sizes)


def test_sizes_that_differ_already_stay_balanced():
    """Where the rows do not divide evenly, uneven sizes are the balanced ones."""
    for rows, parts in EVERY:
        usual = balanced(rows, parts)
        if usual[0] != usual[-1]:
            assert uneven(rows, parts) == usual


def test_a_call_stays_whole_only_if_two_sizes_would_leave_one_row_next_to_more():
    """One lane, one row, and two lanes with two or four rows: nothing else stays whole."""
    for rows, parts in EVERY:
        used = min(rows, parts)
        assert (len(uneven(rows, parts)) == 1) == (used < 2 or (used == 2 and rows in (2, 4)))


def test_uneven_sizes_make_no_shard_of_one_row():
    """Batch norm refuses one row in train mode. A shard has one row only if a balanced shard has."""
    for rows, parts in EVERY:
        if rows > 1 and min(balanced(rows, parts)) > 1:
            assert min(uneven(rows, parts)) > 1, (rows, parts)


def test_the_largest_uneven_shard_has_one_row_more_than_a_balanced_one():
    """One row more at most, or two where 2 lanes share 4 rows and 3 lanes share 6."""
    for rows, parts in EVERY:
        more = max(uneven(rows, parts)) - max(balanced(rows, parts))
        assert more == 2 if (rows, parts) in ((4, 2), (6, 3)) else more in (0, 1)


def test_uneven_sizes_leave_at_most_one_lane_idle():
    """One lane fewer works at most, and only with one or two rows per lane."""
    for rows, parts in EVERY:
        idle = len(balanced(rows, parts)) - len(uneven(rows, parts))
        assert idle in (0, 1)
        assert idle == 0 or rows in (min(rows, parts), 2 * parts)


# Sizes in units


@given(counts, lanes, st.integers(1, 16))
def test_sizes_in_units_are_multiples_except_the_last_one(rows, parts, unit):
    """The sizes add up to `rows`, and all but the last are multiples of `unit`."""
    *full, last = in_units(rows, parts, unit)
    assert sum(full) + last == rows
    assert all(size % unit == 0 and size > 0 for size in full)
    assert last > 0 or rows == 0
    assert len(full) < parts


# Equal sizes


def test_equal_sizes_add_up():
    """All sizes but the last, which may be smaller, are equal. There are at most `parts`, and at most two sizes."""
    for rows, parts in EVERY:
        sizes = equal(rows, parts)
        *full, last = sizes
        assert sum(sizes) == rows
        assert len(sizes) <= parts
        assert set(full) <= {-(-rows // parts)}
        assert are_descending(sizes)
        assert last > 0 or sizes == (0,)


# The sizes of a cutter


def plan_of(cutter, rows, lanes=2):
    return cutter.plan(cutter.flatten((torch.empty(rows, 2),), {}), lanes)


@pytest.mark.parametrize("rule", [balanced, uneven, equal])
def test_sizes_do_not_depend_on_earlier_calls(rule):
    """A row count is cut in the same way, whatever calls came before."""
    used, order = Cutter(sizes=rule), [64, 20, 5, 61, 64, 7, 20]
    assert [plan_of(used, rows, 4).sizes for rows in order] == [rule(rows, 4) for rows in order]


def test_shards_are_balanced_by_default():
    """A cutter without options makes balanced shards."""
    assert plan_of(Cutter(), 8).sizes == (4, 4)


@pytest.mark.parametrize("unit", [2, 3, 8])
def test_sizes_are_multiples_of_the_unit(unit):
    """The rule counts units, and each shard holds whole units."""
    cutter = Cutter(sizes=uneven, unit=unit)
    for units, parts in product(range(1, 40), range(1, 6)):
        assert plan_of(cutter, units * unit, parts).sizes == tuple(unit * size for size in uneven(units, parts))


@pytest.mark.parametrize(("rows", "counts"), [(12, "8 or 16"), (7, "8"), (17, "16 or 24")])
def test_a_batch_that_is_not_a_multiple_of_the_unit_is_refused(rows, counts):
    """The error names the argument, the rows, the unit, and the row counts next to it."""
    with pytest.raises(ShardError) as caught:
        plan_of(Cutter(sizes=uneven, unit=8), rows)
    for part in (f"args[0] has {rows} rows", "not a multiple of unit=8", f"a batch of {counts} rows"):
        assert part in str(caught.value)


def test_an_empty_batch_is_a_multiple_of_every_unit():
    """Zero rows are never refused."""
    assert plan_of(Cutter(sizes=uneven, unit=8), 0).sizes == (0,)


# The hint about a large shard


def test_a_shard_that_is_an_eighth_larger_than_a_balanced_one_has_a_hint():
    """The hint names the rows, the lanes, the shard, and the largest shard with out_dims=0."""
    hint = plan_of(Cutter(sizes=uneven), 8).hint
    assert hint == (
        "a call of 8 rows on 2 lanes has a shard of 5 rows, because the sizes of shards must differ to show which outputs "
        "follow the rows. With out_dims=0, the largest shard has 4 of them"
    )


def test_a_call_that_runs_whole_has_a_hint():
    """The hint says that no lane shares the call."""
    hint = plan_of(Cutter(sizes=uneven), 4).hint
    assert hint.startswith("a call of 4 rows on 2 lanes runs whole, because the sizes of shards must differ")
    assert hint.endswith("With out_dims=0, the largest shard has 2 of them")


def test_the_hint_appears_only_beyond_an_eighth():
    """An eighth of the largest balanced shard is allowed. Other rules have no hint."""
    for rows, parts in EVERY:
        sizes, largest = uneven(rows, parts), balanced(rows, parts)[0]
        assert (plan_of(Cutter(sizes=uneven), rows, parts).hint is not None) == (8 * sizes[0] > 9 * largest)
        assert plan_of(Cutter(), rows, parts).hint is None
        assert plan_of(Cutter(sizes=equal), rows, parts).hint is None


def test_the_hint_counts_in_units():
    """With units, the hint compares rows, and the largest balanced shard holds whole units."""
    assert "has a shard of 20 rows" in plan_of(Cutter(sizes=uneven, unit=4), 32).hint
    assert plan_of(Cutter(sizes=uneven, unit=4), 32).hint.endswith("has 16 of them")
    assert plan_of(Cutter(sizes=uneven, unit=4), 36).hint is None

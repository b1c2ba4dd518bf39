"""Row counts of shards: balanced, uneven (so that sizes show which outputs follow the rows), equal, and in units."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch

from parawrap.shards import Cutter, balanced, equal, in_units, uneven
from tests.helpers.properties import given, st
from tests.helpers.shards import planned

EVERY = list(product(range(201), range(1, 17)))
"""Rows and lanes."""


def are_descending(sizes):
    return all(one >= other for one, other in pairwise(sizes))


@pytest.mark.parametrize("rule", [balanced, uneven, equal, lambda rows, parts: in_units(rows, parts, 3)])
def test_sizes_add_up(rule):
    """The larger sizes are first, none is zero unless `rows` is, and there are at most as many as lanes."""
    for rows, parts in EVERY:
        sizes = rule(rows, parts)
        assert sum(sizes) == rows
        assert are_descending(sizes) or rule not in (balanced, uneven, equal)
        assert min(sizes) > 0 or sizes == (0,)
        assert len(sizes) <= parts


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_balanced_sizes_differ_by_at_most_one(rows, parts):
    sizes = balanced(rows, parts)
    assert sizes[0] - sizes[-1] <= 1
    assert len(sizes) == max(1, min(rows, parts))


def test_equal_sizes_have_one_rest():
    """All sizes but the last, which may be smaller, are equal."""
    for rows, parts in EVERY:
        *full, _ = equal(rows, parts)
        assert set(full) <= {-(-rows // parts)}


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 16))
def test_sizes_in_units_are_multiples(rows, parts, unit):
    """All but the last are; the units are balanced."""
    *full, last = in_units(rows, parts, unit)
    assert all(size % unit == 0 for size in full)
    assert [size // unit for size in full] + [-(-last // unit)] == [*balanced(-(-rows // unit), parts)]


# Uneven sizes


def test_uneven_sizes_by_example():
    examples = {(9, 2): (5, 4), (8, 2): (5, 3), (16, 2): (9, 7), (8, 4): (3, 3, 2), (6, 3): (4, 2), (6, 2): (4, 2)}
    examples |= {(4, 4): (2, 1, 1), (3, 3): (2, 1), (4, 2): (4,), (2, 2): (2,), (2, 8): (2,), (1, 2): (1,), (0, 2): (0,)}
    assert {each: uneven(*each) for each in examples} == examples


def test_uneven_sizes_are_never_all_equal():
    """A size that does not come from the rows cannot match all of them. Sizes that differ already stay balanced."""
    for rows, parts in EVERY:
        sizes, usual = uneven(rows, parts), balanced(rows, parts)
        assert len(sizes) == 1 or sizes[0] > sizes[-1], (rows, parts, sizes)
        if usual[0] != usual[-1]:
            assert sizes == usual


def test_uneven_calls_that_stay_whole():
    """One lane, one row, and two lanes with two or four rows: a second size would leave one row next to more."""
    for rows, parts in EVERY:
        used = min(rows, parts)
        assert (len(uneven(rows, parts)) == 1) == (used < 2 or (used == 2 and rows in (2, 4)))


def test_uneven_sizes_make_no_shard_of_one_row():
    """Batch norm refuses one row in train mode."""
    for rows, parts in EVERY:
        if rows > 1 and min(balanced(rows, parts)) > 1:
            assert min(uneven(rows, parts)) > 1, (rows, parts)


def test_uneven_sizes_cost_little():
    """The largest shard has one row more at most, and at most one lane is idle, with few rows per lane."""
    for rows, parts in EVERY:
        sizes, usual = uneven(rows, parts), balanced(rows, parts)
        more, idle = sizes[0] - usual[0], len(usual) - len(sizes)
        assert more == 2 if (rows, parts) in ((4, 2), (6, 3)) else more in (0, 1)
        assert idle == 0 or (idle == 1 and rows in (min(rows, parts), 2 * parts))


# The sizes of a cutter


def plan_of(used, rows, lanes=2):
    return planned(used, torch.empty(rows, 2), lanes=lanes)[0]


@pytest.mark.parametrize("rule", [balanced, uneven, equal])
def test_sizes_do_not_depend_on_earlier_calls(rule):
    used, order = Cutter(sizes=rule), [64, 20, 5, 61, 64, 7, 20]
    assert [plan_of(used, rows, 4).sizes for rows in order] == [rule(rows, 4) for rows in order]
    assert plan_of(Cutter(), 8).sizes == (4, 4)


@pytest.mark.parametrize("unit", [2, 3, 8])
def test_a_unit_stays_in_one_shard(unit):
    used = Cutter(sizes=uneven, unit=unit)
    for units, parts in product(range(40), range(1, 6)):
        assert plan_of(used, units * unit, parts).sizes == tuple(unit * size for size in uneven(units, parts))


@pytest.mark.parametrize(
    ("rows", "lanes", "unit", "does", "largest"),
    [
        (8, 2, 1, "a call of 8 rows on 2 lanes has a shard of 5 rows", 4),
        (4, 2, 1, "a call of 4 rows on 2 lanes runs whole", 2),
        (32, 2, 4, "a call of 32 rows on 2 lanes has a shard of 20 rows", 16),
    ],
)
def test_a_large_shard_has_a_hint(rows, lanes, unit, does, largest):
    hint = plan_of(Cutter(sizes=uneven, unit=unit), rows, lanes).hint
    why = "because the sizes of shards must differ to show which outputs follow the rows"
    assert hint == f"{does}, {why}. With out_dims=0, the largest shard has {largest} of them"


def test_the_hint_begins_beyond_an_eighth():
    """An eighth of the largest balanced shard is allowed. Other rules have no hint."""
    for rows, parts in EVERY:
        sizes, largest = uneven(rows, parts), balanced(rows, parts)[0]
        assert (plan_of(Cutter(sizes=uneven), rows, parts).hint is not None) == (8 * sizes[0] > 9 * largest)
    assert plan_of(Cutter(sizes=uneven, unit=4), 36).hint is None
    for rule in (balanced, equal):
        assert plan_of(Cutter(sizes=rule), 8).hint is None

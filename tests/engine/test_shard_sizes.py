"""Row counts of shards: balanced, uneven to show which outputs follow the rows, and in units."""

from __future__ import annotations

from itertools import product

import pytest

from parawrap.engine.shard_sizes import balanced_sizes, sizes_in_units, sizes_of_block, uneven_sizes
from tests.helpers.properties import given, st

EVERY = list(product(range(201), range(1, 17)))
"""Rows and lanes."""


RULES = [
    balanced_sizes,
    uneven_sizes,
    sizes_of_block(1, are_uneven=True),
    sizes_of_block(1, are_uneven=False),
    lambda rows, parts: sizes_in_units(rows, parts, 3),
]


@pytest.mark.parametrize("rule", RULES)
def test_sizes_add_up_to_the_rows(rule):
    """None is zero unless `rows` is, and there are at most as many as lanes.

    The larger sizes are first.
    """
    for rows, parts in EVERY:
        sizes = rule(rows, parts)
        assert sum(sizes) == rows
        assert [*sizes] == sorted(sizes, reverse=True) or rule is RULES[-1]
        assert min(sizes) > 0 or sizes == (0,)
        assert len(sizes) <= parts


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 16))
def test_balanced_and_unit_sizes(rows, parts, unit):
    """Balanced sizes differ by at most one; sizes in units may have a smaller last one."""
    sizes = balanced_sizes(rows, parts)
    assert sizes[0] - sizes[-1] <= 1
    assert len(sizes) == max(1, min(rows, parts))
    *full, last = sizes_in_units(rows, parts, unit)
    assert all(size % unit == 0 for size in full)
    assert [size // unit for size in full] + [-(-last // unit)] == [
        *balanced_sizes(-(-rows // unit), parts)
    ]


def test_uneven_sizes_show_the_rows():
    """A size that does not come from the rows cannot match all of them.

    Sizes that differ already stay balanced. One lane, one row, and two lanes with two or four rows
    stay whole. The largest shard has one row more at most, with at most one idle lane.
    """
    for rows, parts in EVERY:
        sizes, usual, used = (
            uneven_sizes(rows, parts),
            balanced_sizes(rows, parts),
            min(rows, parts),
        )
        assert (len(sizes) == 1) == (used < 2 or (used == 2 and rows in (2, 4)))
        assert len(sizes) == 1 or sizes[0] > sizes[-1], (rows, parts, sizes)
        assert sizes == usual or usual[0] == usual[-1]
        assert min(sizes) > 1 or rows <= 1 or min(usual) <= 1
        more, idle = sizes[0] - usual[0], len(usual) - len(sizes)
        assert more == 2 if (rows, parts) in ((4, 2), (6, 3)) else more in (0, 1)
        assert idle == 0 or (idle == 1 and rows in (used, 2 * parts))
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
    assert {each: uneven_sizes(*each) for each in examples} == examples


@pytest.mark.parametrize("are_uneven", [True, False])
def test_blocks_leave_no_single_row(are_uneven):
    """A batch norm in training refuses one row next to shards of two.

    Where every shard has one row, the sizes stay. Several rows per unit are never one row.
    """
    sizes = sizes_of_block(1, are_uneven=are_uneven)
    usual = uneven_sizes if are_uneven else balanced_sizes
    for rows, parts in EVERY:
        found = sizes(rows, parts)
        assert min(found) != 1 or max(found) == 1, (rows, parts, found)
        assert found == usual(rows, parts) or usual(rows, parts)[-1] == 1
        assert max(found) <= max(4, max(usual(rows, parts)))
    examples = {
        (3, 2): (3,),
        (5, 3): (3, 2),
        (7, 4): (3, 2, 2),
        (5, 2): (3, 2),
        (9, 4): (3, 2, 2, 2),
    }
    assert {each: sizes(*each) for each in examples} == examples
    assert sizes(2, 2) == ((2,) if are_uneven else (1, 1))
    assert sizes_of_block(8, are_uneven=are_uneven)(3, 2) == (2, 1)

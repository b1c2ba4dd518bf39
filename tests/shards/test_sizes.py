"""Row counts of shards: balanced, telling (different sizes, as evidence), equal, and in units."""

from __future__ import annotations

import threading
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parawrap.shards import Cutter, balanced, in_units
from parawrap.shards._shard_sizes import equal, telling

counts = st.integers(0, 10_000)
lanes = st.integers(1, 64)


@given(counts, lanes)
def test_balanced_sizes_add_up_and_differ_by_at_most_one(rows, parts):
    """Larger sizes are first, sizes are positive unless `rows` is 0, and there are at most `parts` sizes."""
    sizes = balanced(rows, parts)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert list(sizes) == sorted(sizes, reverse=True)
    assert len(sizes) == max(1, min(rows, parts))


# Telling sizes


@given(counts, lanes)
def test_telling_sizes_add_up(rows, parts):
    """The sizes add up to `rows` and are positive unless `rows` is 0."""
    sizes = telling(rows, parts)
    assert sum(sizes) == rows
    assert min(sizes) > 0 or sizes == (0,)


@given(counts, lanes)
def test_telling_sizes_have_two_row_counts_or_are_the_whole_call(rows, parts):
    """Two row counts show which outputs follow the rows. A single size means that the call runs whole."""
    sizes = telling(rows, parts)
    assert len(set(sizes)) > 1 or sizes == (rows,)


@given(counts, lanes)
def test_a_lane_has_no_more_rows_in_a_telling_call(rows, parts):
    """No lane gets more rows than in a balanced call, except for shares of fewer than four rows."""
    sizes, usual = telling(rows, parts), balanced(rows, parts)
    by_lane = (*sizes[: parts - 1], sum(sizes[parts - 1 :]))
    assert len(sizes) <= parts + 1
    assert max(by_lane) <= max(usual) or max(usual) < 4


@given(counts, lanes)
def test_a_call_runs_whole_only_if_two_sizes_are_impossible(rows, parts):
    """A call runs whole only with one lane, with one row, or with two lanes of one or two rows each."""
    used = min(parts, rows)
    assert (len(telling(rows, parts)) == 1) == (used < 2 or (used == 2 and rows in (2, 4)))


@given(counts, lanes)
def test_telling_sizes_avoid_single_rows(rows, parts):
    """BatchNorm refuses a single row in train mode, so parts of a split share have at least two rows."""
    sizes, usual = telling(rows, parts), balanced(rows, parts)
    if min(usual) >= 2 and len(sizes) > 1:
        assert min(sizes) >= 2


@given(counts, lanes)
def test_uneven_balanced_sizes_are_telling(rows, parts):
    """If balanced sizes already differ, they are used."""
    usual = balanced(rows, parts)
    if len(set(usual)) > 1:
        assert telling(rows, parts) == usual


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
    """The sizes add up to `rows`, and all but the last, which may be smaller, are equal. There are at most `parts`."""
    for rows, parts, size in product(range(40), range(1, 7), range(9)):
        sizes = equal(rows, parts, size)
        *full, last = sizes
        assert sum(sizes) == rows
        assert len(sizes) <= parts
        assert len(set(full)) <= 1
        assert all(each >= last for each in full)
        assert sizes == (0,) if rows == 0 else min(sizes) > 0


@given(counts, st.integers(1, 64), counts)
def test_an_equal_size_stays_until_it_is_too_small(rows, parts, size):
    """A call that fits uses the earlier size. A larger call uses the smallest size that it fits."""
    first = equal(rows, parts, size)[0]
    assert first == min(rows, size if rows <= size * parts else -(-rows // parts))


def sizes_of(cutter, rows, lanes=4, **named):
    return cutter.plan(cutter.flatten((torch.empty(rows, 2),), named), lanes).sizes


@given(st.lists(counts.filter(bool), min_size=1, max_size=20), st.integers(1, 16))
def test_a_call_brings_at_most_one_new_size(calls, lanes):
    """A call has at most one new size, or two if it has more rows than every earlier call."""
    cutter = Cutter(equal_sizes=True)
    met, most = set(), 0
    for rows in calls:
        sizes = sizes_of(cutter, rows, lanes)
        assert sum(sizes) == rows
        assert len(sizes) <= lanes
        assert len(set(sizes) - met) <= (2 if -(-rows // lanes) > most else 1)
        met |= set(sizes)
        most = max(most, *sizes)


def test_the_first_call_sets_the_size():
    """Shorter calls keep the size, in fewer lanes if they fit; a larger call sets a larger size."""
    cutter = Cutter(equal_sizes=True)
    assert sizes_of(cutter, 64) == (16, 16, 16, 16)
    assert sizes_of(cutter, 61) == (16, 16, 16, 13)
    assert sizes_of(cutter, 20) == (16, 4)
    assert sizes_of(cutter, 16) == (16,)
    assert sizes_of(cutter, 5) == (5,)
    assert sizes_of(cutter, 70) == (18, 18, 18, 16)
    assert sizes_of(cutter, 40) == (18, 18, 4)


def test_a_row_count_is_cut_as_before():
    """A larger call in between brings no new sizes to a row count that was seen before."""
    cutter = Cutter(equal_sizes=True)
    assert [sizes_of(cutter, rows) for rows in (8, 80, 8)] == [(2, 2, 2, 2), (20, 20, 20, 20), (2, 2, 2, 2)]


def test_each_structure_and_number_of_lanes_has_its_own_size():
    """A call of another structure, or for another number of lanes, does not follow the size of the first."""
    cutter = Cutter(equal_sizes=True)
    assert sizes_of(cutter, 8) == (2, 2, 2, 2)
    assert sizes_of(cutter, 7, lanes=2) == (4, 3)
    assert sizes_of(cutter, 40, mask=torch.zeros(40)) == (10, 10, 10, 10)
    assert sizes_of(cutter, 6) == (2, 2, 2)


def test_threads_can_share_a_cutter_with_equal_sizes():
    """After concurrent calls, the size is that of the largest call."""
    cutter = Cutter(equal_sizes=True)
    start = threading.Barrier(8)

    def plan(rows):
        start.wait()
        assert sum(sizes_of(cutter, rows)) == rows

    threads = [threading.Thread(target=plan, args=(4 * (index + 1),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes_of(cutter, 31) == (8, 8, 8, 7)


# The sizes of a cutter


def test_shards_are_balanced_by_default():
    """Without options, sizes do not depend on earlier calls."""
    cutter = Cutter()
    assert [sizes_of(cutter, rows) for rows in (64, 20, 5)] == [(16, 16, 16, 16), (5, 5, 5, 5), (2, 1, 1, 1)]


@pytest.mark.parametrize("rows", [1, 7, 8])
def test_a_cutter_can_have_its_own_rule(rows):
    """The `sizes` function computes the shard sizes from the rows and the number of lanes."""
    cutter = Cutter(sizes=lambda rows, lanes: in_units(rows, lanes, 4))
    assert sizes_of(cutter, rows, lanes=2) == in_units(rows, 2, 4)


def test_a_telling_plan_overrides_the_rule_of_a_cutter():
    """With `tell=True`, every cutter uses the telling sizes."""
    for cutter in (Cutter(), Cutter(equal_sizes=True)):
        flat = cutter.flatten((torch.empty(16),), {})
        assert cutter.plan(flat, 2, tell=True).sizes == (8, 4, 4)

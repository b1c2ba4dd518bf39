"""Shards of equal sizes, for devices on which every new size costs a compilation."""

from __future__ import annotations

import threading
from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from parawrap.shards import Cutter
from parawrap.shards._plan import equal

counts = st.integers(0, 10_000)


def test_every_row_is_in_a_part_and_no_part_is_empty():
    """Sizes add up to the rows; all but the last are equal, the last is no larger, and there are as many parts at most."""
    for rows, parts, size in product(range(40), range(1, 7), range(9)):
        sizes = equal(rows, parts, size)
        *full, last = sizes
        assert sum(sizes) == rows
        assert len(sizes) <= parts
        assert len(set(full)) <= 1
        assert all(each >= last for each in full)
        assert sizes == (0,) if rows == 0 else min(sizes) > 0


@given(counts, st.integers(1, 64), counts)
def test_the_size_stays_until_it_is_too_small(rows, parts, size):
    """A call that fits is cut by the size there is; one that does not, by the smallest that it fits."""
    first = equal(rows, parts, size)[0]
    assert first == min(rows, size if rows <= size * parts else -(-rows // parts))


@given(st.lists(counts.filter(bool), min_size=1, max_size=20), st.integers(1, 16))
def test_a_call_brings_one_new_size_at_most(calls, lanes):
    """Whatever rows come after each other, shards hold every row, and a call has one size at most that was not met before.

    One that brings more rows than ever has two: the new full one, and what remains.
    """
    cutter = Cutter(equal_sizes=True)
    met, most = set(), 0
    for rows in calls:
        plan, _ = cutter.plan((torch.empty(rows, 0),), {}, lanes)
        assert plan.rows == rows
        assert len(plan.sizes) <= lanes
        assert len(set(plan.sizes) - met) <= (2 if -(-rows // lanes) > most else 1)
        met |= set(plan.sizes)
        most = max(most, *plan.sizes)


def sizes(cutter, rows, lanes=4, **named):
    return cutter.plan((torch.zeros(rows, 2),), named, lanes)[0].sizes


def test_the_first_call_sets_the_size():
    """Later calls keep it, whether they are shorter or fit in fewer lanes; a larger call sets a larger one."""
    cutter = Cutter(equal_sizes=True)
    assert sizes(cutter, 64) == (16, 16, 16, 16)
    assert sizes(cutter, 61) == (16, 16, 16, 13)
    assert sizes(cutter, 20) == (16, 4)
    assert sizes(cutter, 16) == (16,)
    assert sizes(cutter, 5) == (5,)
    assert sizes(cutter, 70) == (18, 18, 18, 16)
    assert sizes(cutter, 40) == (18, 18, 4)


def test_a_row_count_is_cut_as_it_was_before():
    """A larger call in between does not bring new sizes to row counts that were met."""
    cutter = Cutter(equal_sizes=True)
    assert [sizes(cutter, rows) for rows in (8, 80, 8)] == [(2, 2, 2, 2), (20, 20, 20, 20), (2, 2, 2, 2)]


def test_each_structure_and_number_of_lanes_has_its_own_size():
    """Calls of another structure, or for other lanes, are not bound to the size of the first."""
    cutter = Cutter(equal_sizes=True)
    assert sizes(cutter, 8) == (2, 2, 2, 2)
    assert sizes(cutter, 7, lanes=2) == (4, 3)
    assert sizes(cutter, 40, mask=torch.zeros(40)) == (10, 10, 10, 10)
    assert sizes(cutter, 6) == (2, 2, 2)


def test_shards_are_balanced_where_no_shape_costs_anything():
    """Without the option nothing is remembered."""
    cutter = Cutter()
    assert [sizes(cutter, rows) for rows in (64, 20, 5)] == [(16, 16, 16, 16), (5, 5, 5, 5), (2, 1, 1, 1)]


def test_threads_that_share_a_cutter_agree_on_the_size():
    """After calls from several threads at once the size is that of the largest of them."""
    cutter = Cutter(equal_sizes=True)
    start = threading.Barrier(8)

    def plan(rows):
        start.wait()
        assert sum(sizes(cutter, rows)) == rows

    threads = [threading.Thread(target=plan, args=(4 * (index + 1),)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sizes(cutter, 31) == (8, 8, 8, 7)

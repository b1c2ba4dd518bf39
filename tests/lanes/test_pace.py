"""Whether the caller goes on alone is learnt from what calls took."""

from __future__ import annotations

import pytest

from parawrap.lanes import WAKE_UP_NS
from parawrap.lanes._pace import Paces

BRIEF, TRIED, LONG = WAKE_UP_NS // 2, 2 * WAKE_UP_NS, 100 * WAKE_UP_NS


def paces_after(*calls, may_try=True):
    """What is known after calls of one kind, each given as its first piece's time, its own, and whether it was alone."""
    paces = Paces(may_try_alone=may_try)
    for first_ns, took_ns, alone in calls:
        paces.note("kind", first_ns, took_ns, alone=alone)
    return paces


def test_nothing_is_known_at_first():
    """The lanes are woken for work of which nothing is known, or which has no kind."""
    paces = paces_after()
    paces.note(None, BRIEF, BRIEF, alone=False)
    assert paces.longest_alone_ns("kind") == paces.longest_alone_ns(None) == 0


@pytest.mark.parametrize("may_try", [True, False])
def test_brief_work_is_the_callers_from_the_second_call_on(may_try):
    """What takes less than a thread takes to wake up is not worth waking one, until it takes longer."""
    paces = paces_after((BRIEF, BRIEF, False), may_try=may_try)
    assert paces.longest_alone_ns("kind") == WAKE_UP_NS
    paces.note("kind", LONG, LONG, alone=False)
    assert paces.longest_alone_ns("kind") == 0


@pytest.mark.parametrize(("alone_ns", "is_kept"), [(300_000, True), (500_000, False)])
def test_work_that_is_not_brief_is_tried_both_ways(alone_ns, is_kept):
    """Two calls by the lanes, two by the caller alone; then the way with the best time."""
    together, alone = (TRIED, 400_000, False), (TRIED, alone_ns, True)
    assert not paces_after(together).longest_alone_ns("kind")
    assert paces_after(together, together).longest_alone_ns("kind")
    assert paces_after(together, together, alone).longest_alone_ns("kind")
    assert bool(paces_after(together, together, alone, alone).longest_alone_ns("kind")) is is_kept


def test_one_slow_call_decides_nothing():
    """The best time counts: a first call that loads something says nothing about the later ones."""
    calls = ((TRIED, 10**9, False), (TRIED, 400_000, False), (TRIED, 10**9, True), (TRIED, 300_000, True))
    assert paces_after(*calls).longest_alone_ns("kind")


def test_long_work_is_never_tried():
    """What is long goes to the lanes, and what was learnt of it when it was not is forgotten."""
    together, alone = (TRIED, 400_000, False), (TRIED, 300_000, True)
    assert not paces_after((LONG, LONG, False), (LONG, LONG, False)).longest_alone_ns("kind")
    assert not paces_after(together, together, alone, alone, (LONG, LONG, True)).longest_alone_ns("kind")


def test_work_that_may_wait_for_other_lanes_is_never_tried():
    """Run alone it would wait for ever: only who knows that it does not may have it tried."""
    assert not paces_after((TRIED, 400_000, False), (TRIED, 400_000, False), may_try=False).longest_alone_ns("kind")


def test_kinds_are_forgotten_before_they_take_much_memory():
    """A program whose every call is of a new kind keeps a bounded number of them."""
    paces = Paces(may_try_alone=True)
    for kind in range(5000):
        paces.note(kind, BRIEF, BRIEF, alone=False)
        paces.note(-kind, TRIED, TRIED, alone=False)
    assert len(paces._short) <= 1024
    assert len(paces._tried) <= 1024


def test_after_a_thousand_calls_both_ways_are_tried_again():
    """What was decided on a busy machine is not decided for good."""
    together, alone = (TRIED, 400_000, False), (TRIED, 500_000, True)
    paces = paces_after(together, together, alone, alone, *[together] * 995)
    assert not paces.longest_alone_ns("kind")
    for _ in range(3):
        paces.note("kind", TRIED, 600_000, alone=False)
    assert paces.longest_alone_ns("kind")


def test_work_that_has_become_longer_is_tried_again():
    """The caller does not go on alone when that takes twice as long as either way did."""
    together, alone = (TRIED, 400_000, False), (TRIED, 300_000, True)
    learnt = together, together, alone, alone
    assert paces_after(*learnt, (TRIED, 700_000, True)).longest_alone_ns("kind")
    assert not paces_after(*learnt, (TRIED, 900_000, True)).longest_alone_ns("kind")


def test_a_kind_that_is_known_makes_no_other_forgotten():
    """Only a new kind can be one too many."""
    paces = Paces()
    for kind in range(1024):
        paces.note(kind, BRIEF, BRIEF, alone=False)
    paces.note(0, BRIEF, BRIEF, alone=False)
    assert all(paces.longest_alone_ns(kind) == WAKE_UP_NS for kind in range(1024))

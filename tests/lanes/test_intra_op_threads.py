"""The number of threads that one operator may use: each lane has its own count, and the caller keeps its count."""

from __future__ import annotations

import threading

import pytest
import torch

from parawrap.engine import Entry, Session
from parawrap.lanes import LanePool, Modes, intra_op_threads
from parawrap.lanes._thread_modes import settle
from parawrap.shards import Cutter, JoinRules

CPU = torch.device("cpu")


@pytest.fixture
def count():
    """The caller's count is 2 during the test, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def in_new_thread(look):
    found = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def _after_an_operator():
    torch.ones(200, 200) @ torch.ones(200, 200)
    return torch.get_num_threads()


def run(pool, tasks, **options):
    outcomes = pool.run(tasks, Modes.capture("cpu"), **options)
    assert [outcome.error for outcome in outcomes] == [None] * len(tasks)
    return [outcome.value for outcome in outcomes]


def test_the_lanes_share_the_callers_threads(count):
    """Two lanes of a caller with two threads have one thread each."""
    pool = LanePool([CPU] * 2)
    try:
        assert pool.threads == 1
        assert run(pool, [_after_an_operator] * 2) == [1, 1]
        assert torch.get_num_threads() == count
    finally:
        pool.close()
    assert torch.get_num_threads() == count


def test_tasks_in_turns_have_all_of_the_callers_threads(count):
    """A lane that runs alone in the caller's thread may use every thread of the caller."""
    pool = LanePool([CPU] * 2)
    try:
        assert run(pool, [_after_an_operator] * 2, turns="all") == [count] * 2
    finally:
        pool.close()


def test_a_cut_call_lowers_the_callers_count_and_restores_it(count):
    """Lanes that run at the same time share the threads; lanes in turns have all of them."""
    seen = []

    def look(x):
        seen.append(_after_an_operator())
        return x

    session = Session(look, [CPU] * 2, cutters={None: Cutter()}, rules=JoinRules(out_dims=0))
    try:
        session.call(Entry(look), (torch.zeros(5),), {})
        assert seen == [1, 1]
        assert torch.get_num_threads() == count
        seen.clear()
        session.call(Entry(look), (torch.zeros(5, requires_grad=True),), {})
        assert seen == [count] * 2
        assert torch.get_num_threads() == count
    finally:
        session.close()


@pytest.mark.parametrize("grad", [False, True])
def test_a_cut_call_that_fails_restores_the_callers_count(count, grad):
    """An exception in a lane does not leave the caller with fewer threads."""

    def fail(x):
        raise KeyError

    session = Session(fail, [CPU] * 2, cutters={None: Cutter()}, rules=JoinRules(out_dims=0))
    try:
        with pytest.raises(KeyError):
            session.call(Entry(fail), (torch.zeros(5, requires_grad=grad),), {})
        assert torch.get_num_threads() == count
    finally:
        session.close()


def test_new_threads_are_unaffected(count):
    """A thread that is started after a call, or after the pool ends, has its usual count."""
    pool = LanePool([CPU] * 2)
    try:
        run(pool, [_after_an_operator] * 2)
        assert in_new_thread(_after_an_operator) == count
    finally:
        pool.close()
    assert in_new_thread(_after_an_operator) == count


def test_a_lane_keeps_its_count_from_call_to_call(count):
    """Neither a lane's first parallel operator nor the caller's `set_num_threads` changes the lane's count."""
    pool = LanePool([CPU] * 2)
    try:
        for _ in range(3):
            assert pool.submit(pool.lanes[1], _after_an_operator, Modes.capture("cpu")).result() == 1
            torch.set_num_threads(2)
    finally:
        pool.close()


def test_the_count_is_restored_after_an_error(count):
    """An exception inside the block restores the count too."""
    with pytest.raises(ZeroDivisionError), intra_op_threads(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == count


def test_blocks_nest(count):
    """Each block restores the count from before it; None changes nothing."""
    with intra_op_threads(1):
        assert torch.get_num_threads() == 1
        with intra_op_threads(None):
            assert torch.get_num_threads() == 1
        with intra_op_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == count


def test_a_thread_that_starts_inside_another_threads_block_gets_its_own_count_back(count):
    """A thread that first reads its count inside another thread's block does not keep the lowered count."""
    inside, leave = threading.Event(), threading.Event()

    def first():
        with intra_op_threads(1):
            inside.set()
            leave.wait()

    def second():
        with intra_op_threads(1):
            leave.set()
        return torch.get_num_threads()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    assert in_new_thread(second) == count
    thread.join()
    assert torch.get_num_threads() == count
    assert in_new_thread(torch.get_num_threads) == count


def test_a_settled_count_survives_the_first_operator(count):
    """`settle` sets the count of a new thread for good."""

    def work():
        settle(1)
        return _after_an_operator()

    assert in_new_thread(work) == 1
    torch.set_num_threads(count)

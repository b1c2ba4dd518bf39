"""How many threads an operator may use: a lane's figure is its own, and the caller's is given back."""

from __future__ import annotations

import threading

import pytest
import torch

from parawrap.lanes import LanePool
from parawrap.lanes._threads import intra_op_threads, settle

CPU = torch.device("cpu")


@pytest.fixture
def figure():
    """The caller's figure is 2 for the test, whatever the machine has."""
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


def test_the_callers_figure_is_lowered_inside_and_given_back(figure):
    """As lane 0 the caller works with the lane's figure, and afterwards with its own."""
    pool = LanePool([CPU] * 2)
    try:
        outcomes = pool.run([_after_an_operator] * 2)
        assert [outcome.value for outcome in outcomes] == [pool.threads] * 2 == [1, 1]
        assert torch.get_num_threads() == figure
    finally:
        pool.close()
    assert torch.get_num_threads() == figure


def test_new_threads_are_unaffected(figure):
    """A thread that is started after a call, or between calls, has the figure that it would have had."""
    pool = LanePool([CPU] * 2)
    try:
        pool.run([_after_an_operator] * 2)
        assert in_new_thread(_after_an_operator) == figure
    finally:
        pool.close()
    assert in_new_thread(_after_an_operator) == figure


def test_a_lane_keeps_its_figure_from_call_to_call(figure):
    """Its first parallel operator does not undo it, nor does the caller's change of its own figure."""
    pool = LanePool([CPU] * 2)
    try:
        for _ in range(3):
            assert pool.submit(pool.lanes[1], _after_an_operator).result() == 1
            torch.set_num_threads(2)
    finally:
        pool.close()


def test_the_figure_is_given_back_after_an_error(figure):
    """An exception in the caller's own part changes nothing of it."""
    pool = LanePool([CPU] * 2)

    def fail():
        raise KeyError

    try:
        pool.run([fail, fail])
        assert torch.get_num_threads() == figure
        with pytest.raises(ZeroDivisionError), intra_op_threads(1):
            raise ZeroDivisionError
        assert torch.get_num_threads() == figure
    finally:
        pool.close()


def test_blocks_nest(figure):
    """Each block gives back what was in force before it; None changes nothing."""
    with intra_op_threads(1):
        assert torch.get_num_threads() == 1
        with intra_op_threads(None):
            assert torch.get_num_threads() == 1
        with intra_op_threads(2):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == figure


def test_a_caller_that_begins_while_another_works_gets_its_own_figure_back(figure):
    """A new thread that first counts its threads inside another's call is not left with the lowered figure."""
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
    assert in_new_thread(second) == figure
    thread.join()
    assert torch.get_num_threads() == figure
    assert in_new_thread(torch.get_num_threads) == figure


def test_a_thread_settles_for_good(figure):
    """What settle gives a thread survives its first operator."""

    def work():
        settle(1)
        return _after_an_operator()

    assert in_new_thread(work) == 1
    torch.set_num_threads(figure)

"""Autocast in lanes, and their numbers of threads. `tests/api/parallel/test_modes.py` has other modes."""

from __future__ import annotations

import threading

import pytest
import torch

from parawrap import parallel
from parawrap.lanes import LanePool, Modes, intra_op_threads
from tests.helpers.waiting import PATIENCE_S

CPU = torch.device("cpu")
LANES = 3


@pytest.fixture
def pool():
    pool = LanePool([CPU] * LANES, CPU)
    yield pool
    pool.close()


def run(pool, task, **options):
    outcomes = pool.run([task] * len(pool.lanes), Modes.capture("cpu"), **options)
    assert [outcome.error for outcome in outcomes] == [None] * len(pool.lanes)
    return [outcome.value for outcome in outcomes]


def in_lanes(pool, look):
    """Return the value of `look` in each lane; each lane runs in its own thread."""
    gate = threading.Barrier(LANES)
    found = run(pool, lambda: (gate.wait(), threading.get_ident(), look()))
    assert len({thread for _, thread, _ in found}) == LANES
    return [value for *_, value in found]


def test_autocast_has_the_callers_dtype(pool):
    """Also while autocast is off in the caller."""
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)

    def product():
        with torch.autocast("cpu"):
            return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    try:
        assert in_lanes(pool, product) == [torch.float16] * LANES
    finally:
        torch.set_autocast_dtype("cpu", before)


def test_cached_casts_end_with_the_call(pool):
    """A parameter that changed is cast again in calls that run after the caller has left autocast, which ends its casts."""
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with torch.autocast("cpu"):
        modes = Modes.capture("cpu")
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        assert pool.submit(pool.lanes[1], lambda: (x @ weight).sum().item(), modes).result(PATIENCE_S) == 8 * value


@pytest.fixture
def count():
    """The caller's count is 2 during the test, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


def threads_of_an_operator():
    torch.ones(200, 200) @ torch.ones(200, 200)
    return torch.get_num_threads()


def in_new_thread(look):
    found = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def test_lanes_share_the_threads(count):
    """In turns they have all of them. The caller, and new threads, keep their count; so does each lane."""
    pool = LanePool([CPU] * 2)
    for _ in range(2):
        assert run(pool, threads_of_an_operator) == [1, 1]
        assert run(pool, threads_of_an_operator, turns="all") == [count] * 2
        assert pool.submit(pool.lanes[1], threads_of_an_operator, Modes.capture("cpu")).result() == 1
        assert torch.get_num_threads() == in_new_thread(threads_of_an_operator) == count
        torch.set_num_threads(2)
    pool.close()
    assert torch.get_num_threads() == in_new_thread(threads_of_an_operator) == count


def test_failed_calls_restore_the_count(count):
    def fail(x):
        seen.append(threads_of_an_operator())
        raise KeyError

    seen = []
    with parallel(fail, [CPU] * 2) as p, pytest.raises(KeyError):
        p(torch.zeros(5))
    assert seen == [1, 1]
    assert torch.get_num_threads() == count


def test_new_threads_keep_the_count(count):
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
    assert torch.get_num_threads() == in_new_thread(torch.get_num_threads) == count

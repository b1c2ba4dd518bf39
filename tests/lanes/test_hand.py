"""A caller that works while it waits: which calls it runs, which it leaves to the lanes, and that nobody loses by it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch

from parawrap.lanes import Hand, LaneFuture, LanePool, current_lane
from parawrap.lanes import _backlog as backlog_module

CPU = torch.device("cpu")
PATIENCE = 20


@pytest.fixture
def clock(monkeypatch) -> SimpleQueue[int]:
    """By what is put into it, in nanoseconds, a caller's time away goes on; by nothing else."""
    passed: SimpleQueue[int] = SimpleQueue()
    now = [0]

    def read() -> int:
        while not passed.empty():
            now[0] += passed.get()
        return now[0]

    monkeypatch.setattr(backlog_module, "perf_counter_ns", read)
    return passed


@pytest.fixture
def pool(clock) -> Iterator[LanePool]:
    """Two lanes whose threads run already."""
    pool = LanePool([CPU] * 2)
    for lane in pool.lanes:
        pool.submit(lane, lambda: None).result(PATIENCE)
    yield pool
    pool.close()


@pytest.fixture
def hand(pool) -> Hand:
    """Of a caller whose calls are known to be short."""
    hand = known_hand(pool)
    assert hand.does_well_to_help()
    return hand


def known_hand(pool) -> Hand:
    hand = pool.hand()
    assert hand is not None
    for _ in range(backlog_module._KNOWN):
        hand.took(1_000_000)
    return hand


def occupied(pool, lane) -> threading.Event:
    """What ends the work that the lane's thread has begun."""
    began, release = threading.Event(), threading.Event()
    pool.submit(pool.lanes[lane], lambda: (began.set(), release.wait(3 * PATIENCE)))
    assert began.wait(PATIENCE)
    return release


def where(lane):
    return lane.index, threading.get_ident()


def waits_until(hand, future, happens) -> bool:
    """Whether a caller that waits for the future comes back once that happens."""
    caller = threading.Thread(target=hand.wait_for, args=(future,), daemon=True)
    caller.start()
    while caller.is_alive() and not hand.keeps(hand._lane):
        time.sleep(0.001)
    happens()
    caller.join(PATIENCE)
    return not caller.is_alive() and future.done()


def test_a_caller_that_waits_runs_its_own_calls_as_lane_0(pool, hand):
    """No lane's thread need be free: the calls are done, oldest first, in the thread that waits."""
    release = occupied(pool, 1)
    futures = [pool.submit_to_any(where, hand) for _ in range(4)]
    hand.wait_for(futures[-1])
    assert [future.result(0) for future in futures] == [(0, threading.get_ident())] * 4
    assert [future.lane for future in futures] == [0] * 4
    release.set()


def test_in_the_callers_work_the_lane_is_the_current_one(pool, hand):
    """A nested call is part of it, as in a lane's own thread; afterwards the caller is in no lane."""
    release = occupied(pool, 1)
    future = pool.submit_to_any(lambda lane: current_lane() is lane, hand)
    hand.wait_for(future)
    assert future.result(0)
    assert current_lane() is None
    release.set()


def test_a_caller_that_was_away_for_long_leaves_all_to_the_lanes(pool, hand, clock):
    """It would keep a lane from work while it is elsewhere: what it submits wakes any lane, and it only waits."""
    for _ in range(4):
        clock.put(10**9)
        future = pool.submit_to_any(where, hand)
        hand.wait_for(future)
        assert future.result(PATIENCE)[1] != threading.get_ident()
        hand.back_to_caller()


def test_calls_that_are_not_known_yet_are_left_to_the_lanes(pool):
    """They may be long, or wait for what the caller does with the first results: it runs none before some were short."""
    hand = pool.hand()
    for _ in range(backlog_module._KNOWN):
        future = pool.submit_to_any(where, hand)
        hand.wait_for(future)
        assert future.result(PATIENCE)[1] != threading.get_ident()
    assert hand.does_well_to_help()


def test_long_calls_are_left_to_the_lanes(hand, pool):
    """While a caller runs a long one, it could take nothing in and submit nothing."""
    for _ in range(3):
        hand.took(10**8)
    assert not hand.does_well_to_help()
    future = pool.submit_to_any(where, hand)
    hand.wait_for(future)
    assert future.result(PATIENCE)[1] != threading.get_ident()


def test_one_call_that_was_held_up_changes_nothing(hand):
    """A machine that was busy elsewhere for a moment does not make short calls long."""
    hand.took(1_000_000)
    hand.took(10**9)
    assert hand.does_well_to_help()
    hand.took(10**9)
    hand.took(10**9)
    assert not hand.does_well_to_help()


def test_a_call_of_others_is_left_to_the_lanes(pool, hand):
    """It may be long, and the caller's own results are there meanwhile: the caller's lane is given back for it."""
    release = occupied(pool, 1)
    others = []

    def make_others_wait(lane):
        others.append(pool.submit_to_any(where))

    futures = [pool.submit_to_any(make_others_wait, hand)]
    first = futures[0]
    hand.wait_for(first)
    index, thread = others[0].result(PATIENCE)
    assert index == 0
    assert thread != threading.get_ident()
    release.set()


def test_a_caller_waits_beside_a_call_of_others_between_its_own(pool, hand, monkeypatch):
    """The lane's thread, which had found only what the caller would do, is woken for it, and the caller for its next."""
    monkeypatch.setattr(backlog_module, "PATIENCE_S", -1)
    releases = [occupied(pool, lane) for lane in (0, 1)]
    futures = [pool.submit_to_any(where, given) for given in (hand, None, hand)]
    assert waits_until(hand, futures[-1], releases[0].set)
    threads = [future.result(0)[1] for future in futures]
    assert threads[0] == threads[2] != threads[1]
    releases[1].set()


def test_a_caller_that_has_its_result_wakes_the_lane_for_others(pool, hand):
    """Its thread had found only what the caller would do; what comes behind that does not wait for the caller's return."""
    release = occupied(pool, 1)
    others = []

    def others_come(lane):
        others.append(pool.submit_to_any(where))
        while not lane.at_rest or lane.inbox.qsize():
            time.sleep(0.001)

    futures = [pool.submit_to_any(work, hand) for work in (others_come, where)]
    hand.wait_for(futures[-1])
    assert others[0].result(PATIENCE)[1] != threading.get_ident()
    release.set()


def test_a_lane_that_is_done_tells_the_caller_that_waits_for_it(pool, hand, monkeypatch):
    """The caller does not find out by looking again and again."""
    monkeypatch.setattr(backlog_module, "PATIENCE_S", -1)
    releases = [occupied(pool, lane) for lane in (0, 1)]
    assert waits_until(hand, pool.submit_to_any(where, hand), releases[0].set)
    releases[1].set()


def test_a_caller_is_told_when_a_lane_has_done_what_it_waits_for(pool, hand, monkeypatch):
    """Also where it found nothing to do itself."""
    monkeypatch.setattr(backlog_module, "PATIENCE_S", -1)
    began, release = threading.Event(), threading.Event()
    future = pool.submit_to_any(lambda lane: (began.set(), release.wait(PATIENCE)), hand)
    assert began.wait(PATIENCE)
    assert waits_until(hand, future, release.set)


def test_two_callers_take_turns_in_lane_0(pool, monkeypatch):
    """Neither waits for the other's calls for longer than they take."""
    monkeypatch.setattr(backlog_module, "PATIENCE_S", -1)
    release = occupied(pool, 1)
    done: SimpleQueue[int] = SimpleQueue()

    def call_in_turn():
        hand = known_hand(pool)
        for _ in range(50):
            future = pool.submit_to_any(lambda lane: None, hand)
            hand.wait_for(future)
            future.result(PATIENCE)
            hand.back_to_caller()
        done.put(1)

    callers = [threading.Thread(target=call_in_turn, daemon=True) for _ in range(3)]
    for caller in callers:
        caller.start()
    assert [done.get(timeout=PATIENCE) for _ in callers] == [1, 1, 1]
    release.set()
    for caller in callers:
        caller.join(PATIENCE)


def test_an_error_in_the_callers_work_is_its_futures(pool, hand):
    """It is raised where the result is asked for, with a note on the lane, and the caller goes on."""
    release = occupied(pool, 1)
    futures = [pool.submit_to_any(lambda lane: 1 // 0, hand), pool.submit_to_any(lambda lane: 1, hand)]
    hand.wait_for(futures[1])
    with pytest.raises(ZeroDivisionError) as caught:
        futures[0].result(0)
    assert caught.value.__notes__ == ["in lane 0 on cpu"]
    assert futures[1].result(0) == 1
    release.set()


def test_an_interrupt_in_the_callers_work_is_raised_at_once(pool, hand):
    """Ctrl-C is no failure of the call: the caller does not go on to the next, and has the lane no more."""
    release = occupied(pool, 1)

    def interrupt(lane):
        raise KeyboardInterrupt

    pool.submit_to_any(interrupt, hand)
    behind = pool.submit_to_any(lambda lane: 1, hand)
    with pytest.raises(KeyboardInterrupt):
        hand.wait_for(behind)
    assert not behind.done()
    assert not pool.lanes[0].busy.locked()
    release.set()
    assert behind.result(PATIENCE) == 1


def test_an_interrupt_while_the_caller_tells_of_a_result_is_raised(pool, hand, monkeypatch):
    """Ctrl-C may come between any two lines; in a lane's own thread it would only be told of."""
    release = occupied(pool, 1)

    def interrupted(future, value, reached):
        raise KeyboardInterrupt

    future = pool.submit_to_any(where, hand)
    monkeypatch.setattr(LaneFuture, "land", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hand.wait_for(future)
    monkeypatch.undo()
    assert not hand.keeps(pool.lanes[0])
    release.set()


def test_an_interrupted_call_keeps_nothing(pool, hand):
    """Once the error is dropped, what the calls held is gone, without the garbage collector."""
    release = occupied(pool, 1)

    def interrupt(lane):
        held = torch.zeros(3)
        known.append(weakref.ref(held))
        raise KeyboardInterrupt

    known: list[weakref.ref[torch.Tensor]] = []
    future = pool.submit_to_any(interrupt, hand)
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            hand.wait_for(future)
        del future
        assert known[0]() is None
    finally:
        gc.enable()
    release.set()


def test_a_closed_pools_calls_are_done_while_a_caller_waits(pool, hand):
    """Closing waits for them; the caller does some of them, or a lane's thread does."""
    release = occupied(pool, 1)
    futures = [pool.submit_to_any(lambda lane: "done", hand) for _ in range(20)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    hand.wait_for(futures[-1])
    release.set()
    closing.join(PATIENCE)
    assert [future.result(0) for future in futures] == ["done"] * 20


def test_one_lane_lends_no_hand(clock):
    """Its caller would do all the work, and bring in nothing meanwhile."""
    pool = LanePool([CPU])
    assert pool.hand() is None
    pool.close()


def test_operators_use_a_lanes_share_of_the_cores_in_the_callers_work(pool, hand):
    """And as many as before once the caller has what it waited for."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        release = occupied(pool, 1)
        future = pool.submit_to_any(lambda lane: torch.get_num_threads(), hand)
        hand.wait_for(future)
        assert future.result(0) == pool.threads
        assert torch.get_num_threads() == 3
        release.set()
    finally:
        torch.set_num_threads(before)

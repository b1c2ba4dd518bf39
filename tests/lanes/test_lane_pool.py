"""Guarantees of the pool of lanes about order, interrupts, and long waits. tests/api has what blocks show of it."""

from __future__ import annotations

import gc
import logging
import signal
import threading
import weakref
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from parawrap import SessionError
from parawrap.lanes import Lane, LanePool, Modes, here
from tests.helpers.waiting import PATIENCE_S, eventually

CPU, META = torch.device("cpu"), torch.device("meta")
LANES = 3


@pytest.fixture
def pool():
    pool = LanePool([CPU] * LANES)
    yield pool
    pool.close()


def outcomes_of(pool, *tasks, **options):
    return pool.run(tasks, Modes.capture("cpu"), **options)


def run(pool, *tasks, **options):
    """Run the tasks in lanes, and return their values."""
    outcomes = outcomes_of(pool, *tasks, **options)
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def submit(pool, lane, task):
    return pool.submit(pool.lanes[lane], task, Modes.capture("cpu"))


def submit_to_any(pool, task):
    return pool.submit_to_any(task, Modes.capture("cpu"))


def results(futures):
    return [future.result(PATIENCE_S) for future in futures]


def own_threads(pool):
    return [lane.thread for lane in pool.lanes if lane.thread is not None]


def together(task):
    """Return tasks that wait for each other, so each must run in its own thread."""
    gate = threading.Barrier(LANES)
    return [lambda lane=lane: (gate.wait(PATIENCE_S), task(lane))[1] for lane in range(LANES)]


def occupied(pool, *lanes):
    """Keep those lanes busy until the returned event is set."""
    release = threading.Event()
    for lane in lanes:
        began = threading.Event()
        submit(pool, lane, lambda began=began: (began.set(), release.wait(PATIENCE_S)))
        assert began.wait(PATIENCE_S)
    return release


def fail(error=ValueError):
    raise error("mine")


@pytest.mark.parametrize("turns", [None, "all"])
def test_a_lane_runs_one_task(pool, turns):
    """A task of a call waits until the lane has finished a submitted task, and no other thread runs it."""
    release, began, order = threading.Event(), threading.Event(), []
    submit(pool, 1, lambda: (began.set(), release.wait(PATIENCE_S), order.append("held")))
    began.wait(PATIENCE_S)
    found = run(pool, release.set, lambda: (order.append("behind"), threading.current_thread())[1], turns=turns)
    assert order == ["held", "behind"]
    assert found[1] is (threading.current_thread() if turns else pool.lanes[1].thread)


def test_each_device_takes_its_turns():
    """With turns="device", one thread runs the tasks of a device in lane order. A failure ends its device's turns alone."""
    mixed, gate, order = LanePool([CPU, META, CPU, META]), threading.Barrier(2), []

    def work(lane):
        if lane < 2:
            gate.wait(PATIENCE_S)
        order.append(lane)
        return threading.current_thread()

    threads = run(mixed, *[partial(work, lane) for lane in range(4)], turns="device")
    assert threads == [threading.current_thread(), mixed.lanes[1].thread] * 2
    assert [lane for lane in order if lane % 2 == 0] + [lane for lane in order if lane % 2] == [0, 2, 1, 3]
    assert len(own_threads(mixed)) == 1
    order.clear()
    outcomes = outcomes_of(mixed, int, fail, lambda: order.append(2), lambda: order.append(3), turns="device")
    assert [outcome.error is None for outcome in outcomes] == [True, False, True, True]
    assert order == [2]
    mixed.close()


def test_queued_and_own_calls_alternate(pool):
    release, others, order = occupied(pool, 0), occupied(pool, 1, 2), []
    queued = [submit_to_any(pool, lambda lane: order.append("queued")) for _ in range(3)]
    own = [submit(pool, 0, partial(order.append, "own")) for _ in range(3)]
    release.set()
    results([*queued, *own])
    others.set()
    assert order == ["queued", "own"] * 3


def test_every_resting_lane_is_woken(pool):
    """As many calls as lanes run at the same time. A callback may wait for a call in another lane."""
    gate = threading.Barrier(LANES)
    for _ in range(20):
        futures = [submit_to_any(pool, lambda lane: (gate.wait(PATIENCE_S), lane.index)[1]) for _ in range(LANES)]
        assert sorted(results(futures)) == [0, 1, 2]
    answers = SimpleQueue()

    def again(future):
        answers.put((here.lane, submit_to_any(pool, lambda lane: future.result() + 1).result(PATIENCE_S)))

    for _ in range(20):
        submit_to_any(pool, lambda lane: 1).add_done_callback(again)
        lane, answer = answers.get(timeout=PATIENCE_S)
        assert answer == 2
        assert lane is None or lane in pool.lanes  # so that a call in a callback runs plainly


@pytest.mark.parametrize("waiter", ["call", "lane", "model"])
def test_long_waits_are_logged(pool, waiter, monkeypatch):
    """The warning names each lane that has a thread, and shows its stack; the call then returns."""

    class Listening(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            written.set()

    messages, written, begun = [], threading.Event(), threading.Event()
    handler, logger = Listening(), logging.getLogger("parawrap.lanes")
    monkeypatch.setattr("parawrap.lanes._lane_pool._LONG_WAIT_S", 0.001)
    logger.addHandler(handler)

    def waits_for_another_thread():
        begun.set()
        return written.wait(PATIENCE_S)

    try:
        if waiter == "call":
            assert run(pool, lambda: begun.wait(PATIENCE_S), waits_for_another_thread) == [True, True]
        else:
            submit(pool, 0, waits_for_another_thread)
            begun.wait(PATIENCE_S)
            run(pool, int) if waiter == "lane" else pool.run_on_model(int, (), {})
    finally:
        logger.removeHandler(handler)
    assert ("a call has been waiting for its lanes" if waiter == "call" else "lane 0 on cpu has been busy") in messages[0]
    for part in (f"lane {int(waiter == 'call')} on cpu:\n", "waits_for_another_thread", "must not wait for another thread"):
        assert part in messages[0]


def test_interrupted_callers_leave(pool):
    """Ctrl-C during the wait drops the tasks that have not started, and leaves the pool usable."""
    raised, waiting, ran, busy = threading.Event(), threading.Event(), [], SimpleQueue()

    def handle(number, frame):  # the first SIGINT raises
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt

    def interrupt():
        waiting.wait(PATIENCE_S)
        # Python loses a signal that arrives right before the C code that blocks, so one may not be enough.
        while not raised.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        busy.get()

    before = signal.signal(signal.SIGINT, handle)
    release = occupied(pool, 2)  # so lane 2 does not start its task of the call
    try:
        with pytest.raises(KeyboardInterrupt):
            run(pool, waiting.set, interrupt, lambda: ran.append(2))
        assert pool.lanes[1].busy.locked()
    finally:
        busy.put(None)
        release.set()
        signal.signal(signal.SIGINT, before)
    assert run(pool, *together(lambda lane: lane)) == [0, 1, 2]
    assert ran == []


def test_profiled_calls_run_in_the_caller(pool):
    """A profiler records one thread."""
    with torch.autograd.profiler.profile(use_kineto=False):  # starts faster
        futures = [submit(pool, 1, threading.get_ident), submit_to_any(pool, lambda lane: threading.get_ident())]
    assert results(futures) == [threading.get_ident()] * 2


def test_calls_after_another_threads_close(pool):
    """A cut call runs in its caller, and a submitted one is refused."""
    pool.close()
    assert run(pool, *[threading.get_ident] * LANES) == [threading.get_ident()] * LANES
    for late in (lambda: submit(pool, 0, int), lambda: submit_to_any(pool, int)):
        with pytest.raises(SessionError, match="the lanes are closed"):
            late()


class Inbox(SimpleQueue):
    """An inbox with a `put` that a test may replace."""

    def put(self, errand):
        super().put(errand)


@pytest.mark.parametrize("place", ["queued", "starting"])
def test_interrupts_lose_no_other_call(place, monkeypatch):
    """Calls queued before and after an interrupted one run before the pool is closed."""
    pool, owner, name = LanePool([CPU]), *((Inbox, "put") if place == "queued" else (Lane, "start"))
    original, interrupts = getattr(owner, name), [KeyboardInterrupt]
    if place == "queued":
        pool.lanes[0].inbox = Inbox()
        assert submit_to_any(pool, lambda lane: "before").result(PATIENCE_S) == "before"
        eventually(lambda: pool.lanes[0].resting, "the rest of the lane")
    monkeypatch.setattr(owner, name, lambda *args: original(*args) if not interrupts else fail(interrupts.pop()))
    with pytest.raises(KeyboardInterrupt):
        submit_to_any(pool, lambda lane: "interrupted")
    after = submit_to_any(pool, lambda lane: "after")
    pool.close()
    assert after.result(0) == "after"


def test_an_abandoned_pool_is_collected():
    """Without `close`, the end of the last reference ends the threads, after the queued calls."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [submit_to_any(pool, lambda lane: "done") for _ in range(6)]
    threads, gone = own_threads(pool), weakref.ref(pool)
    release.set()
    del pool
    gc.collect()
    assert gone() is None
    assert results(futures) == ["done"] * 6
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads)

"""The pool of lanes: order, errors, concurrent callers, interrupts, closing, forks, and garbage collection."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
import torch

from parawrap.errors import SessionError
from parawrap.lanes import Lane, LanePool, Modes, _lane_pool, first_failure, here

CPU = torch.device("cpu")
LANES = 3


@pytest.fixture
def pool() -> Iterator[LanePool]:
    pool = LanePool([CPU] * LANES)
    yield pool
    pool.close()


def run(pool, tasks, **options):
    return pool.run(tasks, Modes.capture("cpu"), **options)


def submit(pool, lane, task, **options):
    return pool.submit(pool.lanes[lane], task, Modes.capture("cpu"), **options)


def submit_to_any(pool, task):
    return pool.submit_to_any(task, Modes.capture("cpu"))


def values(outcomes):
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def own_threads(pool):
    return [lane.thread for lane in pool.lanes if lane.thread is not None]


def together(task, lanes=LANES):
    """Return tasks that wait for each other, so each must run in its own thread."""
    gate = threading.Barrier(lanes)

    def work(lane):
        gate.wait()
        return task(lane)

    return [lambda lane=lane: work(lane) for lane in range(lanes)]


def occupied(pool, *lanes):
    """Keep those lanes busy until the returned event is set."""
    release = threading.Event()
    for lane in lanes:
        began = threading.Event()
        submit(pool, lane, lambda began=began: (began.set(), release.wait()))
        assert began.wait(20)
    return release


# Cut calls


def test_task_i_runs_in_lane_i_and_outcomes_are_in_that_order(pool):
    """Outcome i is that of lane i, whichever lane finishes first."""
    assert values(run(pool, together(lambda lane: (lane, here.lane.index)))) == [(i, i) for i in range(LANES)]


def test_the_caller_runs_lane_0_alone(pool):
    """The caller runs the first task. Every other task runs in the thread of its lane, even if the caller is idle."""
    for _ in range(20):
        threads = values(run(pool, [threading.current_thread] * LANES))
        assert threads == [threading.current_thread(), pool.lanes[1].thread, pool.lanes[2].thread]


def test_fewer_tasks_than_lanes_leave_the_other_lanes_idle(pool):
    """A lane without a task is not started."""
    assert values(run(pool, together(lambda lane: lane, 2))) == [0, 1]
    assert [lane.thread is None for lane in pool.lanes] == [True, False, True]


def test_threads_start_when_first_needed(pool):
    """The pool starts no thread before the first call and none for lane 0, and later calls reuse the threads."""
    assert own_threads(pool) == []
    first = values(run(pool, together(lambda _: threading.get_ident())))
    assert first[0] == threading.get_ident()
    assert values(run(pool, together(lambda _: threading.get_ident()))) == first
    assert len(own_threads(pool)) == LANES - 1


def test_one_task_starts_no_thread(pool):
    """A call of one task runs in the caller."""
    assert values(run(pool, [threading.get_ident])) == [threading.get_ident()]
    assert own_threads(pool) == []


def test_here_names_the_lane_inside_a_task_alone(pool):
    """`here.lane` is the lane inside a task, also in the caller, and None outside."""
    assert here.lane is None
    assert values(run(pool, [lambda: here.lane] * LANES)) == list(pool.lanes)
    assert values(run(pool, [lambda: here.lane] * LANES, turns="all")) == list(pool.lanes)
    assert here.lane is None


def test_a_lane_runs_one_task_at_a_time(pool):
    """A task of a call waits until the lane has finished a submitted task."""
    release, order = threading.Event(), []
    began = threading.Event()
    future = submit(pool, 1, lambda: (began.set(), release.wait(), order.append("held")))
    began.wait()
    values(run(pool, [release.set, lambda: order.append("behind")]))
    future.result()
    assert order == ["held", "behind"]


def test_a_task_that_waits_for_another_lanes_thread_is_not_stolen(pool):
    """The caller waits for a lane that is still busy, and does not run the lane's task itself."""
    release = occupied(pool, 1)
    tasks = [release.set, threading.get_ident]
    assert values(run(pool, tasks))[1] == pool.lanes[1].thread.ident


def test_every_kind_of_call_counts_its_tasks(pool):
    """A lane counts its tasks and its busy time, in whichever thread they run."""
    run(pool, [lambda: None] * LANES)
    run(pool, [lambda: None] * LANES, turns="all")
    submit(pool, 0, lambda: None).result()
    for lane in range(LANES):
        submit(pool, lane, lambda: None).result()  # a lane counts a task before it starts the next
    assert [lane.tasks for lane in pool.lanes] == [4, 3, 3]
    assert all(lane.busy_ns > 0 for lane in pool.lanes)


# Tasks in turns


def test_tasks_in_turns_run_in_the_caller_in_lane_order(pool):
    """With turns="all" the caller runs every task itself, in lane order, and starts no thread."""
    order = []
    tasks = [lambda lane=lane: (order.append(lane), threading.get_ident())[1] for lane in range(LANES)]
    assert values(run(pool, tasks, turns="all")) == [threading.get_ident()] * LANES
    assert order == [0, 1, 2]
    assert own_threads(pool) == []


def test_tasks_in_turns_still_occupy_their_lanes(pool):
    """A lane that works on a submitted task makes the caller wait for its turn."""
    release, began, order = threading.Event(), threading.Event(), []
    submit(pool, 2, lambda: (began.set(), release.wait(), order.append("submitted")))
    assert began.wait(20)
    values(run(pool, [lambda: None, release.set, lambda: order.append("turn")], turns="all"))
    assert order == ["submitted", "turn"]


META = torch.device("meta")


@pytest.fixture
def mixed():
    """A pool with two lanes on the CPU and two on another device, alternating."""
    pool = LanePool([CPU, META, CPU, META])
    yield pool
    pool.close()


def test_tasks_of_each_device_run_in_turns(mixed):
    """With turns="device", one thread runs the tasks of a device in lane order, and devices run at the same time."""
    gate, order = threading.Barrier(2), []

    def work(lane):
        if lane < 2:
            gate.wait(20)
        order.append(lane)
        return threading.get_ident()

    threads = values(run(mixed, [lambda n=lane: work(n) for lane in range(4)], turns="device"))
    assert threads == [threading.get_ident(), mixed.lanes[1].thread.ident] * 2
    assert [lane for lane in order if lane % 2 == 0] == [0, 2]
    assert [lane for lane in order if lane % 2 == 1] == [1, 3]
    assert len(own_threads(mixed)) == 1


def test_a_failure_ends_the_turns_of_its_device_alone(mixed):
    """Tasks of the device behind the failed one do not start. Other devices finish."""
    ran = []

    def work(lane):
        ran.append(lane)
        if lane == 1:
            raise ValueError

    outcomes = run(mixed, [lambda n=lane: work(n) for lane in range(4)], turns="device")
    assert [type(outcome.error) for outcome in outcomes] == [type(None), ValueError, type(None), type(None)]
    assert sorted(ran) == [0, 1, 2]


def test_the_first_failure_ends_tasks_in_turns(pool):
    """Tasks behind a failed one do not start."""
    ran = []

    def fail():
        raise ValueError

    outcomes = run(pool, [lambda: ran.append(0), fail, lambda: ran.append(2)], turns="all")
    assert isinstance(outcomes[1].error, ValueError)
    assert (ran, len(outcomes)) == ([0], LANES)


def test_a_profiled_call_runs_in_turns(pool):
    """A profiler records one thread, so under one the caller runs every task."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert values(run(pool, [threading.get_ident] * LANES)) == [threading.get_ident()] * LANES
    assert len(set(values(run(pool, [threading.get_ident] * LANES)))) == LANES


# Errors


def test_errors_are_outcomes_and_the_lanes_live_on(pool):
    """A lane that raises leaves the pool usable: the next call runs in the same threads."""
    before = values(run(pool, together(lambda _: threading.get_ident())))

    def fail(lane):
        raise [ValueError, KeyError, SystemExit][lane](lane)

    outcomes = run(pool, together(fail))
    assert [type(outcome.error) for outcome in outcomes] == [ValueError, KeyError, SystemExit]
    assert values(run(pool, together(lambda _: threading.get_ident()))) == before


def test_the_first_error_in_lane_order_is_raised_with_notes_on_the_place(pool):
    """The error of the first failed lane counts, even if a later lane fails earlier."""
    later_failed = threading.Event()

    def fail(lane):
        if lane == 2:
            later_failed.set()
            raise KeyError("later")
        later_failed.wait()
        raise ValueError("earlier")

    error = first_failure(run(pool, [lambda: 0, lambda: fail(1), lambda: fail(2)]), pool.lanes)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["in lane 1 on cpu, shard 1 of 3", "also in lane 2 on cpu, shard 2 of 3: KeyError: 'later'"]


def test_apply_returns_the_values_or_raises_the_first_error(pool):
    """`apply` runs its tasks at the same time. An error has a note with its lane, device, and shard."""
    assert pool.apply(together(lambda lane: lane)) == [0, 1, 2]

    def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        pool.apply([int, fail, fail])
    assert caught.value.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3",
        "also in lane 2 on cpu, shard 2 of 3: ValueError: mine",
    ]


def test_the_other_lanes_finish_when_one_fails(pool):
    """A call that fails returns once all of its tasks have finished."""
    done = []

    def task(lane):
        if lane == 0:
            raise ValueError
        done.append(lane)

    run(pool, together(task))
    assert sorted(done) == [1, 2]


# Submitted calls


def test_tasks_submitted_to_a_lane_run_in_arrival_order(pool):
    """A lane is a queue."""
    order = []
    for number in range(20):
        future = submit(pool, 0, lambda number=number: order.append(number))
    future.result()
    assert order == list(range(20))


def test_an_error_in_a_submitted_call_arrives_with_the_lane_as_a_note(pool):
    """The future raises the user's exception with the lane as a note."""

    def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        submit(pool, 1, fail).result()
    assert caught.value.__notes__ == ["in lane 1 on cpu"]


def test_an_error_that_refuses_notes_reaches_the_future(pool, monkeypatch):
    """An immutable exception reaches its future, and the lane's thread lives on."""

    class FrozenError(Exception):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    def fail():
        raise FrozenError

    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_type))
    future = submit(pool, 1, fail)
    assert submit(pool, 1, lambda: "alive").result(20) == "alive"
    assert ended == []
    assert isinstance(future.exception(timeout=0), FrozenError)


def test_a_call_that_has_not_started_can_be_cancelled(pool):
    """A cancelled call does not run, and the lane goes on with the next."""
    release = threading.Event()
    held = submit(pool, 1, release.wait)
    dropped = submit(pool, 1, lambda: pytest.fail("a cancelled call ran"))
    behind = submit(pool, 1, lambda: "behind")
    assert dropped.cancel()
    release.set()
    assert (held.result(), behind.result()) == (True, "behind")
    assert dropped.cancelled()


def test_a_stage_runs_before_its_task(pool):
    """On the CPU the stage runs in the lane, right before the task."""
    order = []
    future = submit(pool, 1, lambda: order.append("task"), stage=lambda: order.append(("stage", here.lane.index)))
    future.result(20)
    assert order == [("stage", 1), "task"]


def test_the_least_loaded_lane_has_the_fewest_tasks_before_it(pool):
    """An idle lane comes before a busy lane. Of idle lanes, the lane with the fewest submitted tasks comes first."""
    release = occupied(pool, 0)
    assert pool.least_loaded() is pool.lanes[1]
    submit(pool, 1, lambda: None).result(20)
    submit(pool, 1, lambda: None).result(20)
    assert pool.least_loaded() is pool.lanes[2]
    release.set()


def test_sixteen_callers_at_once_each_get_their_own_outcomes(pool):
    """No outcome is lost, doubled, or returned to another caller."""
    gate = threading.Barrier(16)

    def call(caller):
        gate.wait()
        found = []
        for step in range(20):
            tasks = [lambda s=step, k=lane: (caller, s, k) for lane in range(LANES)]
            found.append(values(run(pool, tasks, turns="all" if step % 2 else None)))
        return found

    with concurrent.futures.ThreadPoolExecutor(16) as callers:
        found = list(callers.map(call, range(16)))
    assert found == [[[(caller, step, lane) for lane in range(LANES)] for step in range(20)] for caller in range(16)]
    assert sum(lane.tasks for lane in pool.lanes) == 16 * 20 * LANES


def test_a_task_may_submit_to_its_own_lane_and_to_another(pool):
    """A task may submit a call for later, also to its own lane."""
    futures = []

    def task():
        futures.append(submit(pool, 2, lambda: here.lane))
        futures.append(submit(pool, here.lane.index, lambda: here.lane))

    submit(pool, 1, task).result()
    assert [future.result() for future in futures] == [pool.lanes[2], pool.lanes[1]]


def test_two_pools_work_side_by_side(pool):
    """A task of one pool may run tasks in another pool."""
    other = LanePool([CPU] * 2)
    try:
        inner = values(run(pool, [lambda: values(run(other, [lambda: here.lane] * 2)), lambda: here.lane]))
        assert inner == [list(other.lanes), pool.lanes[1]]
    finally:
        other.close()


def test_no_lane_works_inside_idle(pool):
    """A call that arrives inside the block starts after it."""
    began = threading.Event()
    with pool.idle():
        future = submit(pool, 1, began.set)
        assert all(lane.busy.locked() for lane in pool.lanes)
        assert not began.is_set()
    future.result()
    assert began.is_set()


def test_idle_waits_for_a_busy_lane(pool):
    """The block begins once every lane has finished its task."""
    release = occupied(pool, 1)
    entered = threading.Event()

    def enter():
        with pool.idle():
            entered.set()

    thread = threading.Thread(target=enter)
    thread.start()
    assert not entered.is_set()
    release.set()
    thread.join(20)
    assert entered.is_set()


def test_a_call_on_the_model_and_lane_0_exclude_each_other(pool):
    """Lane 0 may use the model's own buffers, so it waits for a plain call, and a plain call for it. Others do not."""
    order, began, release, futures = [], threading.Event(), threading.Event(), []

    def plain_call():
        futures.append(submit(pool, 0, lambda: (order.append("lane 0"), began.set(), release.wait(20))))
        assert submit(pool, 1, lambda: "not excluded").result(20) == "not excluded"
        order.append("plain call")
        return "answer"

    assert pool.run_on_model(plain_call, (), {}) == "answer"
    assert began.wait(20)
    caller = threading.Thread(target=pool.run_on_model, args=(order.append, ("next plain call",), {}))
    caller.start()
    caller.join(0.05)
    order.append("lane 0 still runs")
    release.set()
    futures[0].result(20)
    caller.join(20)
    assert order == ["plain call", "lane 0", "lane 0 still runs", "next plain call"]


def test_a_call_on_the_model_inside_another_and_inside_a_lane_does_not_wait(pool):
    """A model may call itself: the thread that runs a plain call, and a lane, go on."""
    assert pool.run_on_model(pool.run_on_model, (lambda: pool.lanes[0].busy.locked(), (), {}), {}) is True
    assert not pool.lanes[0].busy.locked()
    assert submit(pool, 0, lambda: pool.run_on_model(lambda: here.lane.index, (), {})).result(20) == 0


def test_a_call_on_the_model_that_raises_frees_lane_0(pool):
    """An error leaves the lane usable."""
    with pytest.raises(KeyError):
        pool.run_on_model({}.__getitem__, ("missing",), {})
    assert submit(pool, 0, lambda: "usable").result(20) == "usable"


def test_idle_frees_every_lane_after_an_error(pool):
    """An exception inside the block leaves no lane busy."""
    with pytest.raises(ZeroDivisionError), pool.idle():
        raise ZeroDivisionError
    assert not any(lane.busy.locked() for lane in pool.lanes)


# Long waits


@pytest.fixture
def impatient(monkeypatch):
    """Every wait is long."""
    monkeypatch.setattr("parawrap.lanes._lane_pool._LONG_WAIT_S", 0.001)


@pytest.fixture
def logged():
    """The warnings of the lanes; a message sets the event."""

    class Listening(logging.Handler):
        def emit(self, record):
            messages.append(record.getMessage())
            written.set()

    messages, written = [], threading.Event()
    handler = Listening()
    logger = logging.getLogger("parawrap.lanes")
    logger.addHandler(handler)
    yield messages, written
    logger.removeHandler(handler)


@pytest.mark.usefixtures("impatient")
def test_a_caller_that_waits_long_for_its_lanes_logs_where_they_are(pool, logged):
    """The warning names each lane that has a thread and shows the thread's stack, and the call then returns."""
    messages, written = logged
    begun = threading.Event()

    def waits_for_another_thread():
        begun.set()
        return written.wait(20)

    assert values(run(pool, [lambda: begun.wait(20), waits_for_another_thread])) == [True, True]
    assert "a call has been waiting for its lanes" in messages[0]
    assert "lane 1 on cpu:\n" in messages[0]
    assert "waits_for_another_thread" in messages[0]
    assert "must not wait for another thread that calls it" in messages[0]


@pytest.mark.usefixtures("impatient")
def test_a_wait_for_a_busy_lane_is_logged(pool, logged):
    """A caller that waits long for lane 0 logs a warning, and then runs its task."""
    messages, written = logged
    release = occupied(pool, 0)
    caller = threading.Thread(target=run, args=(pool, [lambda: None]))
    caller.start()
    assert written.wait(20)
    release.set()
    caller.join(20)
    assert not caller.is_alive()
    assert "lane 0 on cpu has been busy" in messages[0]


@pytest.mark.usefixtures("impatient")
def test_a_refresh_that_waits_long_for_a_lane_is_logged(pool, logged):
    """`idle` logs the lane that keeps it waiting."""
    messages, written = logged
    release = occupied(pool, 1)

    def enter():
        with pool.idle():
            pass

    thread = threading.Thread(target=enter)
    thread.start()
    assert written.wait(20)
    release.set()
    thread.join(20)
    assert not thread.is_alive()
    assert "lane 1 on cpu has been busy" in messages[0]


# Interrupts


@pytest.fixture
def interrupted():
    """An event that the first SIGINT sets; it also raises KeyboardInterrupt in the main thread. Others are ignored."""

    def handle(number, frame):
        if not event.is_set():
            event.set()
            raise KeyboardInterrupt

    event = threading.Event()
    before = signal.signal(signal.SIGINT, handle)
    yield event
    signal.signal(signal.SIGINT, before)


def test_a_caller_that_is_interrupted_while_it_waits_leaves_at_once(pool, interrupted):
    """Ctrl-C during the wait ends the call, drops the tasks that have not started, and leaves the pool usable."""
    assert threading.current_thread() is threading.main_thread()
    waiting, ran, busy = threading.Event(), [], SimpleQueue()
    release = occupied(pool, 2)  # so lane 2 does not start its task of the call

    def interrupt():
        waiting.wait()
        # Python loses a signal that arrives right before the C code that blocks, so one may not be enough.
        while not interrupted.wait(0.01):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        busy.get()

    try:
        with pytest.raises(KeyboardInterrupt):
            run(pool, [waiting.set, interrupt, lambda: ran.append(2)])
        assert pool.lanes[1].busy.locked()
    finally:
        busy.put(None)
        release.set()
    assert values(run(pool, together(lambda lane: lane))) == [0, 1, 2]
    assert ran == []
    assert not any(lane.busy.locked() for lane in pool.lanes)


class Recorded(SimpleQueue):
    """An inbox that keeps every errand, and calls `put` as an attribute that a test may replace."""

    def __init__(self):
        self.errands = []

    def put(self, errand):
        self.errands.append(errand)
        super().put(errand)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_the_callers_own_task_drops_tasks_that_have_not_started(pool, error):
    """An interrupt or an exit in lane 0 is the first outcome, and a lane that was busy does not start its task."""
    inbox = pool.lanes[2].inbox = Recorded()
    release, ran = occupied(pool, 2), []

    def release_once_dropped():
        while not (len(inbox.errands) == 2 and inbox.errands[1].dropped):
            pass
        release.set()

    def interrupted():
        raise error

    watch = threading.Thread(target=release_once_dropped)
    watch.start()
    outcomes = run(pool, [interrupted, lambda: None, lambda: ran.append(2)])
    watch.join()
    assert isinstance(outcomes[0].error, error)
    assert ran == []


def interrupted_once(monkeypatch, owner, name, *, at=1):
    """Have the call of that number to `owner.name` raise KeyboardInterrupt instead."""
    original, calls = getattr(owner, name), []

    def called(*args, **kwargs):
        calls.append(name)
        if len(calls) == at:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


def test_an_interrupt_while_a_call_is_queued_loses_no_other_call(monkeypatch):
    """Calls queued before and after an interrupted `submit_to_any` run before the pool is closed."""
    pool = LanePool([CPU])
    pool.lanes[0].inbox = Recorded()
    before = submit_to_any(pool, lambda lane: "before")
    assert before.result(20) == "before"
    while not pool.lanes[0].resting:  # the thread rests right after its call
        pass
    interrupted_once(monkeypatch, Recorded, "put")
    with pytest.raises(KeyboardInterrupt):
        submit_to_any(pool, lambda lane: "interrupted")
    after = submit_to_any(pool, lambda lane: "after")
    pool.close()
    assert after.result(0) == "after"


def test_an_interrupt_while_a_lane_starts_loses_no_later_call(monkeypatch):
    """A later `submit_to_any` starts the lane that an interrupted one did not start."""
    pool = LanePool([CPU])
    interrupted_once(monkeypatch, Lane, "start")
    with pytest.raises(KeyboardInterrupt):
        submit_to_any(pool, lambda lane: "interrupted")
    after = submit_to_any(pool, lambda lane: "after")
    pool.close()
    assert after.done()
    assert after.result(0) == "after"


def test_an_interrupt_while_a_lane_starts_leaves_one_thread_per_lane(pool, monkeypatch):
    """A caller that is interrupted while it waits for a new thread does not cause a second thread for the lane."""
    wait, interrupts = threading.Event.wait, [True]

    def interrupted(event, timeout=None):
        is_in_start = sys._getframe(1).f_code is Lane.start.__code__
        if is_in_start and interrupts.pop():
            monkeypatch.undo()
            raise KeyboardInterrupt
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(pool, 1, lambda: None)
    assert submit(pool, 1, lambda: "alive").result(20) == "alive"
    serving = [thread for thread in threading.enumerate() if thread.name == f"parawrap-{pool.lanes[1]}"]
    for _ in serving[1:]:
        pool.lanes[1].inbox.put(None)  # so that close ends the surplus thread too
    assert len(serving) == 1


# The end of a pool


def test_closing_lets_the_lanes_finish_and_ends_their_threads():
    """Submitted calls are done when `close` returns, and no thread is left."""
    pool = LanePool([CPU] * LANES)
    future = submit(pool, 1, lambda: "done")
    threads = own_threads(pool)
    pool.close()
    assert future.done()
    assert future.result() == "done"
    assert not any(thread.is_alive() for thread in threads)
    assert (pool.alive, pool.closed) == (False, True)


def test_closing_twice_does_no_harm():
    """`close` may be called again, on a pool without threads, and from several threads at once."""
    pool = LanePool([CPU] * 2)
    pool.close()
    pool.close()
    used = LanePool([CPU] * 2)
    run(used, together(lambda lane: lane, 2))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(used.close) for _ in range(4)]:
            future.result()
    assert not used.alive


def test_a_closed_pool_accepts_no_calls():
    """A cut call that another thread's `close` has overtaken runs in its caller; a submitted one raises SessionError."""
    pool = LanePool([CPU] * 2)
    pool.close()
    assert values(run(pool, [threading.get_ident] * 2)) == [threading.get_ident()] * 2
    with pytest.raises(SessionError, match="closed"):
        submit(pool, 1, lambda: 1)
    with pytest.raises(SessionError, match="closed"):
        submit_to_any(pool, lambda lane: 1)
    assert own_threads(pool) == []


def test_a_task_may_close_its_own_pool():
    """A lane that closes its pool does not wait for itself."""
    pool = LanePool([CPU] * 2)
    submit(pool, 1, pool.close).result()
    assert not pool.alive
    pool.lanes[1].thread.join()


def test_an_abandoned_pool_is_collected_and_its_threads_end():
    """Without `close`, the end of the last reference ends the threads."""
    pool = LanePool([CPU] * LANES)
    run(pool, together(lambda lane: lane))
    submit(pool, 0, lambda: None).result()
    threads, gone = own_threads(pool), weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert len(threads) == LANES
    for thread in threads:
        thread.join()


def test_an_idle_lane_holds_nothing_of_its_last_call(pool):
    """Arguments and values of a call are freed when the call is over."""

    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)
    run(pool, together(lambda _, value=value: None))
    submit(pool, 1, lambda value=value: None).result()
    for lane in range(LANES):
        submit(pool, lane, lambda: None).result()  # a lane frees a call before it starts the next
    del value
    gc.collect()
    assert gone() is None


class Value:
    pass


def fail_with_value(made):
    value = Value()
    made.append(weakref.ref(value))
    raise ValueError(value)


def return_value(made):
    value = Value()
    made.append(weakref.ref(value))
    return value


@pytest.mark.parametrize("task", [return_value, fail_with_value])
def test_a_lane_holds_nothing_of_a_call_once_the_caller_is_told(pool, task):
    """The thread of a lane may sleep before its next line, so it frees the outcome before it reports the end."""
    told, made, kept = SimpleQueue(), [], []
    looked = threading.Event()

    def hold_at_the_end(frame, event, argument):
        # The lane's thread is held after the last line of the call, until the test has looked.
        if frame.f_code is _lane_pool._Call.__call__.__code__ and event == "return":
            told.put(None)
            looked.wait(20)
        return hold_at_the_end

    threading.settrace(hold_at_the_end)
    try:
        outcomes = run(pool, [lambda: None, lambda: task(made)])
    finally:
        threading.settrace(None)
    del outcomes
    told.get(timeout=20)
    kept.append(made[0]() is not None)
    looked.set()
    assert kept == [False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestFork:
    @staticmethod
    def code_of_child(work):
        """Run `work` in a forked child, and return its exit code; a child that hangs is ended by an alarm."""
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(10)
                code = 0 if work() else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def test_the_child_has_no_lanes_and_the_parent_keeps_its_own(self, pool):
        """In the child `alive` is False, `submit` raises instead of hanging, and `close` works; the parent goes on."""

        def work():
            with pytest.raises(SessionError):
                submit(pool, 1, lambda: None)
            with pytest.raises(SessionError):
                submit_to_any(pool, lambda lane: None)
            ran = values(run(pool, [threading.get_ident] * LANES)) == [threading.get_ident()] * LANES
            pool.close()
            return ran and not pool.alive

        run(pool, together(lambda lane: lane))
        assert self.code_of_child(work) == 0
        assert pool.alive
        assert values(run(pool, together(lambda lane: lane))) == [0, 1, 2]

    def test_the_child_may_make_its_own_pool(self):
        """A new pool in the child has lanes and ends them."""

        def work():
            own = LanePool([CPU] * 2)
            found = values(run(own, together(lambda lane: lane, 2)))
            alive = own.alive
            own.close()
            return alive and found == [0, 1]

        assert self.code_of_child(work) == 0

    def test_the_child_may_close_a_pool_that_another_thread_was_sending_to(self, pool):
        """A fork while another thread of the parent sends a call does not make `close` hang in the child."""

        def work():
            pool.close()
            return True

        with pool._gate:
            assert self.code_of_child(work) == 0


def test_a_lane_is_named_by_its_index_and_label():
    """Messages and threads name a lane and its device, or its label."""
    pool = LanePool([CPU] * 2, labels=["nc:0", "nc:1"])
    assert str(Lane(1, CPU)) == "lane 1 on cpu"
    run(pool, together(lambda lane: lane, 2))
    assert str(pool.lanes[1]) == "lane 1 on nc:1"
    assert pool.lanes[1].thread.name == "parawrap-lane 1 on nc:1"
    assert pool.lanes[1].thread.daemon
    pool.close()


# Calls for any lane


@pytest.fixture
def held(pool):
    """The first lane is busy until the event is set."""
    release = occupied(pool, 0)
    yield release
    release.set()


def test_no_call_waits_for_a_busy_lane_while_another_is_free(pool, held):
    """The free lanes run every queued call."""
    futures = [submit_to_any(pool, lambda lane: lane) for _ in range(30)]
    assert pool.lanes[0] not in [future.result(20) for future in futures]
    assert not held.is_set()


def test_queued_calls_start_in_arrival_order(pool, held):
    """The oldest call starts first, whichever lane is free."""
    other = occupied(pool, 2)
    order = []
    futures = [submit_to_any(pool, lambda lane, number=number: order.append(number)) for number in range(30)]
    concurrent.futures.wait(futures, 20)
    other.set()
    assert order == list(range(30))


def test_queued_calls_take_turns_with_a_lanes_own_tasks(pool, held):
    """A lane with both kinds of calls runs one of each, so that neither kind starves."""
    other, order = occupied(pool, 1, 2), []
    queued = [submit_to_any(pool, lambda lane, n=number: order.append(("queued", n))) for number in range(3)]
    own = [submit(pool, 0, lambda n=number: order.append(("own", n))) for number in range(3)]
    held.set()
    concurrent.futures.wait([*queued, *own], 20)
    other.set()
    kinds = [kind for kind, _ in order]
    assert kinds == ["queued", "own"] * 3


def test_every_resting_lane_is_woken(pool):
    """As many calls as lanes run at the same time, because each wakes another lane."""
    gate = threading.Barrier(LANES)
    for _ in range(20):
        futures = [submit_to_any(pool, lambda lane: (gate.wait(20), lane.index)[1]) for _ in range(LANES)]
        assert sorted(future.result(20) for future in futures) == [0, 1, 2]


def test_a_future_names_the_lane_that_ran_it(pool, held):
    """`future.lane` is the index of the lane that ran the call."""
    futures = [submit_to_any(pool, lambda lane: (lane.index, here.lane.index)) for _ in range(12)]
    for future in futures:
        assert future.result(20) == (future.lane, future.lane)


def test_an_error_names_the_lane_that_ran_the_call(pool, held):
    """The note names the lane that was free."""

    def fail(lane):
        raise ValueError(lane.index)

    for future in [submit_to_any(pool, fail) for _ in range(6)]:
        error = future.exception(20)
        assert error.__notes__ == [f"in lane {error.args[0]} on cpu"]


def test_a_queued_call_that_is_cancelled_does_not_run(pool):
    """A call that no lane has started can be cancelled."""
    release = occupied(pool, 0, 1, 2)
    dropped = submit_to_any(pool, lambda lane: pytest.fail("a cancelled call ran"))
    behind = submit_to_any(pool, lambda lane: "behind")
    assert dropped.cancel()
    release.set()
    assert behind.result(20) == "behind"


def test_close_waits_for_queued_calls():
    """The threads end once every queued call is done."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [submit_to_any(pool, lambda lane: "done") for _ in range(12)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    release.set()
    closing.join(20)
    assert [future.result(0) for future in futures] == ["done"] * 12


def test_a_pool_with_queued_calls_can_be_collected():
    """Queued calls do not refer to the pool: without its last reference the lanes finish and end."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [submit_to_any(pool, lambda lane: "done") for _ in range(6)]
    known, threads = weakref.ref(pool), own_threads(pool)
    release.set()
    del pool
    assert known() is None
    assert [future.result(20) for future in futures] == ["done"] * 6
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_callback_may_wait_for_a_call_in_another_lane(pool):
    """A lane that runs a callback does not count as resting."""
    answers = SimpleQueue()

    def again(future):
        answers.put(submit_to_any(pool, lambda lane: future.result() + 1).result(20))

    for _ in range(20):
        submit_to_any(pool, lambda lane: 1).add_done_callback(again)
        assert answers.get(timeout=20) == 2


def test_a_callback_runs_in_a_lane(pool):
    """`here.lane` is set in a callback, so a call in one runs plainly and does not wait for lanes."""
    lanes, release = SimpleQueue(), occupied(pool, 0, 1, 2)
    future = submit_to_any(pool, lambda lane: lane)
    future.add_done_callback(lambda _: lanes.put(here.lane))
    release.set()
    assert lanes.get(timeout=20) is future.result(20)


def at_rest(pool):
    """Start the threads of all lanes, and return once they wait for calls."""
    for lane in range(LANES):
        submit(pool, lane, lambda: None).result(20)
    while not all(lane.resting for lane in pool.lanes):  # a thread rests right after its call
        pass


def test_a_queued_call_does_not_wait_for_a_lane_that_a_caller_occupies(pool):
    """While a caller works in lane 0 for long, a queued call runs in a lane that is free."""
    release, began = threading.Event(), threading.Event()
    at_rest(pool)
    caller = threading.Thread(target=run, args=(pool, [lambda: (began.set(), release.wait(20))]))
    caller.start()
    assert began.wait(20)
    futures = [submit_to_any(pool, lambda lane: lane.index)]
    done = concurrent.futures.wait(futures, 5).done
    release.set()
    caller.join(20)
    assert len(done) == 1
    assert 0 not in [future.result(20) for future in futures]


def test_a_callback_that_exits_ends_no_lane(pool, monkeypatch):
    """An exception of a callback goes to `threading.excepthook`, and the lane lives on."""
    told = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.put(args.exc_type))
    holding = occupied(pool, 0, 1, 2)
    future = submit_to_any(pool, lambda lane: 1)
    future.add_done_callback(lambda _: sys.exit(3))
    holding.set()
    assert told.get(timeout=20) is SystemExit
    assert future.result(20) == 1
    alive = [submit(pool, lane, lambda: "alive") for lane in range(LANES)]
    assert [future.result(20) for future in alive] == ["alive"] * LANES


def test_a_profiled_caller_runs_its_submitted_calls_itself(pool):
    """A profiler sees the operators of the calls that its thread submits, and no others."""
    release = occupied(pool, 1, 2)
    x = torch.zeros(2)
    others = [submit(pool, 1, lambda: torch.sin(x)) for _ in range(6)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        own = [submit_to_any(pool, lambda lane: (torch.cos(x), threading.get_ident())[1]) for _ in range(LANES)]
        own.append(submit(pool, 0, lambda: (torch.cos(x), threading.get_ident())[1]))
        assert [future.result(0) for future in own] == [threading.get_ident()] * (LANES + 1)
        release.set()
        concurrent.futures.wait(others, 20)
    counts = {event.key: event.count for event in profiler.key_averages() if event.key in ("aten::sin", "aten::cos")}
    assert counts == {"aten::cos": LANES + 1}


def test_close_after_an_interrupted_start():
    """A lane whose thread was interrupted while it started does not make `close` fail."""
    pool = LanePool([torch.device("cpu")] * 2)
    pool.lanes[1].thread = threading.Thread(target=int)
    pool.close()
    assert pool.closed

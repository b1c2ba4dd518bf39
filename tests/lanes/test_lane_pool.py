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
from functools import partial
from queue import SimpleQueue

import pytest
import torch

from parawrap.errors import SessionError
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


def submit(pool, lane, task, **options):
    return pool.submit(pool.lanes[lane], task, Modes.capture("cpu"), **options)


def submit_to_any(pool, task):
    return pool.submit_to_any(task, Modes.capture("cpu"))


def results(futures):
    return [future.result(PATIENCE_S) for future in futures]


def own_threads(pool):
    return [lane.thread for lane in pool.lanes if lane.thread is not None]


def together(task, lanes=LANES):
    """Return tasks that wait for each other, so each must run in its own thread."""
    gate = threading.Barrier(lanes)
    return [lambda lane=lane: (gate.wait(PATIENCE_S), task(lane))[1] for lane in range(lanes)]


def occupied(pool, *lanes):
    """Keep those lanes busy until the returned event is set."""
    release = threading.Event()
    for lane in lanes:
        began = threading.Event()
        submit(pool, lane, lambda began=began: (began.set(), release.wait(PATIENCE_S)))
        assert began.wait(PATIENCE_S)
    return release


def blocked(thread):
    """Wait until a thread is blocked in a lock of the pool, or has ended wrongly."""

    def is_blocked():
        frame = sys._current_frames().get(thread.ident)
        return not thread.is_alive() or (frame is not None and frame.f_code.co_name == "wait_until_idle")

    eventually(is_blocked, "the wait for a lane")


def started(function, *args):
    thread = threading.Thread(target=function, args=args)
    thread.start()
    return thread


def fail(error=ValueError):
    raise error("mine")


# Cut calls


def test_each_task_runs_in_its_lane(pool):
    """The caller runs the first task, and every other task runs in the thread of its lane, started when first needed."""
    assert own_threads(pool) == []
    assert here.lane is None
    for _ in range(5):
        found = run(pool, *together(lambda lane: (lane, here.lane.index, threading.current_thread())))
        assert found == [(i, i, pool.lanes[i].thread or threading.current_thread()) for i in range(LANES)]
    assert here.lane is None
    assert len(own_threads(pool)) == LANES - 1


@pytest.mark.parametrize("turns", [None, "all"])
def test_a_lane_runs_one_task_at_a_time(pool, turns):
    """A task of a call waits until the lane has finished a submitted task, and no other thread runs it."""
    release, began, order = threading.Event(), threading.Event(), []
    submit(pool, 1, lambda: (began.set(), release.wait(PATIENCE_S), order.append("held")))
    began.wait(PATIENCE_S)
    found = run(pool, release.set, lambda: (order.append("behind"), threading.current_thread())[1], turns=turns)
    assert order == ["held", "behind"]
    assert found[1] is (threading.current_thread() if turns else pool.lanes[1].thread)


def test_sixteen_callers_get_their_own_outcomes(pool):
    """No outcome is lost, doubled, or returned to another caller."""
    gate = threading.Barrier(16)

    def call(caller):
        gate.wait(PATIENCE_S)
        for step in range(10):
            tasks = [lambda step=step, lane=lane: (caller, step, lane) for lane in range(LANES)]
            yield run(pool, *tasks, turns="all" if step % 2 else None)

    with concurrent.futures.ThreadPoolExecutor(16) as callers:
        found = list(callers.map(lambda caller: list(call(caller)), range(16)))
    assert found == [[[(caller, step, lane) for lane in range(LANES)] for step in range(10)] for caller in range(16)]
    assert sum(lane.tasks for lane in pool.lanes) == 16 * 10 * LANES


# Tasks in turns


def test_turns_run_in_the_caller_in_order(pool):
    """With turns="all", and under a profiler, which records one thread."""
    order = []
    tasks = [lambda lane=lane: (order.append(lane), here.lane.index, threading.get_ident())[1:] for lane in range(LANES)]
    expected = [(lane, threading.get_ident()) for lane in range(LANES)]
    assert run(pool, *tasks, turns="all") == expected
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert run(pool, *tasks) == expected
    assert order == [0, 1, 2] * 2
    assert own_threads(pool) == []


def test_each_device_takes_its_own_turns():
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


# Errors


def test_errors_are_outcomes(pool):
    """All tasks finish, and the lanes live on in the same threads."""
    before, done = run(pool, *together(lambda _: threading.get_ident())), []
    for errors in ([ValueError, KeyError, SystemExit], [ValueError, None, None]):
        outcomes = outcomes_of(pool, *together(lambda lane, errors=errors: fail(errors[lane] or done.append) or 1))
        assert isinstance(outcomes[0].error, ValueError)
    assert [type(outcome.error) for outcome in outcomes[1:]] == [TypeError] * 2  # what `raise None` raises
    assert done == ["mine"] * 2
    assert run(pool, *together(lambda _: threading.get_ident())) == before


def test_apply_raises_the_first_error(pool):
    """In lane order, with notes on lane, device, and shard."""
    assert pool.apply(together(lambda lane: lane)) == [0, 1, 2]
    failed = threading.Event()

    def fail_last():
        failed.set()
        fail(KeyError)

    with pytest.raises(ValueError, match="mine") as caught:
        pool.apply([int, lambda: (failed.wait(PATIENCE_S), fail()), fail_last])
    first, second = caught.value.__notes__
    assert first == "in lane 1 on cpu, shard 1 of 3"
    assert second == "also in lane 2 on cpu, shard 2 of 3: KeyError: 'mine'"


# Submitted calls


def test_submitted_tasks_run_in_arrival_order(pool):
    order = []
    results([submit(pool, 0, partial(order.append, number)) for number in range(20)])
    assert order == list(range(20))
    stage = lambda: order.append(("stage", here.lane.index))  # noqa: E731
    submit(pool, 1, lambda: order.append("task"), stage=stage).result(PATIENCE_S)
    assert order[20:] == [("stage", 1), "task"]


class FrozenError(Exception):
    def __setattr__(self, name, value):
        raise AttributeError(name)


@pytest.mark.parametrize("error", [ValueError, FrozenError, SystemExit])
def test_errors_of_submitted_calls(pool, error, monkeypatch):
    """The future raises the user's exception, with the lane as a note, and the lane's thread lives on."""
    ended = []
    monkeypatch.setattr(threading, "excepthook", lambda args: ended.append(args.exc_type))
    for future in (submit(pool, 1, partial(fail, error)), submit_to_any(pool, lambda _: fail(error))):
        found = future.exception(PATIENCE_S)
        assert type(found) is error
        assert found.__notes__ in ([f"in lane {lane} on cpu"] for lane in (future.lane, 1))
    assert results([submit(pool, lane, lambda: "alive") for lane in range(LANES)]) == ["alive"] * LANES
    assert ended == []


@pytest.mark.parametrize("to_any", [False, True])
def test_calls_can_be_cancelled(pool, to_any):
    """A cancelled call does not run, and the lanes go on with the next."""
    release = occupied(pool, 0, 1, 2)
    send = (lambda task: submit_to_any(pool, lambda _: task())) if to_any else partial(submit, pool, 1)
    dropped, behind = send(lambda: pytest.fail("a cancelled call ran")), send(lambda: "behind")
    assert dropped.cancel()
    release.set()
    assert behind.result(PATIENCE_S) == "behind"
    assert dropped.cancelled()


def test_the_least_loaded_lane(pool):
    """An idle lane comes before a busy one; of idle lanes, the one with the fewest submitted tasks."""
    release = occupied(pool, 0)
    assert pool.least_loaded() is pool.lanes[1]
    results([submit(pool, 1, int), submit(pool, 1, int)])
    assert pool.least_loaded() is pool.lanes[2]
    release.set()


# Calls for any lane


def test_queued_calls_go_to_free_lanes(pool):
    """No call waits for a busy lane while another is free. The oldest starts first. The future names the lane."""
    release, order = occupied(pool, 0, 2), []
    futures = [submit_to_any(pool, lambda lane, n=n: (order.append(n), lane.index, here.lane.index)) for n in range(30)]
    assert results(futures) == [(None, 1, 1)] * 30
    assert (order, {future.lane for future in futures}) == (list(range(30)), {1})
    release.set()


def test_queued_calls_alternate_with_a_lanes_own(pool):
    """Neither kind starves."""
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


def test_a_callers_lane_is_not_free(pool):
    """While a caller works in lane 0 for long, a queued call runs in a lane that is free."""
    release, began = threading.Event(), threading.Event()
    results([submit(pool, lane, int) for lane in range(LANES)])
    eventually(lambda: all(lane.resting for lane in pool.lanes), "the rest of all lanes")
    caller = started(run, pool, lambda: (began.set(), release.wait(PATIENCE_S)))
    assert began.wait(PATIENCE_S)
    assert submit_to_any(pool, lambda lane: lane.index).result(PATIENCE_S) != 0
    release.set()
    caller.join(PATIENCE_S)


def test_a_callback_that_exits_ends_no_lane(pool, monkeypatch):
    """Its exception goes to `threading.excepthook`."""
    told = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.put(args.exc_type))
    release = occupied(pool, 0, 1, 2)
    future = submit_to_any(pool, lambda lane: 1)
    future.add_done_callback(lambda _: sys.exit(3))
    release.set()
    assert told.get(timeout=PATIENCE_S) is SystemExit
    assert future.result(PATIENCE_S) == 1
    assert results([submit(pool, lane, lambda: "alive") for lane in range(LANES)]) == ["alive"] * LANES


def test_a_profiled_caller_runs_its_calls_itself(pool):
    """A profiler sees the operators of the calls that its thread submits, and no others."""
    release, x = occupied(pool, 1, 2), torch.zeros(2)
    others = [submit(pool, 1, lambda: torch.sin(x)) for _ in range(6)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        own = [submit_to_any(pool, lambda lane: (torch.cos(x), threading.get_ident())[1]) for _ in range(LANES)]
        own.append(submit(pool, 0, lambda: (torch.cos(x), threading.get_ident())[1]))
        assert [future.result(0) for future in own] == [threading.get_ident()] * (LANES + 1)
        release.set()
        results(others)
    counts = {event.key: event.count for event in profiler.key_averages() if event.key in ("aten::sin", "aten::cos")}
    assert counts == {"aten::cos": LANES + 1}


# Idle lanes, and the model itself


def test_no_lane_works_inside_idle(pool):
    """The block begins once every lane has finished its task, later calls start after it, and an error frees the lanes."""
    release, entered, order = occupied(pool, 1), threading.Event(), []

    def enter():
        with pool.idle():
            entered.set()

    thread = started(enter)
    blocked(thread)
    assert not entered.is_set()
    release.set()
    thread.join(PATIENCE_S)
    with pool.idle():
        future = submit(pool, 1, partial(order.append, "later"))
        assert all(lane.busy.locked() for lane in pool.lanes)
        order.append("inside")
    future.result(PATIENCE_S)
    with pytest.raises(ValueError), pool.idle():
        fail()
    assert not any(lane.busy.locked() for lane in pool.lanes)
    assert order == ["inside", "later"]


def test_plain_calls_and_lane_0_exclude_each_other(pool):
    """Lane 0 may use the model's own buffers. Other lanes are not excluded."""
    order, began, release, futures = [], threading.Event(), threading.Event(), []

    def plain_call():
        futures.append(submit(pool, 0, lambda: (began.set(), release.wait(PATIENCE_S), order.append("lane 0"))))
        assert submit(pool, 1, lambda: "not excluded").result(PATIENCE_S) == "not excluded"
        order.append("plain call")
        return "answer"

    assert pool.run_on_model(plain_call, (), {}) == "answer"
    assert began.wait(PATIENCE_S)
    caller = started(pool.run_on_model, order.append, ("next plain call",), {})
    blocked(caller)
    release.set()
    caller.join(PATIENCE_S)
    assert order == ["plain call", "lane 0", "next plain call"]


def test_plain_calls_inside_others_do_not_wait(pool):
    """A model may call itself, also in a lane; an error frees lane 0."""
    look = (lambda: (pool.lanes[0].busy.locked(), pool.is_ready()), (), {})
    assert pool.run_on_model(pool.run_on_model, look, {}) == (True, False)
    assert submit(pool, 0, lambda: pool.run_on_model(lambda: here.lane.index, (), {})).result(PATIENCE_S) == 0
    with pytest.raises(KeyError):
        pool.run_on_model({}.__getitem__, ("missing",), {})
    assert pool.is_ready()
    assert submit(pool, 0, lambda: pool.is_ready()).result(PATIENCE_S) is False


# Long waits


@pytest.mark.parametrize("waiter", ["call", "lane", "idle"])
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

    def enter():
        with pool.idle():
            pass

    try:
        if waiter == "call":
            assert run(pool, lambda: begun.wait(PATIENCE_S), waits_for_another_thread) == [True, True]
        else:
            submit(pool, 0, waits_for_another_thread)
            begun.wait(PATIENCE_S)
            run(pool, int) if waiter == "lane" else enter()
    finally:
        logger.removeHandler(handler)
    who = {"call": "a call has been waiting for its lanes", "lane": "lane 0 on cpu has been busy"}
    assert who.get(waiter, who["lane"]) in messages[0]
    for part in (f"lane {int(waiter == 'call')} on cpu:\n", "waits_for_another_thread", "must not wait for another thread"):
        assert part in messages[0]


# Interrupts


def test_an_interrupted_caller_leaves_at_once(pool):
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


class Recorded(SimpleQueue):
    """An inbox that keeps every errand, and calls `put` as an attribute that a test may replace."""

    def __init__(self):
        self.errands = []

    def put(self, errand):
        self.errands.append(errand)
        super().put(errand)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_task_drops_the_others(pool, error):
    """An interrupt or an exit in lane 0 is the first outcome, and a lane that was busy does not start its task."""
    inbox = pool.lanes[2].inbox = Recorded()
    release, ran = occupied(pool, 2), []

    def release_once_dropped():
        eventually(lambda: len(inbox.errands) == 2 and inbox.errands[1].dropped, "the end of the call")
        release.set()

    watch = started(release_once_dropped)
    outcomes = outcomes_of(pool, partial(fail, error), int, lambda: ran.append(2))
    watch.join()
    assert isinstance(outcomes[0].error, error)
    assert ran == []


@pytest.mark.parametrize("place", ["queued", "starting"])
def test_an_interrupt_loses_no_other_call(place, monkeypatch):
    """Calls queued before and after an interrupted `submit_to_any` run before the pool is closed."""
    pool, owner, name = LanePool([CPU]), *((Recorded, "put") if place == "queued" else (Lane, "start"))
    original, interrupts = getattr(owner, name), [KeyboardInterrupt]
    if place == "queued":
        pool.lanes[0].inbox = Recorded()
        assert submit_to_any(pool, lambda lane: "before").result(PATIENCE_S) == "before"
        eventually(lambda: pool.lanes[0].resting, "the rest of the lane")
    monkeypatch.setattr(owner, name, lambda *args: original(*args) if not interrupts else fail(interrupts.pop()))
    with pytest.raises(KeyboardInterrupt):
        submit_to_any(pool, lambda lane: "interrupted")
    after = submit_to_any(pool, lambda lane: "after")
    pool.close()
    assert after.result(0) == "after"


def test_an_interrupted_start_leaves_one_thread(pool, monkeypatch):
    """A caller that is interrupted while it waits for a new thread does not cause a second thread for the lane."""
    wait, interrupts = threading.Event.wait, [True]

    def interrupted(event, timeout=None):
        if sys._getframe(1).f_code is Lane.start.__code__ and interrupts.pop():
            monkeypatch.undo()
            raise KeyboardInterrupt
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        submit(pool, 1, int)
    assert submit(pool, 1, lambda: "alive").result(PATIENCE_S) == "alive"
    serving = [thread for thread in threading.enumerate() if thread.name == f"parawrap-{pool.lanes[1]}"]
    for _ in serving[1:]:
        pool.lanes[1].inbox.put(None)  # so that close ends the surplus thread too
    assert len(serving) == 1
    pool.lanes[2].thread = threading.Thread(target=int)  # interrupted before it started: `close` does not fail


# The end of a pool


def test_close_lets_the_lanes_finish():
    """Submitted and queued calls are done when `close` returns, and no thread is left. It may be called again."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [submit_to_any(pool, lambda lane: "done") for _ in range(12)] + [submit(pool, 1, lambda: "done")]
    closing = [started(pool.close) for _ in range(3)]
    release.set()
    for thread in closing:
        thread.join(PATIENCE_S)
    assert [future.result(0) for future in futures] == ["done"] * 13
    assert not any(thread.is_alive() for thread in own_threads(pool))
    pool.close()
    assert (pool.alive, pool.closed, pool.is_ready()) == (False, True, False)


def test_a_closed_pool_accepts_no_calls():
    """A cut call that another thread's `close` has overtaken runs in its caller; a submitted one raises SessionError."""
    pool = LanePool([CPU] * 2)
    pool.close()
    assert run(pool, *[threading.get_ident] * 2) == [threading.get_ident()] * 2
    for send in (partial(submit, pool, 1), partial(submit_to_any, pool)):
        with pytest.raises(SessionError, match="the lanes are closed: call inside the `with` block"):
            send(int)
    assert own_threads(pool) == []


def test_a_task_may_close_its_own_pool():
    pool = LanePool([CPU] * 2)
    submit(pool, 1, pool.close).result(PATIENCE_S)
    assert not pool.alive
    pool.lanes[1].thread.join(PATIENCE_S)


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


class Value:
    pass


def test_idle_lanes_hold_nothing_of_a_call(pool):
    """Arguments and values of a call are freed when the call is over."""
    value = Value()
    gone = weakref.ref(value)
    run(pool, *together(lambda _, value=value: value))
    submit(pool, 1, lambda value=value: value).result(PATIENCE_S)
    del value
    results([submit(pool, lane, int) for lane in range(LANES)])  # a lane frees a call before it starts the next
    gc.collect()
    assert gone() is None


def code_of_child(work):
    """Run `work` in a forked child, and return its exit code; a child that hangs is ended by an alarm."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(PATIENCE_S))
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_no_lanes(pool):
    """`submit` raises instead of hanging, and `close` works, also if another thread was sending; new pools have lanes."""

    def work():
        for send in (partial(submit, pool, 1), partial(submit_to_any, pool)):
            with pytest.raises(SessionError):
                send(int)
        assert run(pool, *[threading.get_ident] * LANES) == [threading.get_ident()] * LANES
        assert pool.run_on_model(lambda: "plain", (), {}) == "plain"
        own = LanePool([CPU] * 2)
        found = run(own, *together(lambda lane: lane, 2)), own.alive
        own.close()
        pool.close()
        return found == ([0, 1], True) and not pool.alive

    run(pool, *together(lambda lane: lane))
    assert code_of_child(work) == 0
    with pool._gate:
        assert code_of_child(lambda: pool.close() is None) == 0
    assert pool.alive
    assert run(pool, *together(lambda lane: lane)) == [0, 1, 2]


def test_a_lane_is_named_by_index_and_label():
    """Messages and threads name a lane and its device, or its label."""
    pool = LanePool([CPU] * 2, labels=["nc:0", "nc:1"])
    assert str(Lane(1, CPU)) == "lane 1 on cpu"
    run(pool, *together(lambda lane: lane, 2))
    assert pool.lanes[1].thread.name == f"parawrap-{pool.lanes[1]}" == "parawrap-lane 1 on nc:1"
    assert pool.lanes[1].thread.daemon
    pool.close()

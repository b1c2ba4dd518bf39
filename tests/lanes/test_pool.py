"""The pool of lanes: order, errors, many callers, interrupts, closing, forks, and being forgotten."""

from __future__ import annotations

import concurrent.futures
import gc
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
from parawrap.lanes import LanePool, current_lane, first_failure
from parawrap.lanes._flight import Flight, Share
from parawrap.lanes._lane import Lane

CPU = torch.device("cpu")
LANES = 3


@pytest.fixture
def pool() -> Iterator[LanePool]:
    pool = LanePool([CPU] * LANES)
    yield pool
    pool.close()


def values(outcomes):
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    return [outcome.value for outcome in outcomes]


def own_threads(pool):
    return [lane.thread for lane in pool.lanes if lane.thread is not None]


def together(task, lanes=LANES):
    """Tasks that wait for each other: each of them runs in a thread of its own."""
    gate = threading.Barrier(lanes)

    def work(lane):
        gate.wait()
        return task(lane)

    return [lambda lane=lane: work(lane) for lane in range(lanes)]


def test_task_i_runs_in_lane_i_and_outcomes_are_in_that_order(pool):
    """Whatever finishes first, value i is that of lane i."""
    assert values(pool.run(together(lambda lane: (lane, current_lane().index)))) == [(i, i) for i in range(LANES)]


def test_fewer_tasks_than_lanes_leave_the_surplus_lanes_idle(pool):
    """A lane without work is not started."""
    assert values(pool.run(together(lambda lane: lane, 2))) == [0, 1]
    assert [lane.thread is None for lane in pool.lanes] == [True, False, True]


def test_the_caller_is_lane_0_and_threads_start_when_first_needed(pool):
    """No thread before the first call, none ever for lane 0, and the same ones in every call."""
    assert own_threads(pool) == []
    first = values(pool.run(together(lambda _: threading.get_ident())))
    assert first[0] == threading.get_ident()
    assert values(pool.run(together(lambda _: threading.get_ident()))) == first
    assert len(own_threads(pool)) == LANES - 1


def test_the_current_lane_is_known_inside_work_alone(pool):
    """Outside there is none; inside it is the lane, also in the caller's own part."""
    assert current_lane() is None
    assert values(pool.run([current_lane] * LANES)) == list(pool.lanes)
    assert current_lane() is None


def test_the_caller_runs_what_no_lane_has_begun(pool):
    """Where a lane's thread is held up before it begins, the caller does its part and waits for nobody."""
    release, held = threading.Event(), threading.Event()
    pool.run(together(lambda _: None))
    pool.lanes[1].inbox.put(lambda: (held.set(), release.wait()))
    held.wait()
    ran = []
    tasks = [lambda: None, lambda: ran.append(threading.get_ident())]
    pool.run(tasks)
    assert ran == [threading.get_ident()]
    release.set()
    pool.submit(pool.lanes[1], lambda: None).result()
    assert len(ran) == 1  # the lane found its part done, and did not do it again


def test_a_lane_runs_one_piece_of_work_at_a_time(pool):
    """While a lane works, a call's part for it waits its turn."""
    release, begun, order = threading.Event(), threading.Event(), []

    def hold():
        begun.set()
        release.wait()
        order.append("held")

    future = pool.submit(pool.lanes[1], hold)
    begun.wait()

    def own():
        release.set()

    pool.run([own, lambda: order.append("behind")])
    future.result()
    assert order == ["held", "behind"]


def test_work_submitted_to_a_lane_runs_in_order_of_arrival(pool):
    """A lane is a queue."""
    order = []
    for number in range(20):
        future = pool.submit(pool.lanes[0], lambda number=number: order.append(number))
    future.result()
    assert order == list(range(20))


def test_every_kind_of_call_counts_its_tasks(pool):
    """A lane counts what was done in it, and for how long."""
    pool.run([lambda: None] * LANES)
    pool.submit(pool.lanes[0], lambda: None).result()
    assert [lane.tasks for lane in pool.lanes] == [2, 1, 1]
    assert all(lane.busy_ns >= 0 for lane in pool.lanes)


def test_short_work_of_a_kind_is_run_by_the_caller_alone_with_the_same_values(pool):
    """Once a kind is known to be short no lane is woken, and the values and lanes are the same."""
    for _ in range(5):
        assert values(pool.run([current_lane] * LANES, kind="short")) == list(pool.lanes)


def test_work_that_turns_out_long_goes_to_the_lanes_after_all(pool):
    """A kind that was short and is not any more is shared out once that shows, and every value arrives."""
    pool.run([lambda: None] * LANES, kind="k")
    gate = threading.Barrier(2)

    def wait(lane):
        for _ in range(20_000):  # longer than a thread takes to wake
            pass
        if lane:
            gate.wait()
        return lane

    tasks = [lambda lane=lane: wait(lane) for lane in range(LANES)]
    assert values(pool.run(tasks, kind="k")) == [0, 1, 2]


def test_errors_are_outcomes_and_the_lanes_live_on(pool):
    """Whatever work raises comes back as a value, and the next call works in the same threads."""
    before = values(pool.run(together(lambda _: threading.get_ident())))

    def fail(lane):
        raise [ValueError, SystemExit, KeyboardInterrupt][lane](lane)

    outcomes = pool.run(together(fail))
    assert [type(outcome.error) for outcome in outcomes] == [ValueError, SystemExit, KeyboardInterrupt]
    assert values(pool.run(together(lambda _: threading.get_ident()))) == before


def test_the_first_error_in_lane_order_wins_with_notes_on_the_place(pool):
    """Also where a later lane fails first."""
    later_failed = threading.Event()

    def fail(lane):
        if lane == 2:
            later_failed.set()
            raise KeyError("later")
        later_failed.wait()
        raise ValueError("earlier")

    error = first_failure(pool.run([lambda: 0, lambda: fail(1), lambda: fail(2)]), pool.lanes)
    assert isinstance(error, ValueError)
    assert error.__notes__ == ["in lane 1 on cpu, shard 1 of 3", "also in lane 2 on cpu, shard 2 of 3: KeyError: 'later'"]


def test_the_other_lanes_finish_when_one_fails(pool):
    """A call that fails is over when all its work is."""
    done = []

    def task(lane):
        if lane == 0:
            raise ValueError
        done.append(lane)

    pool.run(together(task))
    assert sorted(done) == [1, 2]


def test_an_error_in_submitted_work_arrives_with_the_lane_as_a_note(pool):
    """The future raises the user's exception, which says where it came from."""

    def fail():
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        pool.submit(pool.lanes[1], fail).result()
    assert caught.value.__notes__ == ["in lane 1 on cpu"]


def test_an_error_that_takes_no_notes_reaches_the_future(pool, monkeypatch):
    """An immutable exception neither ends the lane's thread nor leaves its future without an answer."""

    class FrozenError(Exception):
        def __setattr__(self, name, value):
            raise AttributeError(name)

    def fail():
        raise FrozenError

    ended, over = [], threading.Event()

    def thread_ended(args):
        ended.append(args.exc_type)
        over.set()

    monkeypatch.setattr(threading, "excepthook", thread_ended)
    future = pool.submit(pool.lanes[1], fail)
    pool.lanes[1].inbox.put(over.set)
    over.wait()
    assert ended == []
    assert isinstance(future.exception(timeout=0), FrozenError)


def test_work_that_waits_can_be_cancelled(pool):
    """What a lane has not begun is dropped, and the lane goes on with what comes behind."""
    release = threading.Event()
    held = pool.submit(pool.lanes[1], release.wait)
    dropped = pool.submit(pool.lanes[1], lambda: pytest.fail("cancelled work ran"))
    behind = pool.submit(pool.lanes[1], lambda: "behind")
    assert dropped.cancel()
    release.set()
    assert (held.result(), behind.result()) == (True, "behind")
    assert dropped.cancelled()


def test_sixteen_callers_at_once_each_get_their_own_outcomes(pool):
    """No outcome is lost, doubled or given to another caller."""
    gate = threading.Barrier(16)

    def call(caller):
        gate.wait()
        return [
            values(pool.run([lambda step=step, lane=lane: (caller, step, lane) for lane in range(LANES)], kind=step % 2))
            for step in range(20)
        ]

    with concurrent.futures.ThreadPoolExecutor(16) as callers:
        found = list(callers.map(call, range(16)))
    assert found == [[[(caller, step, lane) for lane in range(LANES)] for step in range(20)] for caller in range(16)]
    assert sum(lane.tasks for lane in pool.lanes) == 16 * 20 * LANES


def test_work_may_be_submitted_from_a_lane(pool):
    """A lane may hand work on to another lane, and to itself for later."""
    futures = []

    def task():
        futures.append(pool.submit(pool.lanes[2], current_lane))
        futures.append(pool.submit(current_lane(), current_lane))

    pool.submit(pool.lanes[1], task).result()
    assert [future.result() for future in futures] == [pool.lanes[2], pool.lanes[1]]


def test_two_pools_work_side_by_side(pool):
    """Work of one pool may be shared out over another."""
    other = LanePool([CPU] * 2)
    try:
        inner = values(pool.run([lambda: values(other.run([current_lane] * 2)), current_lane]))
        assert inner == [list(other.lanes), pool.lanes[1]]
    finally:
        other.close()


def test_nobody_works_inside_idle(pool):
    """Work that comes meanwhile begins when the block is over."""
    began = threading.Event()
    with pool.idle():
        future = pool.submit(pool.lanes[1], began.set)
        assert all(lane.busy.locked() for lane in pool.lanes)
        assert not began.is_set()
    future.result()
    assert began.is_set()


@pytest.fixture
def ctrl_c():
    """SIGINT interrupts, also where the tests run in a shell's background, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_a_caller_that_is_interrupted_while_it_waits_leaves_at_once(pool, monkeypatch):
    """Ctrl-C while a lane works: the caller is out, what was not begun is not run, and the pool is usable."""
    assert threading.current_thread() is threading.main_thread()
    waiting, began, ran = threading.Event(), threading.Event(), []
    busy, held = SimpleQueue(), SimpleQueue()  # a get is C code: to the pool the lane computes, it waits for nobody
    wait = Flight.wait

    def announced(flight, patience):
        waiting.set()
        return wait(flight, patience)

    monkeypatch.setattr(Flight, "wait", announced)
    blocked = pool.submit(pool.lanes[2], lambda: (began.set(), held.get()))
    assert began.wait(30)  # lane 2 works on something else: its part is not begun

    def interrupt():
        waiting.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        busy.get()

    gate = threading.Barrier(2)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run([gate.wait, lambda: (gate.wait(), interrupt()), lambda: ran.append(2)])
        assert not blocked.done()
    finally:
        busy.put(None)
        held.put(None)
    blocked.result()
    assert values(pool.run(together(lambda lane: lane))) == [0, 1, 2]
    assert ran == []
    assert not any(lane.busy.locked() for lane in pool.lanes)


def test_a_thread_that_a_lane_waits_for_shares_the_lane(pool):
    """Work that waits for a thread of its own, which makes a call too: nobody waits for ever."""

    def outer():
        inner = []
        thread = threading.Thread(target=lambda: inner.append(values(pool.run([lambda: 1, lambda: 2, lambda: 3]))))
        thread.start()
        thread.join()
        return inner[0]

    assert values(pool.run([outer] * 3)) == [[1, 2, 3]] * 3


def test_closing_lets_the_lanes_finish_and_ends_their_threads():
    """What was sent is done when close returns, and no thread is left."""
    pool = LanePool([CPU] * LANES)
    future = pool.submit(pool.lanes[1], lambda: "done")
    threads = own_threads(pool)
    pool.close()
    assert future.done()
    assert future.result() == "done"
    assert not any(thread.is_alive() for thread in threads)
    assert not pool.alive


def test_closing_twice_does_no_harm():
    """Also a pool that never started a thread, and from several threads at once."""
    pool = LanePool([CPU] * 2)
    pool.close()
    pool.close()
    used = LanePool([CPU] * 2)
    used.run(together(lambda lane: lane, 2))
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(used.close) for _ in range(4)]:
            future.result()
    assert not used.alive


def test_a_closed_pool_takes_nothing_in():
    """A call that another thread's close has overtaken is run by its caller; submitting raises, with what to do instead."""
    pool = LanePool([CPU] * 2)
    pool.close()
    assert values(pool.run([lambda: 1, lambda: 2])) == [1, 2]
    with pytest.raises(SessionError, match="closed"):
        pool.submit(pool.lanes[1], lambda: 1)
    assert torch.get_num_threads() >= 1


def test_a_pool_may_be_closed_by_work_in_one_of_its_lanes():
    """A lane that closes its pool does not wait for itself."""
    pool = LanePool([CPU] * 2)
    pool.submit(pool.lanes[1], pool.close).result()
    assert not pool.alive
    pool.lanes[1].thread.join()


def test_an_abandoned_pool_is_collected_and_its_threads_end():
    """Without close, the last reference ends the lanes."""
    pool = LanePool([CPU] * LANES)
    pool.run(together(lambda lane: lane))
    pool.submit(pool.lanes[0], lambda: None).result()
    threads, gone = own_threads(pool), weakref.ref(pool)
    del pool
    gc.collect()
    assert gone() is None
    assert len(threads) == LANES
    for thread in threads:
        thread.join()


def test_an_idle_lane_keeps_nothing_of_its_last_work_alive(pool):
    """Arguments and values of a call can be freed when the call is over."""

    class Value:
        pass

    value = Value()
    gone = weakref.ref(value)
    pool.run(together(lambda _, value=value: None))
    pool.submit(pool.lanes[1], lambda value=value: None).result()
    # A lane lets go after it has answered: behind another piece of work it certainly has.
    for lane in pool.lanes:
        pool.submit(lane, lambda: None).result()
    del value
    gc.collect()
    assert gone() is None


def test_a_share_has_let_go_of_its_outcome_when_it_tells_of_it():
    """A lane's thread may sleep before its next line: what it then held, an error's frames too, would outlive the call."""

    class Value:
        pass

    class Listening(Flight):
        def land(self, slot, outcome):
            made = weakref.ref(outcome.value)
            del outcome
            kept.append(made() is not None)

    kept: list[bool] = []
    lane = Lane(0, CPU)
    Share(lane, Value, Listening(1), 0, None)()
    claimed = Share(lane, Value, Listening(1), 0, None)
    assert claimed.claim()
    claimed.do()
    assert kept == [False, False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_after_a_fork_the_child_has_no_lanes_and_the_parent_keeps_its_own(pool):
    """The child is told by `alive`, gets an error in place of a hang, and may close; the parent notices nothing."""
    pool.run(together(lambda lane: lane))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            alive = pool.alive
            try:
                pool.submit(pool.lanes[1], lambda: None)
            except SessionError:
                code = 0 if not alive else 2
            pool.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.alive
    assert values(pool.run(together(lambda lane: lane))) == [0, 1, 2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_may_make_a_pool_of_its_own():
    """A new pool in the child has lanes and ends them."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            own = LanePool([CPU] * 2)
            code = 0 if own.alive and [o.value for o in own.run(together(lambda lane: lane, 2))] == [0, 1] else 2
            own.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_lane_is_told_by_its_index_and_device(pool):
    """Messages name a lane and its device, and so does the thread."""
    assert str(pool.lanes[1]) == "lane 1 on cpu"
    pool.run(together(lambda lane: lane))
    assert pool.lanes[1].thread.name == "parawrap-lane 1 on cpu"
    assert pool.lanes[1].thread.daemon


# Work for any lane


def occupied(pool, *lanes):
    """Have those lanes work until the event is set."""
    release = threading.Event()
    for lane in lanes:
        began = threading.Event()
        pool.submit(pool.lanes[lane], lambda began=began: (began.set(), release.wait()))
        assert began.wait(20)
    return release


@pytest.fixture
def held(pool):
    """The first lane is busy until the event is set: the next work is put before it all the same, in its turn."""
    release = occupied(pool, 0)
    yield release
    release.set()


def test_no_work_waits_for_a_busy_lane_while_another_is_free(pool, held):
    """Though it was put before all lanes in turn, the free ones do all of it."""
    futures = [pool.submit_to_any(lambda lane: lane) for _ in range(30)]
    assert pool.lanes[0] not in [future.result(20) for future in futures]
    assert not held.is_set()


def test_work_for_any_lane_is_begun_in_order_of_arrival(pool, held):
    """The oldest first, whichever lane it was put before."""
    other = occupied(pool, 2)
    order = []
    futures = [pool.submit_to_any(lambda lane, number=number: order.append(number)) for number in range(30)]
    concurrent.futures.wait(futures, 20)
    other.set()
    assert order == list(range(30))


def test_a_future_tells_the_lane_that_ran_it(pool, held):
    """Not the lane before which it was put."""
    futures = [pool.submit_to_any(lambda lane: (lane.index, current_lane().index)) for _ in range(12)]
    for future in futures:
        assert future.result(20) == (future.lane, future.lane)


def test_an_error_names_the_lane_that_ran_the_work(pool, held):
    """The note is on the lane that was free."""

    def fail(lane):
        raise ValueError(lane.index)

    for future in [pool.submit_to_any(fail) for _ in range(6)]:
        error = future.exception(20)
        assert error.__notes__ == [f"in lane {error.args[0]} on cpu"]


def test_cancelled_work_for_any_lane_is_not_run(pool):
    """What no lane has begun can be called off."""
    release = occupied(pool, 0, 1, 2)
    dropped = pool.submit_to_any(lambda lane: pytest.fail("cancelled work ran"))
    behind = pool.submit_to_any(lambda lane: "behind")
    assert dropped.cancel()
    release.set()
    assert behind.result(20) == "behind"


def test_close_waits_for_work_for_any_lane():
    """Closing the pool ends no thread before everything that waits is done."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [pool.submit_to_any(lambda lane: "done") for _ in range(12)]
    closing = threading.Thread(target=pool.close)
    closing.start()
    release.set()
    closing.join(20)
    assert [future.result(0) for future in futures] == ["done"] * 12


def test_work_for_any_lane_needs_an_open_pool(pool):
    """A closed pool refuses it, and keeps nothing of it."""
    pool.close()
    with pytest.raises(SessionError, match="closed"):
        pool.submit_to_any(lambda lane: 1)


def test_a_pool_with_work_for_any_lane_can_be_forgotten():
    """What waits refers to no pool: without its last reference the lanes finish and end."""
    pool = LanePool([CPU] * LANES)
    release = occupied(pool, 0, 1, 2)
    futures = [pool.submit_to_any(lambda lane: "done") for _ in range(6)]
    known, threads = weakref.ref(pool), own_threads(pool)
    release.set()
    del pool
    assert known() is None
    assert [future.result(20) for future in futures] == ["done"] * 6
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)


def test_a_callback_that_takes_long_holds_up_nobody(pool):
    """The lane whose thread runs it is not taken for one that rests: a callback may even wait for what it submits."""
    answers = SimpleQueue()

    def again(future):
        answers.put(pool.submit_to_any(lambda lane: future.result() + 1).result(20))

    for _ in range(20):
        pool.submit_to_any(lambda lane: 1).add_done_callback(again)
        assert answers.get(timeout=20) == 2


def test_work_for_any_lane_waits_for_no_lane_that_a_caller_has(pool):
    """A caller works in the first lane for long: what comes meanwhile is done in others, while it does."""
    release, began = threading.Event(), threading.Event()
    for lane in pool.lanes:
        pool.submit(lane, lambda: None).result(20)  # all threads are there
    caller = threading.Thread(target=pool.run, args=([lambda: (began.set(), release.wait(20)), lambda: None],))
    caller.start()
    assert began.wait(20)
    futures = [pool.submit_to_any(lambda lane: lane.index) for _ in range(30)]
    assert 0 not in [future.result(20) for future in futures]
    release.set()
    caller.join(20)


def test_a_callback_that_exits_ends_no_lane(pool, monkeypatch):
    """What it raises is told as that of any thread, and the lane goes on."""
    told = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: told.put(args.exc_type))
    holding = occupied(pool, 0, 1, 2)
    future = pool.submit_to_any(lambda lane: 1)
    future.add_done_callback(lambda _: sys.exit(3))
    holding.set()
    assert told.get(timeout=20) is SystemExit
    assert future.result(20) == 1
    alive = [pool.submit(lane, lambda: "alive") for lane in pool.lanes]
    assert [future.result(20) for future in alive] == ["alive"] * LANES


def test_an_interrupt_while_work_is_handed_over_loses_no_other(monkeypatch):
    """Wherever it comes between: what was handed over before and after is done, at the end of the pool at the latest."""
    pool = LanePool([CPU])
    release = occupied(pool, 0)
    wake, interrupts = LanePool._wake_one, [False, True, False]

    def interrupted(pool, lanes):
        if interrupts.pop(0):
            raise KeyboardInterrupt
        wake(pool, lanes)

    monkeypatch.setattr(LanePool, "_wake_one", interrupted)
    before = pool.submit_to_any(lambda lane: "before")
    with pytest.raises(KeyboardInterrupt):
        pool.submit_to_any(lambda lane: "interrupted")
    after = pool.submit_to_any(lambda lane: "after")
    release.set()
    pool.close()
    assert (before.result(0), after.result(0)) == ("before", "after")


def test_calls_of_a_profiled_caller_are_spread_and_are_its_own(pool):
    """A profiler sees what its thread submits, all of it and nothing else, in as many lanes as there are."""
    release = occupied(pool, 0, 1, 2)
    x = torch.zeros(2)
    others = [pool.submit_to_any(lambda lane: torch.sin(x)) for _ in range(6)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        own = [pool.submit_to_any(lambda lane: (torch.cos(x), lane.index)[1]) for _ in range(LANES)]
        release.set()
        lanes = [future.result(20) for future in own]
        concurrent.futures.wait(others, 20)
    counts = {event.key: event.count for event in profiler.key_averages() if event.key in ("aten::sin", "aten::cos")}
    assert counts == {"aten::cos": LANES}
    assert sorted(lanes) == list(range(LANES))

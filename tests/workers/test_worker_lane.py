"""The queue of a worker: streams, cancellation, callbacks, and the memory that
batches travel in.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed, wait

import psutil
import pytest
import torch
from torch import nn

from parawrap import RankDiedError, SessionError, UnsendableError, parallel
from parawrap.workers.local_workers import LocalWorker
from parawrap.workers.submitted_call import SubmittedCall
from parawrap.workers.worker_lanes import WorkerLanes
from tests.helpers.pools import processes
from tests.helpers.waiting import eventually
from tests.helpers.worker_models import Dying, Gated, Keeping

MIB = 1 << 20


def numbers(*values):
    return [torch.full((2, 1), float(value)) for value in values]


def firsts(outputs):
    return [int(output[0]) for output, _ in outputs]


def test_exception_ends_running_calls(tmp_path):
    """A block that ends with an exception does not wait for the calls in its workers.

    Its futures are done.
    """
    with pytest.raises(KeyError), processes(Gated(tmp_path)) as p, ThreadPoolExecutor(1) as threads:  # noqa: PT012
        futures = [p.submit(batch) for batch in numbers(*range(1, 25, 2))]
        waiting = threads.submit(wait, futures, timeout=60)
        eventually(lambda: len([*tmp_path.iterdir()]) == 2, "calls in both workers")
        p.__exit__(KeyError, KeyError(), None)
        assert not waiting.result().not_done
        raise KeyError
    for future in futures:
        with pytest.raises((CancelledError, SessionError)):
            future.result()


def test_queued_calls_run_or_cancel(tmp_path, monkeypatch):
    """The third call waits for a lane with room. A call that cannot be sent is refused at once."""
    with parallel(Gated(tmp_path), ["cpu"], workers="process") as p:
        first, second, cancelled, last = map(p.submit, numbers(1, 2, 4, 6))
        with pytest.raises(UnsendableError):
            p.submit(each for each in ())
        eventually((tmp_path / "1").exists, "the first call")
        assert cancelled.cancel()
        with monkeypatch.context() as patch:
            patch.setattr(p._session.lanes, "wait", None)  # for an answer, which never comes
            with pytest.raises(CancelledError):
                cancelled.result()
        (tmp_path / "go").touch()
        assert firsts(each.result() for each in (first, second, last)) == [1, 2, 6]


def test_callbacks_hold_up_nobody():
    """Callbacks run in a thread of the block: a caller may hold a lock that they need, and they may
    wait for other futures.
    """
    x, lock, read = torch.ones(5, 2), threading.Lock(), []
    with processes(nn.Identity()) as p:

        def read_with_lock(future):
            with lock:
                read.append(future.result())

        def read_another(future):
            read.append(p_other.result() + future.result())

        for _ in range(20):
            p.submit(x).add_done_callback(read_with_lock)
            with lock:
                p(x)
        eventually(lambda: len(read) == 20, "all callbacks")
        future, p_other = p.submit(x), p.submit(x)
        future.add_done_callback(read_another)
        eventually(lambda: len(read) == 21, "the callback that waits")
    assert torch.equal(read[-1], 2 * x)


@pytest.mark.parametrize("reads", ["receiver", "caller"])
def test_callback_waits_for_another(tmp_path, reads):
    """A callback may wait for a future with a callback, also if a caller receives the answers."""
    order = []
    one, three, zero = numbers(1, 3, 0)
    with processes(Gated(tmp_path)) as p, ThreadPoolExecutor(1) as threads:
        first, second = p.submit(one), p.submit(three)

        def wait_for_second(_):
            if reads == "caller":
                waiting.append(threads.submit(p._session.lanes.wait, is_over.is_set))
            order.append(int(second.result(20)[0][0]))

        waiting, is_over = [], threading.Event()
        second.add_done_callback(lambda _: order.append("second"))
        first.add_done_callback(wait_for_second)
        eventually(lambda: len([*tmp_path.iterdir()]) == 2, "calls in both workers")
        (tmp_path / "go").touch()
        eventually(lambda: len(order) == 2, "both callbacks")
        is_over.set()
        assert p.submit(zero).result(20)[0][0] == 0
        for each in waiting:
            each.result(20)
    assert {*order} == {"second", 3}


def test_callback_reads_its_own_future(monkeypatch):
    """No other callback runs meanwhile: it may need a lock that this one holds."""
    order = []

    def read(future):
        order.append("begin")
        order.append(int(future.result()))

    with processes(nn.Identity()) as p:
        lanes = p._session.lanes
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "receive_for_futures", lambda **_: None)
            for number in range(2):
                p.submit(torch.tensor([number])).add_done_callback(read)
            lanes.wait(lanes.is_idle)
        lanes.receive_for_futures(at_once=True)
        eventually(lambda: len(order) == 4, "both callbacks")
    assert order[0] == order[2] == "begin"


def test_callback_that_is_added_while_its_future_ends(monkeypatch):
    """It runs in the thread for callbacks: the thread that reads may hold a lock that it needs."""
    ran_in, end = [], SubmittedCall.end

    def add_and_end(call):
        call.future.add_done_callback(lambda _: ran_in.append(threading.current_thread()))
        end(call)

    with processes(nn.Identity()) as p:
        lanes = p._session.lanes
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "receive_for_futures", lambda **_: None)
            patch.setattr(SubmittedCall, "end", add_and_end)
            p.submit(torch.ones(1)).result(60)
        lanes.receive_for_futures(at_once=True)
        eventually(lambda: ran_in, "the callback")
    assert ran_in != [threading.current_thread()]


def test_receiver_that_cannot_start(monkeypatch):
    """The next call starts one, and its callbacks run."""
    ended = threading.Event()

    def start(_):
        raise RuntimeError("can't start new thread")

    with processes(nn.Identity()) as p:
        p(torch.ones(9))  # the workers start
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="new thread"):
                p.submit(torch.ones(1))
        p.submit(torch.ones(1)).add_done_callback(lambda _: ended.set())
        assert ended.wait(20)


def test_callback_that_exits(monkeypatch):
    """Later callbacks run, also if a caller has received the answer to the first one."""
    ended = threading.Event()
    with processes(nn.Identity()) as p:
        lanes = p._session.lanes
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "receive_for_futures", lambda **_: None)
            p.submit(torch.ones(1)).add_done_callback(lambda _: sys.exit())
            lanes.wait(lanes.is_idle)
        p.submit(torch.ones(1)).add_done_callback(lambda _: ended.set())
        assert ended.wait(20)


@pytest.mark.parametrize("wait_for", ["result", "wait", "as_completed", "asyncio", "callback"])
def test_ways_to_wait_for_futures(wait_for):
    """Futures give their results to any thread that waits, in any order."""
    batches = [torch.full((3, 2), float(number)) for number in range(30)]
    with processes(nn.Identity()) as p:
        for _ in range(2):
            futures = [p.submit(batch) for batch in batches]
            if wait_for == "result":
                assert [float(future.result(60)[0, 0]) for future in reversed(futures)] == [
                    *range(29, -1, -1)
                ]
            elif wait_for == "wait":
                assert not wait(futures, 60).not_done
            elif wait_for == "as_completed":
                assert {*as_completed(futures, 60)} == {*futures}
            elif wait_for == "asyncio":

                async def gather(futures=futures):
                    return await asyncio.gather(*map(asyncio.wrap_future, futures))

                assert len(asyncio.run(gather())) == 30
            else:
                done = []
                for future in futures:
                    future.add_done_callback(done.append)
                eventually(lambda done=done: len(done) == 30, "all callbacks")
            assert [float(future.result()[0, 0]) for future in futures] == [*range(30)]


def test_new_worker_beside_a_busy_one(tmp_path):
    """The thread that waits for the busy one receives its answers too."""
    one, two, four = numbers(1, 2, 4)
    with processes(Gated(tmp_path)) as p:
        busy = p.submit(one)
        eventually((tmp_path / "1").exists, "the call in the busy worker")
        pid = p.submit(two).result()[1]
        os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: None in [lane.worker for lane in p._session.lanes.all],
            "the end of the idle worker",
        )
        assert p.submit(four).result(60)[1] != pid
        (tmp_path / "go").touch()
        assert firsts([busy.result()]) == [1]


def test_reader_after_the_last_worker(monkeypatch):
    """A caller that reads gets the error of its call, also while another thread is about to tell it
    and no worker is left.
    """
    is_telling, has_read = threading.Event(), threading.Event()
    caller, end = threading.current_thread(), SubmittedCall.end

    def end_late(call):
        is_telling.set()
        assert has_read.wait(60)
        end(call)

    def receive(timeout_s):
        try:
            type(lanes)._receive(lanes, timeout_s)
        finally:
            if threading.current_thread() is caller:
                has_read.set()

    with parallel(Dying(), ["cpu"], workers="process", retries=0) as p:
        lanes = p._session.lanes
        monkeypatch.setattr(SubmittedCall, "end", end_late)
        future = p.submit(-torch.ones(1))  # the thread of the block receives its end
        assert is_telling.wait(60)
        monkeypatch.setattr(lanes, "_receive", receive)
        with pytest.raises(RankDiedError):
            future.result(60)


@pytest.mark.parametrize(("owner", "step"), [(WorkerLanes, "_take_answer"), (SubmittedCall, "end")])
def test_an_interrupted_reader(owner, step, monkeypatch):
    """A call whose answer was lost runs again, and the next thread that reads ends it."""

    def interrupt(*_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with parallel(nn.Identity(), ["cpu"], workers="process") as p:
        lanes = p._session.lanes
        monkeypatch.setattr(lanes, "receive_for_futures", lambda **_: None)
        future = p.submit(torch.ones(1))
        monkeypatch.setattr(owner, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            lanes.wait(lanes.is_idle)
        assert future.result(20) == 1


def test_submit_while_a_worker_ends(monkeypatch):
    """A process may end seconds after its connection. Other calls are sent meanwhile."""
    is_ending, was_sent, in_time = threading.Event(), threading.Event(), []
    death = LocalWorker.death

    def end_late(worker):
        is_ending.set()
        in_time.append(was_sent.wait(20))
        return death(worker)

    monkeypatch.setattr(LocalWorker, "death", end_late)
    with processes(Dying(), retries=0) as p:
        lost = p.submit(-torch.ones(1))
        assert is_ending.wait(60)
        sent = p.submit(torch.ones(1))
        was_sent.set()
        assert sent.result(60) == 2
        with pytest.raises(RankDiedError):
            lost.result(60)
    assert all(in_time)


def test_parts_of_a_call_have_one_model():
    """Another thread changes the model, and calls it, at the same time."""
    model, x = nn.Linear(1, 1, bias=False), torch.ones(9, 1)
    stop = threading.Event()

    def change():
        with torch.no_grad():
            while not stop.is_set():
                model.weight.add_(1)
                p(x)

    with processes(model) as p, ThreadPoolExecutor(1) as threads:
        changing = threads.submit(change)
        try:
            assert all(p(x).unique().numel() == 1 for _ in range(50))
        finally:
            stop.set()
        changing.result()


def test_kept_inputs_stay():
    """Shared memory is not used again while a tensor in the worker lies on it."""
    with parallel(Keeping(), ["cpu"], workers="process") as p:
        sums = [
            float(p.submit(torch.full((50_000,), float(number))).result()) for number in range(1, 6)
        ]
    assert sums == [50_000 * number * (number + 1) / 2 for number in range(1, 6)]


@pytest.mark.parametrize(
    ("elements", "batches"),
    [
        pytest.param(64, 500, id="inline"),
        pytest.param(400_000, 60, id="lent"),
        pytest.param(MIB // 4, 3_000, id="many", marks=pytest.mark.long),
    ],
)
def test_stream_does_not_grow_memory(elements, batches):
    """A stream does not grow the memory of this process and of the workers, however many batches it
    has.
    """
    batch, used = torch.ones(elements), []

    def source():
        yield from itertools.repeat(batch, 50)
        used.append(measure())
        yield from itertools.repeat(batch, batches)

    def measure():
        family = [psutil.Process(), *psutil.Process().children(recursive=True)]
        return sum(process.memory_info().rss for process in family)

    with processes(nn.Identity()) as p:
        for output in p.map(source(), buffersize=4):
            del output
        used.append(measure())
    assert used[1] - used[0] < 8 * MIB + 4 * batch.nbytes, (
        "as many batches as are in flight, never all"
    )


def test_a_cancelled_call_begins_twice(caplog):
    """Ctrl-C may come after a cancelled call has told those who wait, and before it is taken out
    of the queue: the next thread that sends begins it again.
    """
    call = SubmittedCall((), {}, lambda output, _: output, lanes=None)
    assert call.future.cancel()
    assert [call.begin(), call.begin()] == [False, False]
    call.end()
    assert call.future.cancelled()
    assert not caplog.records

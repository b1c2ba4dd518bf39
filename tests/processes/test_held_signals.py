"""Ctrl-C, and other signals whose handlers raise, at any moment of a call that
the caller drives.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from parawrap.processes.held_signals import HeldSignals
from parawrap.processes.latch import Latch
from tests.helpers.pools import processes
from tests.helpers.processes import ranks
from tests.helpers.waiting import PATIENCE_S, eventually


class AlarmError(BaseException):
    """As of a program that limits calls. Pickling would report an Exception as one of the value."""


def raise_alarm(*_):
    raise AlarmError


@contextmanager
def handling(number, handler):
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture(name="no_collector")
def _no_collector():
    """Stop the garbage collector. It calls finalizers, and callbacks such as hypothesis's, at any
    moment, and Python drops the error of a signal that arrives in one.
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_signals_are_held_back():
    """Signals that are held back wake the caller, and their handlers run at the end: Ctrl-C too."""
    woken = []
    before = signal.getsignal(signal.SIGINT)
    with handling(signal.SIGALRM, raise_alarm):
        for number, error in (signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, AlarmError):
            held = HeldSignals(lambda: woken.append(1))
            os.kill(os.getpid(), number)
            assert held.has_arrived
            with pytest.raises(error):
                held.end()
        assert len(woken) == 2
        assert signal.getsignal(signal.SIGALRM) is raise_alarm
    assert signal.getsignal(signal.SIGINT) is before


def test_each_signal_is_handled():
    """Its handler runs although that of an earlier signal raises, which does so once."""
    handled = []
    with handling(signal.SIGTERM, lambda *_: handled.append(signal.SIGTERM)):
        held = HeldSignals(lambda: None)
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            held.end()
    assert handled == [signal.SIGTERM]


def test_handlers_are_restored_after_errors():
    """A handler that raises at the moment of its return leaves no other one behind."""
    real, numbers = signal.signal, []

    def raising(number, handler):
        result = real(number, handler)
        numbers.append(number)
        if len(numbers) in (4, 6):
            raise AlarmError
        return result

    before = signal.getsignal(signal.SIGINT)
    with handling(signal.SIGALRM, raise_alarm):
        held = HeldSignals(lambda: None)
        signal.signal = raising
        try:
            numbers.extend([0, 0, 0])
            with pytest.raises(AlarmError):
                held.end()
        finally:
            signal.signal = real
        assert signal.getsignal(signal.SIGALRM) is raise_alarm
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_signals_stay_ignored():
    with handling(signal.SIGINT, signal.SIG_IGN):
        held = HeldSignals(lambda: None)
        os.kill(os.getpid(), signal.SIGINT)
        assert not held.has_arrived
        held.end()


def fork_in_a_thread(handler):
    """Fork in another thread, as code of the user may. True if the child has this handler."""
    codes = []

    def fork():
        pid = os.fork()
        if pid == 0:
            os._exit(0 if signal.getsignal(signal.SIGINT) is handler else 3)
        codes.append(os.waitpid(pid, 0)[1])

    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
    return codes == [0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_forked_child_has_script_handlers():
    """Another thread may fork while this one holds signals back, also twice, one in the other."""
    before = signal.getsignal(signal.SIGINT)
    outer = HeldSignals(lambda: None)
    assert fork_in_a_thread(before)
    inner = HeldSignals(lambda: None)
    assert fork_in_a_thread(before)
    inner.end()
    assert fork_in_a_thread(before)
    outer.end()
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_other_threads_hold_nothing():
    """The end of an object that holds nothing, in another thread, does not matter to this one."""
    before = signal.getsignal(signal.SIGINT)
    held = HeldSignals(lambda: None)
    thread = threading.Thread(target=lambda: HeldSignals(lambda: None).end())
    thread.start()
    thread.join()
    assert fork_in_a_thread(before)
    held.end()


def test_a_latch_wakes_all_threads():
    """All threads that wait for a latch go on once it is open, and a time limit holds."""
    latch, done = Latch(), []
    assert not latch.wait(0.01)
    threads = [
        threading.Thread(target=lambda: done.append(latch.wait(PATIENCE_S))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    latch.set()
    latch.set()
    for thread in threads:
        thread.join()
    assert done == [True] * 3
    assert latch.wait(0)


def test_a_latch_is_set_while_a_thread_goes_on():
    """A thread that waits goes on if the latch is set again just after it has acquired the lock."""
    latch = Latch()
    lock = latch._lock

    class LockOfLatchThatIsSet:
        release = lock.release

        def acquire(self, timeout):
            latch.set()
            is_acquired = lock.acquire(timeout=timeout)
            latch.set()
            return is_acquired

    latch._lock = LockOfLatchThatIsSet()
    assert latch.wait(PATIENCE_S)
    assert not lock.locked()


# -- in calls


def work(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return os.getpid()


def interrupted(calls, number, error, count, within_s):
    """Make calls in turn until so many were interrupted, each after a random time."""
    numbers, caught = random.Random(count), 0
    while caught < count:
        gone = threading.Event()

        after_s = numbers.uniform(0, within_s)

        def send(gone=gone, after_s=after_s):
            time.sleep(after_s)
            os.kill(os.getpid(), number)
            gone.set()

        thread = threading.Thread(target=send)
        try:
            thread.start()
            while not gone.is_set():
                numbers.choice(calls)()
            time.sleep(0.01)
        except error:
            caught += 1
        thread.join()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, AlarmError)]
)
def test_ranks_stay_after_any_interrupt(number, error, count):
    """The same processes answer, each with its own value, and nothing is left over from the call
    before.
    """
    large = torch.rand(30_000)
    with handling(signal.SIGALRM, raise_alarm), ranks(2, ipc_groups=None).open() as two:
        pids = tuple(two(os.getpid))

        def check_large():
            assert torch.equal(two(torch.clone, large)[1], large)

        def check_work():
            assert tuple(two(work, 0.001)) == pids

        def check_one():
            assert two[1](os.getpid) == pids[1]

        interrupted([check_large, check_work, check_one], number, error, count, 0.006)
        assert tuple(two(os.getpid)) == pids


def wait_for(path):
    while not path.exists():
        time.sleep(0.01)
    return os.getpid()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("count", [40, pytest.param(1_000, marks=pytest.mark.long)])
def test_stacks_arrive_after_any_interrupt(tmp_path, count):
    """A request for stacks that is interrupted disturbs neither the call nor later requests."""
    with ranks(2, ipc_groups=None).open() as two:
        launch = two.submit(wait_for, tmp_path / "go")
        interrupted([two.stacks], signal.SIGINT, KeyboardInterrupt, count, 0.006)
        eventually(lambda: str(two.stacks()).count("in wait_for") == 2, "stacks of both ranks")
        (tmp_path / "go").touch()
        assert len(launch.results(PATIENCE_S)) == 2


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("count", [25, pytest.param(300, marks=pytest.mark.long)])
def test_workers_answer_after_any_interrupt(count):
    """Workers answer after any interrupt, and each answer belongs to its call. A worker may be
    replaced.
    """
    with torch.no_grad(), processes(torch.nn.Identity()) as p:

        def check(call):
            x = torch.rand(5, 2)
            assert torch.equal(call(x), x)

        calls = [
            lambda: check(p),
            lambda: check(lambda x: p.submit(x).result()),
            lambda: check(lambda x: torch.stack(list(p.map(list(x), chunksize=1)))),
        ]
        for call in calls:
            call()
        interrupted(calls, signal.SIGINT, KeyboardInterrupt, count, 0.01)
        for call in calls:
            call()

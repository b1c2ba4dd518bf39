"""Two rules of pools: each call ends whatever happens to the thread that supervises, and no wait is
without a deadline.
"""

from __future__ import annotations

import gc
import linecache
import logging
import os
import random
import signal
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker

import psutil
import pytest
import torch

from parawrap import LaunchError, LaunchTimeoutError, RankDiedError, wrapper
from parawrap.processes import fork_server
from parawrap.processes.latch import Latch
from parawrap.processes.wire import Wire
from tests.helpers.limits import files_left
from tests.helpers.pools import processes
from tests.helpers.processes import SILENT_S, ranks
from tests.helpers.waiting import PATIENCE_S, eventually
from tests.helpers.worker_models import Dying

MIB = 1 << 20
ALONE = {"ipc_groups": None, "grace_s": 1}


# -- an exception at any line of the thread


class FaultError(Exception):
    pass


class Fault:
    """Raises FaultError in the thread with this name, at a line of parawrap's processes, counted
    from 1.
    """

    def __init__(self, name, line):
        self._name = name
        self._left = line
        self.where = None

    def __enter__(self):
        threading.settrace(self._trace)
        return self

    def __exit__(self, *_):
        threading.settrace(None)
        self._left = 0

    def _trace(self, frame, event, _):
        name, at = frame.f_code.co_filename, frame.f_lineno
        if (
            self._left == 0
            or threading.current_thread().name != self._name
            or "/parawrap/" not in name
        ):
            return None
        # No real error comes between a lock and its block: at a `with`, which is traced again when
        # the block ends, and in `__enter__`. Python ignores errors in `__del__`
        is_with = linecache.getline(name, at).strip().startswith("with ")
        is_real = not (is_with or frame.f_code.co_name in ("__enter__", "__exit__", "__del__"))
        if event == "line" and is_real:
            self._left -= 1
            if self._left == 0:
                self.where = f"{name}:{at}"
                raise FaultError
        return self._trace


def make_calls():
    with ranks(2, **ALONE).open() as open_ranks:
        open_ranks(os.getpid)
        open_ranks.submit(torch.clone, torch.ones(30_000)).results(PATIENCE_S)
        open_ranks(torch.clone, torch.ones(30_000))


def launch():
    wrapper(ranks(2, **ALONE))(os.getpid).submit().results(PATIENCE_S)


def use_workers():
    with torch.no_grad(), processes(Dying(), retries=2) as p:
        for value in (1.0, -9.0, 2.0):
            with suppress(RankDiedError):
                p.submit(torch.full((2,), value)).result(PATIENCE_S)


THREADS = {
    "parawrap-ranks": (make_calls, 1_500),
    "parawrap-launch": (launch, 1_000),
    "parawrap-workers": (use_workers, 500),
}


def children():
    server, tracker = fork_server._server, resource_tracker._resource_tracker._pid
    own = {tracker} | ({server._process.pid} if server is not None else set())
    return [each for each in psutil.Process().children(recursive=True) if each.pid not in own]


# Of sockets that garbage collection closes
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", THREADS)
def test_fault_of_the_supervising_thread(name):
    """Each caller gets a result or an error, and no process stays."""
    work, last = THREADS[name]
    numbers = random.Random(12)
    work()
    logging.disable(logging.CRITICAL)
    try:
        for _ in range(8):
            with Fault(name, numbers.randint(1, last)) as fault:
                done = threading.Event()

                def run(done=done):
                    with suppress(FaultError, LaunchError, RankDiedError):
                        work()
                    done.set()

                threading.Thread(target=run, daemon=True).start()
                assert done.wait(30), f"a caller waits for ever after an error at {fault.where}"
            gc.collect()  # sockets that an error left unclosed, with its traceback
            eventually(
                lambda: not children(),
                f"the end of all processes after an error at {fault.where}",
                30,
            )
    finally:
        logging.disable(logging.NOTSET)


# -- a stall at any byte of a message


def send_and_stop(size, at):
    """Return so many bytes, but stop this process after `at` bytes of the message."""
    send = Wire._send_unsent

    def stopping(self):
        data, letter, brings_file = self._unsent[0]
        if len(data) > at and not brings_file:
            sent = self._socket.send(data[:at])
            os.kill(os.getpid(), signal.SIGSTOP)
            self._unsent[0] = type(self._unsent[0])(memoryview(data)[sent:], letter, brings_file)
        elif brings_file:
            os.kill(os.getpid(), signal.SIGSTOP)
        return send(self)

    Wire._send_unsent = stopping
    return bytes(size)


def test_rank_that_stops_within_a_message():
    """The time limit holds, and the error says so."""
    with ExitStack() as worlds:
        launches = []
        for size, at in (10_000, 0), (10_000, 40), (10_000, 5_000), (MIB, 1):
            one = worlds.enter_context(ranks(1, **ALONE, timeout_min=SILENT_S / 60).open())
            launches.append(one.submit(send_and_stop, size, at))
        for launch in launches:
            with pytest.raises(LaunchTimeoutError):
                launch.results(PATIENCE_S)


def test_stopped_rank_takes_no_message():
    """A large call to it leaves as far as its connection has room.

    The time limit, and the end, hold all the same.
    """
    with ranks(2, **ALONE, timeout_min=SILENT_S / 60).open() as open_ranks:
        pid = open_ranks[1](os.getpid)
        os.kill(pid, signal.SIGSTOP)
        texts = [str(number) * 1_000 for number in range(25)]
        launches = [open_ranks.submit(list, texts) for _ in range(20)]
        with pytest.raises(LaunchTimeoutError):
            launches[0].results(PATIENCE_S)
        for each in launches[1:]:
            with pytest.raises(LaunchError):
                each.results(PATIENCE_S)


def test_stopped_worker_ends_with_its_block(monkeypatch):
    """Closing waits for it a moment, then it is killed."""
    monkeypatch.setattr("parawrap.workers.local_workers._CLOSE_S", 0.5)
    with torch.no_grad(), processes(Dying()) as p:
        p.submit(torch.ones(1)).result(PATIENCE_S)
        stopped = children()
        for each in stopped:
            each.suspend()
    eventually(lambda: not children(), "the end of the workers")


# -- forks at any moment


@contextmanager
def forking():
    """Fork children in another thread, again and again. They stay until the end."""
    children_, stop = [], threading.Event()

    def fork():
        while not stop.is_set() and len(children_) < 60:
            pid = os.fork()
            if pid == 0:
                signal.pause()
                os._exit(0)
            children_.append(pid)
            time.sleep(0.002)

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        for pid in children_:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_forks_during_a_start():
    """A child holds no connection: ranks end as soon as they would, and deaths are seen."""
    fork_server.stop_server()  # also while the server starts
    with forking():
        start = time.monotonic()
        for _ in range(3):
            assert wrapper(ranks(2, **ALONE))(lambda: 1)() == (1, 1)
        with torch.no_grad(), processes(Dying(), retries=0) as p:
            assert p.submit(torch.ones(1)).result(PATIENCE_S) == 2
            with pytest.raises(RankDiedError):
                p.submit(torch.full((1,), -9.0)).result(PATIENCE_S)
        with ranks(1, **ALONE).open() as open_ranks, pytest.raises(RankDiedError):
            open_ranks(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert time.monotonic() - start < 60


# -- limits of this process


def test_limit_on_files_fails_a_call():
    """A call that reaches the limit on open files fails: its error names the limit, the ranks stay,
    and later calls work.
    """
    large = torch.ones(MIB)
    with ranks(2, **ALONE).open() as open_ranks:
        pids = open_ranks(os.getpid)
        for count in range(4):
            with files_left(count):
                for call in (torch.clone, large), (torch.ones, MIB):
                    with suppress(OSError):
                        open_ranks(*call)
        with files_left(0), pytest.raises(OSError, match="Too many open files"):
            open_ranks(torch.clone, torch.ones(5 * MIB))
        with files_left(0), pytest.raises(OSError, match="this process cannot take a message"):
            open_ranks(torch.ones, 5 * MIB)
        assert open_ranks(os.getpid) == pids
        assert open_ranks(torch.clone, large)[1].sum() == MIB


@pytest.mark.parametrize("count", [*range(0, 16, 3)])
def test_limit_on_files_at_a_start(count):
    """The launch is refused with a cure, or works. Afterwards, everything works."""
    wrapper(ranks(1, **ALONE))(os.getpid)()
    with files_left(count):
        try:
            wrapper(ranks(2, **ALONE))(os.getpid)()
        except (LaunchError, OSError) as error:
            assert "open files" in str(error)  # noqa: PT017
    assert wrapper(ranks(2, **ALONE))(lambda: 1)() == (1, 1)
    eventually(lambda: not children(), "the end of all processes")


def hold_all_files():
    """Sleep without a free descriptor, and with long stacks."""
    is_over = threading.Event()

    def wait(depth):
        return wait_deeper(depth) if depth else is_over.wait()

    def wait_deeper(depth):  # a stack text leaves out repeated frames of one function
        return wait(depth - 1)

    threads = [threading.Thread(target=wait, args=(20,)) for _ in range(50)]
    for thread in threads:
        thread.start()
    try:
        with files_left():
            print("ready", flush=True)
            time.sleep(PATIENCE_S)
    finally:
        is_over.set()


def test_limit_on_files_in_a_rank():
    """A rank that cannot send its stacks says so, and goes on."""
    with ranks(1, **ALONE).open() as one:
        pid = one(os.getpid)
        launch = one.submit(hold_all_files)
        eventually(lambda: "ready" in launch.logs(0), "the last descriptor")
        said = "cannot send its stacks: [Errno 24]"
        eventually(lambda: said in launch.stacks()[0], "its answer")
        launch.cancel()
        assert one(os.getpid) == pid


def test_limit_on_files_with_workers():
    with torch.no_grad(), processes(Dying(), retries=0) as p:
        p.submit(torch.ones(2)).result(PATIENCE_S)
        with files_left(0), pytest.raises(OSError, match="Too many open files"):
            p.submit(torch.ones(MIB)).result(PATIENCE_S)
        assert p.submit(torch.ones(MIB)).result(PATIENCE_S).sum() == 2 * MIB


# -- ranks that do not answer, or have died, before a call


def test_a_death_just_before_a_call_has_its_signal(monkeypatch):
    """A rank that died after the last call is reported with its signal, also if the next call began
    before the supervising thread could end the ranks.
    """
    with ranks(2, **ALONE).open() as two:
        pids = two(os.getpid)
        pool = two._run._pool
        begin, member = pool.begin, pool._members.all[0]

        def begin_after_a_death(call):
            # The caller holds the lock here, so the thread of the ranks handles nothing meanwhile
            os.kill(pids[0], signal.SIGKILL)
            while not member.has_exited:
                pool._members._on_status(member)
            begin(call)

        monkeypatch.setattr(pool, "begin", begin_after_a_death)
        with pytest.raises(RankDiedError, match="killed by SIGKILL") as caught:
            two(os.getpid)
        assert caught.value.signal is signal.SIGKILL


def test_requests_at_a_stopped_rank_do_not_pile_up():
    """A rank that never answers keeps a bounded number of requests for stacks and lines."""
    with ranks(1, **ALONE).open() as one:
        (pid,) = one(os.getpid)
        launch = one.submit(time.sleep, PATIENCE_S)
        eventually(lambda: one._run._pool.state_of(0) == "running", "the call")
        os.kill(pid, signal.SIGSTOP)
        try:
            pool, handled = one._run._pool, Latch()
            for _ in range(200):
                pool.post(partial(pool._ask_for_stacks, Latch()))
                pool.post(partial(pool._ask_for_lines, Latch()))
            pool.post(handled.set)
            assert handled.wait(PATIENCE_S)
            assert len(pool._stack_requests) < 100
            assert len(pool._line_requests) < 100
        finally:
            os.kill(pid, signal.SIGCONT)
            launch.cancel()

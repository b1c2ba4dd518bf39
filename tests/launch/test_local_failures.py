"""Promises 3 and 4: failed launches raise the right error soon, and no process survives them."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    Platform,
    PlatformError,
    RankDiedError,
    UnsendableError,
    current_rank,
    wrapper,
)
from tests.helpers.processes import (
    SILENT_S,
    assert_gone,
    failure_of,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    report_pid_function,
    running_scripts,
)
from tests.helpers.waiting import PATIENCE_S, eventually

METHODS = ["forkserver", "spawn", "fork"]
COLLECTIVES = ["all_reduce", "barrier", "broadcast", "recv", "gather_objects"]
WAITS = ["store", "sleep", "event", "lock", "child", "socket", "compute"]


def blocking(how):
    """Return a function that never returns if only one rank calls it."""

    def all_reduce():
        dist.all_reduce(torch.ones(3))

    def barrier():
        dist.barrier()

    def broadcast():
        dist.broadcast(torch.ones(3), src=1 - dist.get_rank())

    def recv():
        dist.recv(torch.ones(3), src=1 - dist.get_rank())

    def gather_objects():
        dist.all_gather_object([None, None], "object")

    def new_group():
        dist.new_group([0, 1])

    def store():
        dist.distributed_c10d._get_default_store().get("never set")

    def half_group():
        if dist.get_rank() == 0:
            dist.new_group([0, 1])
        time.sleep(600)

    def sleep():
        time.sleep(600)

    def event():
        threading.Event().wait()

    def lock():
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def child():
        subprocess.run(["sleep", "600"], check=True)

    def socket():
        import socket as sockets

        ours, _its = sockets.socketpair()
        ours.recv(1)

    def compute():
        number = 0
        while True:
            number += 1

    def hold_gil():
        ctypes.PyDLL(None).sleep(600)

    return locals()[how]


# -- exceptions


@pytest.mark.parametrize("how", [*COLLECTIVES, *WAITS])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_arrives_while_the_other_rank_is_blocked(how, failing):
    """The exception keeps its type, and a note has rank, host, and traceback. The launch ends although a rank is stuck."""
    blocked = blocking(how)

    def fails():
        if current_rank().global_rank == failing:
            raise KeyError("weight", 7)  # the user's line
        blocked()

    error, seconds = failure_of(fails, platform=ranks(grace_s=1))
    assert type(error) is KeyError
    assert error.args == ("weight", 7)
    assert f"raised in rank {failing} of 2 (node 0, {os.uname().nodename})" in error.__notes__[0]
    assert 'raise KeyError("weight", 7)  # the user\'s line' in error.__notes__[0]
    assert "Traceback (most recent call last)" in error.__notes__[0]
    assert "parawrap/launch" not in error.__notes__[0]
    assert seconds < PATIENCE_S


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_arrives_however_ranks_start(method):
    """Every spawn method reports the user's exception."""

    def fails():
        dist.barrier()
        if current_rank().global_rank == 1:
            raise ZeroDivisionError("here")
        dist.barrier()

    error, _ = failure_of(fails, platform=ranks(spawn_method=method))
    assert type(error) is ZeroDivisionError
    assert "rank 1 of 2" in notes_of(error)


def test_the_cause_of_an_exception_is_in_the_note():
    """The traceback in the note includes the exception's cause."""

    def fails():
        try:
            {}["inner"]
        except KeyError as error:
            raise ValueError("outer") from error

    error, _ = failure_of(fails)
    assert type(error) is ValueError
    assert "KeyError: 'inner'" in notes_of(error)
    assert "direct cause" in notes_of(error)


class Strict(Exception):
    """An exception that pickle cannot rebuild: its arguments differ from its args."""

    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class Locked(Exception):
    """An exception with an attribute that cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.text, self.lock = text, threading.Lock()


class Refusing(Exception):
    """An exception that raises when it is pickled."""

    def __reduce__(self):
        raise TypeError("never")


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (lambda: Strict(3, detail="d"), {"code": 3, "detail": "d"}),
        (lambda: Locked("l"), {}),
        (lambda: Refusing("r"), {}),
        (lambda: ExceptionGroup("group", [ValueError("one"), KeyError("two")]), {"message": "group"}),
        (lambda: UnicodeDecodeError("utf-8", b"ab", 0, 1, "reason"), {"start": 0, "reason": "reason"}),
        (lambda: OSError(2, "no file", "name"), {"errno": 2, "filename": "name"}),
        (lambda: SystemError("s"), {}),
        (lambda: KeyboardInterrupt("k"), {}),
        (lambda: StopIteration(5), {"value": 5}),
    ],
    ids=["strict", "locked", "refusing", "group", "unicode", "os", "system", "interrupt", "stop"],
)
def test_exceptions_of_every_kind_keep_type_and_text(make, kept):
    """An exception that pickle cannot rebuild keeps its class, its text, and the attributes that can be sent."""

    def fails():
        raise make()

    error, _ = failure_of(fails, platform=ranks(1))
    assert type(error) is type(make())
    assert str(error) == str(make())
    assert {name: getattr(error, name) for name in kept} == kept
    assert "rank 0 of 1" in notes_of(error)


def test_an_exception_of_a_local_class_can_be_caught():
    """An exception of a class that is pickled by value has the same class in the parent."""

    class Local(Exception):
        pass

    def fails():
        raise Local("text")

    error, _ = failure_of(fails)
    assert type(error) is Local


def test_an_exception_that_cannot_be_rebuilt_keeps_type_and_text():
    """Neither ``__new__`` nor ``__init__`` of the class accepts the exception's args."""

    def fails():
        class Unmakeable(Exception):
            def __new__(cls, *args):
                if args != ("once",):
                    raise TypeError("only once")
                return super().__new__(cls, *args)

            def __init__(self, *args):
                self.args = (threading.Lock(),)

            def __str__(self):
                return "its text"

        raise Unmakeable("once")

    error, _ = failure_of(fails, platform=ranks(1))
    assert type(error).__name__ == "Unmakeable"
    assert str(error) == "its text"


def test_an_unsendable_exception_becomes_a_launch_error():
    """An exception of a class that cannot be pickled arrives as a LaunchError with its type and text."""

    def fails():
        held = threading.Lock()

        class Unsendable(Exception):
            lock = held

        raise Unsendable("its text")

    error, _ = failure_of(fails, platform=ranks(1))
    assert type(error) is LaunchError
    assert "Unsendable: its text" in str(error)
    assert "rank 0 of 1" in notes_of(error)


def test_failures_of_other_ranks_are_noted(tmp_path):
    """The notes of the first failure list later failures of other ranks."""
    report_pid = report_pid_function()

    def fails(folder):
        if current_rank().global_rank == 0:
            try:
                report_pid(folder)
                time.sleep(600)
            finally:
                raise LookupError("while cleaning up")
        while not list(Path(folder).glob("*.pid")):
            time.sleep(0.01)
        raise ArithmeticError("first")

    error, _ = failure_of(fails, tmp_path)
    assert type(error) is ArithmeticError
    assert "rank 0 raised LookupError: while cleaning up" in notes_of(error)


# -- deaths


def dying(how):
    """Return a function that ends its process in the given way."""

    def sigkill():
        os.kill(os.getpid(), signal.SIGKILL)

    def sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)

    def sigsegv():
        print("before the crash", flush=True)
        ctypes.string_at(0)

    def sigabrt():
        os.abort()

    def _exit_3():
        os._exit(3)

    def _exit_0():
        os._exit(0)

    def exit_3():
        sys.exit(3)

    def exit_0():
        sys.exit(0)

    def exit_none():
        sys.exit()

    def exit_text():
        sys.exit("out of patience")

    return locals()[how]


DEATHS = [
    ("sigkill", signal.SIGKILL, None, "was killed by SIGKILL"),
    ("sigterm", signal.SIGTERM, None, "was killed by SIGTERM"),
    ("sigsegv", signal.SIGSEGV, None, "was killed by SIGSEGV"),
    ("sigabrt", signal.SIGABRT, None, "was killed by SIGABRT"),
    ("_exit_3", None, 3, "exited with code 3"),
    ("_exit_0", None, 0, "exited with code 0"),
    ("exit_3", None, 3, "called sys.exit(3)"),
    ("exit_0", None, 0, "called sys.exit(0)"),
    ("exit_none", None, 0, "called sys.exit(0)"),
    ("exit_text", None, 1, "called sys.exit(1)"),
]


@pytest.mark.parametrize(("how", "number", "code", "text"), DEATHS, ids=[each[0] for each in DEATHS])
def test_a_dead_rank_raises_rank_died_error(how, number, code, text):
    """RankDiedError has the rank, signal, and exit code, although another rank is blocked in a collective."""
    die = dying(how)

    def dies():
        if current_rank().global_rank == 1:
            die()
        dist.all_reduce(torch.ones(3))

    error, seconds = failure_of(dies)
    assert type(error) is RankDiedError
    assert (error.rank, error.signal, error.exit_code) == (1, number, code)
    assert "rank 1 of 2" in str(error)
    assert text in str(error)
    assert seconds < PATIENCE_S


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_rank_is_named_however_ranks_start(method):
    """Every spawn method reports the signal that killed a rank."""

    def dies():
        dist.barrier()
        if current_rank().global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    error, seconds = failure_of(dies, platform=ranks(spawn_method=method))
    assert type(error) is RankDiedError
    assert (error.rank, error.signal) == (0, signal.SIGKILL)
    assert seconds < PATIENCE_S


def test_a_crash_in_c_has_the_python_stack():
    """The notes have faulthandler's stack and the last output of the rank."""
    crash = dying("sigsegv")
    error, _ = failure_of(crash, platform=ranks(1))
    assert "Fatal Python error: Segmentation fault" in notes_of(error)
    assert "in sigsegv" in notes_of(error)
    assert "before the crash" in notes_of(error)


def test_the_text_of_sys_exit_is_in_the_error():
    """``sys.exit("text")`` in a rank raises an error that contains the text."""
    error, _ = failure_of(dying("exit_text"), platform=ranks(1))
    assert "out of patience" in str(error) + notes_of(error)


# -- returning too early


@pytest.mark.parametrize(("early", "how"), [(0, "all_reduce"), (1, "barrier"), (0, "recv")])
def test_a_rank_that_returns_before_a_collective_raises(early, how):
    """The error names the rank that had returned and says that every rank has to take part."""
    blocked = blocking(how)

    def returns():
        if current_rank().global_rank != early:
            blocked()
        return "early"

    error, _ = failure_of(returns, patience_s=PATIENCE_S)
    assert isinstance(error, RuntimeError)
    assert f"rank {1 - early} of 2" in notes_of(error)
    assert f"rank {early} had returned already: in a collective, every rank of the group has to take part" in str(error)


def test_waiting_for_a_returned_rank_raises(monkeypatch):
    """If no connection breaks, LaunchError names the returned rank and has the stack of the waiting rank."""
    monkeypatch.setattr("parawrap.launch.coordinator._standstill.STUCK_S", 0.5)
    blocked = blocking("new_group")

    def returns():
        if current_rank().global_rank == 1:
            blocked()

    error, seconds = failure_of(returns)
    assert type(error) is LaunchError
    assert re.search(r"0 ha(s|ve) returned", str(error))
    assert "every rank of the group has to take part" in str(error)
    assert "in new_group" in str(error)
    assert seconds < PATIENCE_S


def test_a_rank_may_wait_for_a_busy_rank(monkeypatch):
    """After one rank has returned, a second rank can wait for a third rank that is busy."""
    monkeypatch.setattr("parawrap.launch.coordinator._standstill.STUCK_S", 0.3)

    def waits():
        rank = current_rank().global_rank
        store = dist.distributed_c10d._get_default_store()
        if rank == 1:
            return store.get("key")
        if rank == 2:
            time.sleep(1.2)
            store.set("key", "value")
        return rank

    launch = wrapper(ranks(3))(waits).submit()
    assert launch.results(timeout=PATIENCE_S) == (0, b"value", 2)


def test_a_rank_may_return_long_before_the_others():
    """After the last collective, ranks can return at different times."""

    def returns():
        rank = current_rank().global_rank
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)  # longer than a returned rank's process stays
        return rank

    assert wrapper(ranks())(returns)() == (0, 1)


# -- time limits


@pytest.mark.parametrize(
    ("field", "limit", "how"),
    [
        ("hang_timeout_s", SILENT_S, "recv"),
        ("hang_timeout_s", SILENT_S, "half_group"),
        ("hang_timeout_s", SILENT_S, "event"),
        ("hang_timeout_s", SILENT_S, "hold_gil"),
        ("timeout_min", SILENT_S / 60, "compute"),
    ],
)
def test_a_time_limit_raises_with_the_stacks_of_every_rank(field, limit, how):
    """LaunchTimeoutError names the limit and has a stack, or "no answer", for each rank."""
    blocked = blocking(how)

    def hangs():
        blocked()

    error, seconds = failure_of(hangs, platform=ranks(grace_s=0.5, **{field: limit}))
    assert type(error) is LaunchTimeoutError
    assert field in str(error)
    assert sorted(error.stacks) == [0, 1]
    for rank, stack in error.stacks.items():
        assert f"rank {rank}" in str(error)
        assert ("no answer" if how == "hold_gil" else f"in {how}") in stack
        assert stack in str(error)
    assert seconds < PATIENCE_S


def test_a_time_limit_after_a_rank_has_returned():
    """LaunchTimeoutError has stacks of running ranks only; a note names the ranks that had ended."""

    def hangs():
        if current_rank().global_rank == 0:
            time.sleep(600)

    error, _ = failure_of(hangs, platform=ranks(hang_timeout_s=SILENT_S, grace_s=1))
    assert type(error) is LaunchTimeoutError
    assert sorted(error.stacks) == [0]
    assert "these ranks had ended before the time limit: 1" in notes_of(error)


def test_an_active_rank_is_not_silent():
    """`hang_timeout_s` does not end a rank that loops, prints, or computes in Python."""

    def stay_active(kind):
        end = time.monotonic() + 2 * SILENT_S
        while time.monotonic() < end:
            if kind == "computes":
                continue
            if kind == "prints":
                print("step", flush=True)
            time.sleep(0.05)
        return kind

    launchable = wrapper(ranks(1, hang_timeout_s=SILENT_S))(stay_active)
    launches = {kind: launchable.submit(kind) for kind in ("steps", "prints", "computes")}
    for kind, launch in launches.items():
        assert launch.results(timeout=PATIENCE_S) == (kind,)


# -- stacks on demand


def test_stacks_of_a_running_launch(tmp_path):
    """`stacks` has each running rank's threads, starting at the user's function, and the launch continues."""
    report_pid = report_pid_function()

    def waits(folder):
        report_pid(folder)
        while not Path(folder, "go").exists():  # the user's line, this one or the next
            time.sleep(0.01)  # the user's line
        return current_rank().global_rank

    launch = wrapper(ranks())(waits).submit(tmp_path)
    pids_in(tmp_path, 2)
    stacks = launch.stacks()
    (tmp_path / "go").touch()
    assert sorted(stacks) == [0, 1]
    assert all("in waits" in text and "the user's line" in text and "MainThread" in text for text in stacks.values())
    assert not any("parawrap/launch" in text for text in stacks.values())
    assert launch.results(timeout=PATIENCE_S) == (0, 1)
    assert launch.stacks() == {}


def test_stacks_of_a_rank_that_cannot_answer(tmp_path):
    """A rank that holds the GIL gets "no answer" in bounded time, and the other ranks have stacks."""
    report_pid, hold = report_pid_function(), blocking("hold_gil")

    def holds(folder):
        report_pid(folder)
        if current_rank().global_rank == 1:
            hold()
        time.sleep(600)

    launch = wrapper(ranks(grace_s=0.5))(holds).submit(tmp_path)
    pids_in(tmp_path, 2)
    began = time.monotonic()
    stacks = launch.stacks()
    seconds = time.monotonic() - began
    launch.cancel()
    assert "in holds" in stacks[0]
    assert "no answer" in stacks[1]
    assert seconds < PATIENCE_S


# -- unsendable values


@pytest.mark.parametrize(
    ("args", "kwargs", "address"),
    [
        ((1, threading.Lock()), {}, "args[1]"),
        (({"steps": [0, {"lock": threading.Lock()}]},), {}, "args[0]['steps'][1]['lock']"),
        ((), {"config": (1, [threading.Lock()])}, "kwargs['config'][1][0]"),
        ((), {"stream": sys.stdout}, "kwargs['stream']"),
        ((i for i in range(3)), {}, None),
    ],
    ids=["positional", "nested", "keyword", "stream", "generator"],
)
def test_an_argument_that_cannot_be_sent_is_named_by_its_address(args, kwargs, address):
    """UnsendableError names the part of the argument, before any rank starts."""
    if address is None:
        args, address = (args,), "args[0]"
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(UnsendableError) as caught:
        wrapper(ranks())(lambda *_, **__: None).submit(*args, **kwargs)
    assert str(caught.value).startswith(f"{address} cannot be sent to another process: ")
    assert isinstance(caught.value, TypeError)
    assert len({child.pid for child in psutil.Process().children()} - before) <= 1  # the warm process


def test_a_captured_variable_that_cannot_be_sent_is_named():
    """UnsendableError names a variable that the function captures."""
    lock = threading.Lock()

    def uses():
        return lock

    with pytest.raises(UnsendableError, match=r"the variable 'lock' .* the function.* cannot be sent"):
        wrapper(ranks())(uses)()


def test_a_result_that_cannot_be_sent_is_named_by_its_address():
    """UnsendableError names the part of the result and the rank, and the other ranks are ended."""

    def returns():
        if current_rank().global_rank == 1:
            return {"history": [1, threading.Lock()]}
        return time.sleep(600)

    error, seconds = failure_of(returns)
    assert type(error) is UnsendableError
    address, separator, reason = str(error).partition(" cannot be sent to another process: ")
    assert separator
    assert "the result['history']" in address
    assert "[1]" in address
    assert reason.startswith("lock")
    assert "rank 1 of 2" in notes_of(error)
    assert seconds < PATIENCE_S


def test_an_open_file_is_no_result(tmp_path):
    """A rank that returns an open file raises UnsendableError with the address and the rank."""
    (tmp_path / "data.txt").write_text("1 2 3")
    error, _ = failure_of(lambda: {"data": (tmp_path / "data.txt").open()})
    assert type(error) is UnsendableError
    assert "the result['data'] cannot be sent to another process: TextIOWrapper: an open file" in str(error)
    assert "of 2 (node 0" in notes_of(error)


def test_an_argument_that_cannot_be_unpickled_raises():
    """An exception while a rank unpickles its arguments is raised with a note that says so."""

    class Cursed:
        def __reduce__(self):
            return int, ("no number",)

    error, _ = failure_of(lambda _: None, Cursed())
    assert type(error) is ValueError
    assert "unpickled the function and its arguments" in notes_of(error)


def test_a_result_that_cannot_be_unpickled_raises():
    """An exception while the parent unpickles a result is raised with a note that names the rank."""

    class Cursed:
        def __reduce__(self):
            return int, ("no number",)

    def returns():
        return Cursed() if current_rank().global_rank == 1 else None

    error, _ = failure_of(returns)
    assert type(error) is ValueError
    assert "result of rank 1 of 2" in notes_of(error)


# -- the other ranks


@pytest.mark.parametrize("how", ["sleep", "event", "lock", "child", "socket", "compute", "all_reduce"])
def test_the_other_ranks_clean_up(how, tmp_path):
    """When another rank fails, a rank runs its ``finally`` blocks; ``except Exception`` does not stop its end."""
    blocked, report_pid = blocking(how), report_pid_function()

    def fails(folder):
        if current_rank().global_rank == 1:
            while not list(Path(folder).glob("*.pid")):
                time.sleep(0.01)
            time.sleep(0.2)  # until the other rank is blocked
            raise ValueError
        try:
            report_pid(folder)
            blocked()
        except Exception:
            if how != "all_reduce":
                raise
        finally:
            Path(folder, "cleaned").touch()

    error, _ = failure_of(fails, tmp_path)
    assert type(error) is ValueError
    assert (tmp_path / "cleaned").exists()


@pytest.mark.parametrize("how", ["stubborn", "deaf", "hold_gil", "stopped"])
def test_a_rank_that_does_not_end_is_killed(how, tmp_path):
    """A rank that catches every exception, ignores signals, or is stopped is killed after ``grace_s``."""
    report_pid, hold = report_pid_function(), blocking("hold_gil")

    def ignores(folder):
        if current_rank().global_rank == 1:
            while not list(Path(folder).glob("*.pid")):
                time.sleep(0.01)
            raise ValueError
        if how == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        report_pid(folder)
        while True:
            try:
                if how == "hold_gil":
                    hold()
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(600)
            except BaseException:
                continue

    error, seconds = failure_of(ignores, tmp_path, platform=ranks(grace_s=0.5))
    assert type(error) is ValueError
    assert_gone(pids_in(tmp_path, 1))
    assert seconds < PATIENCE_S


@pytest.mark.parametrize("end", ["returns", "raises", "dies", "cancelled"])
def test_processes_started_by_a_rank_end_with_it(end, tmp_path):
    """A process that a rank started does not outlive the launch, however the rank ends."""
    report_pid = report_pid_function()

    def starts(folder):
        process = subprocess.Popen(["sleep", "600"])
        report_pid(folder, process.pid)
        if end == "raises":
            raise ValueError
        if end == "dies":
            os._exit(1)
        if end == "cancelled":
            time.sleep(600)

    launch = wrapper(ranks())(starts).submit(tmp_path)
    children = pids_in(tmp_path, 2) if end == "cancelled" else None
    if end == "cancelled":
        launch.cancel()
    try:
        launch.results(timeout=PATIENCE_S)
    except (ValueError, RankDiedError, LaunchCancelledError):
        assert end != "returns"
    assert_gone(children or [int(path.stem) for path in tmp_path.glob("*.pid")])


def test_processes_started_by_a_rank_have_time_to_clean_up(tmp_path):
    """A process that ignores SIGTERM, as Python's resource tracker does, has time to finish its work."""
    cleans = f"""
import pathlib, time
time.sleep(1)
pathlib.Path({str(tmp_path)!r}, "clean").touch()
"""

    def starts():
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        subprocess.Popen([sys.executable, "-c", cleans])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    wrapper(ranks(1))(starts)()
    assert (tmp_path / "clean").exists()


def test_a_warm_process_that_was_killed_is_replaced():
    """The next launch starts another warm process."""
    launchable = wrapper(ranks())(lambda: os.getppid())
    (old, _) = launchable()
    os.kill(old, signal.SIGKILL)
    eventually(lambda: is_gone(old), "the end of the warm process")
    (new, _) = launchable()
    assert new != old


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_rank_is_reported_with_sigchld_ignored(method):
    """If the parent ignores SIGCHLD, RankDiedError still has the signal."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        error, _ = failure_of(dying("sigkill"), platform=ranks(1, spawn_method=method))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert type(error) is RankDiedError
    assert error.signal is signal.SIGKILL
    assert error.signal in (signal.SIGKILL, None)


def test_a_launch_whose_warm_process_is_killed_fails():
    """The ranks end with the warm process, the launch raises RankDiedError, and the next launch works."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error, seconds = failure_of(kills)
    assert type(error) is RankDiedError
    assert seconds < PATIENCE_S
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_fork_raises_after_cuda_is_initialized(monkeypatch):
    """PlatformError says why and names another spawn method, which still works."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        PlatformError, match=r"spawn_method='fork': CUDA is initialized in this process already.*give 'forkserver'"
    ):
        wrapper(ranks(spawn_method="fork"))(lambda: None)()
    assert wrapper(ranks())(lambda: "fine")() == ("fine", "fine")


# -- cancel


@pytest.mark.parametrize("how", ["sleep", "all_reduce", "hold_gil"])
def test_cancel_ends_the_ranks_and_waits_for_them(how, tmp_path):
    """After `cancel`, all ranks have ended, the state is "cancelled", results raise, and a second `cancel` does nothing."""
    report_pid, blocked = report_pid_function(), blocking(how)

    def waits(folder):
        report_pid(folder)
        if current_rank().global_rank == 0 or how == "hold_gil":
            blocked()
        time.sleep(600)

    launch = wrapper(ranks(grace_s=0.5))(waits).submit(tmp_path)
    pids = pids_in(tmp_path, 2)
    assert (launch.state, launch.done()) == ("running", False)
    launch.cancel()
    assert all(map(is_gone, pids))
    assert (launch.state, launch.done()) == ("cancelled", True)
    with pytest.raises(LaunchCancelledError, match="waits was cancelled"):
        launch.results()
    launch.cancel()
    assert launch.state == "cancelled"


def test_cancel_while_ranks_are_starting():
    """A launch can be cancelled before its ranks run."""
    launch = wrapper(ranks())(lambda: time.sleep(600)).submit()
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results()


def test_cancel_after_the_end_changes_nothing():
    """The results and the state stay the same."""
    launch = wrapper(ranks())(lambda: 5).submit()
    assert launch.results(timeout=PATIENCE_S) == (5, 5)
    launch.cancel()
    assert launch.results() == (5, 5)
    assert launch.state == "finished"


# -- end of the parent

PARENT = """
import ctypes, json, os, signal, subprocess, sys, time
import torch, torch.distributed as dist
from parawrap import Platform, current_rank, wrapper

method, folder, how = sys.argv[1:]

@wrapper(Platform(device="cpu", n_cpus=2, spawn_method=method, grace_s=1))
def works():
    report_pid(folder, subprocess.Popen(["sleep", "600"]).pid)
    report_pid(folder)
    if current_rank().global_rank == 0:
        dist.all_reduce(torch.ones(1))
    if how == "hold_gil":
        ctypes.PyDLL(None).sleep(600)
    try:
        time.sleep(600)
    finally:
        print("cleaned up", flush=True)

try:
    works()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


KILLED = [(signal.SIGTERM, "forkserver", "waits"), *((signal.SIGKILL, method, "hold_gil") for method in METHODS)]


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Parents of running ranks, by the way they end; started together, because each of them loads torch."""

    def leaving(folder):
        waits = f"while len(os.listdir({str(folder)!r})) < 5: time.sleep(0.01)"
        return PARENT.replace("    works()\n", f"    works.submit()\n    {waits}\n"), "forkserver", folder, "waits"

    interrupted = dict.fromkeys(("parent", "group"), lambda folder: (PARENT, "forkserver", folder, "waits"))
    killed = {case: lambda folder, case=case: (PARENT, case[1], folder, case[2]) for case in KILLED}
    with running_scripts(tmp_path_factory.mktemp("parents"), interrupted | killed | {"leaving": leaving}) as started:
        yield started


@pytest.mark.parametrize("who", ["parent", "group"])
def test_ctrl_c_ends_the_ranks_and_is_raised(who, parents):
    """The call raises KeyboardInterrupt after the ranks have cleaned up; the ranks and their processes end."""
    parent, folder = parents[who]
    pids = pids_in(folder, 4)
    (os.killpg if who == "group" else os.kill)(parent.pid, signal.SIGINT)
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output.splitlines() == ["[rank 1] cleaned up", "interrupted"]
    assert parent.returncode == 0
    assert_gone(pids)


@pytest.mark.parametrize("case", KILLED, ids=lambda case: f"{case[0].name}-{case[1]}-{case[2]}")
def test_no_process_survives_a_killed_parent(case, parents):
    """Ranks, even ranks that hold the GIL, and their processes end soon after the parent was killed."""
    parent, folder = parents[case]
    pids = pids_in(folder, 4)
    family = {each.pid for each in psutil.Process(parent.pid).children(recursive=True)}
    assert family >= set(pids)
    os.kill(parent.pid, case[0])
    parent.wait(timeout=PATIENCE_S)
    try:
        assert_gone(family | set(pids))
    finally:
        for pid in family:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_running_launch_ends_with_the_interpreter(parents):
    """A parent that exits while ranks run exits without delay, and no process survives."""
    parent, folder = parents["leaving"]
    pids = pids_in(folder, 4)
    parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 0
    assert_gone(pids)


def test_a_stopped_rank_does_not_block_cancel(tmp_path):
    """Many requests for stacks send a stopped rank only one message, so the pipe does not fill up."""
    report_pid = report_pid_function()

    def stops(folder):
        report_pid(folder, os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    launch = wrapper(ranks(1, grace_s=0.2))(stops).submit(tmp_path)
    (pid,) = pids_in(tmp_path, 1)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop of the rank")
    for _ in range(1000):
        launch._backend._attempts._loop.call_soon(launch._backend._attempts._attempt._request_stacks)
    launch.cancel()
    assert launch.state == "cancelled"
    assert_gone([pid])


def test_a_death_before_an_exception_is_reported(tmp_path):
    """The error, or one of its notes, names the rank that died first."""
    report_pid = report_pid_function()

    def fails(folder):
        if current_rank().global_rank == 0:
            report_pid(folder)
            os.kill(os.getpid(), signal.SIGKILL)
        while not list(Path(folder).glob("*.pid")):
            time.sleep(0.001)
        (pid,) = map(int, (path.read_text() for path in Path(folder).glob("*.pid")))
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.001)
        raise ValueError("after the death")

    error, _ = failure_of(fails, tmp_path)
    assert isinstance(error, RankDiedError) or "rank 0 was killed by SIGKILL" in notes_of(error)


@pytest.mark.parametrize("groups", [[], [[0, 1]]], ids=["world", "ipc_groups"])
def test_a_collective_waits_for_other_ranks_no_longer_than_ipc_timeout_min(groups):
    """The timeout holds for the default process group and for those of ``ipc_groups``, and the error names the option."""

    def reduce():
        if current_rank().global_rank == 0:
            dist.all_reduce(torch.ones(1), group=current_rank().group)
        else:
            time.sleep(PATIENCE_S)

    platform = Platform(device="cpu", n_cpus=2, verbose=False, ipc_groups=groups, ipc_timeout_min=0.01)
    error, seconds = failure_of(reduce, platform=platform, patience_s=PATIENCE_S)
    assert "600ms" in str(error)
    assert "Platform(ipc_timeout_min=...)" in notes_of(error)
    assert seconds < PATIENCE_S

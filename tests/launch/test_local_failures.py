"""Promises 3 and 4: how launches fail, how soon, what they say, and that nobody survives them."""

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
    PlatformError,
    RankDiedError,
    UnsendableError,
    current_rank,
    wrapper,
)
from tests.launch.processes import (
    PATIENCE_S,
    SOON_S,
    assert_gone,
    eventually,
    failure_of,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    report_pid_function,
    running_scripts,
)

METHODS = ["forkserver", "spawn", "fork"]
COLLECTIVES = ["all_reduce", "barrier", "broadcast", "recv", "gather_objects"]
WAITS = ["store", "sleep", "event", "lock", "child", "socket", "compute"]


def blocking(how):
    """A function that does not come back by itself in a rank that is alone with it."""

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
    """The type is the user's, a note has rank, place and the traceback from there, and nobody waits for the blocked one."""
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
    assert seconds < SOON_S


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
    """What it was raised from is told with the traceback."""

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
    """Takes other arguments than it keeps, so that pickle cannot make it again."""

    def __init__(self, code, *, detail):
        super().__init__(f"{code}: {detail}")
        self.code, self.detail = code, detail


class Locked(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, text):
        super().__init__(text)
        self.text, self.lock = text, threading.Lock()


class Refusing(Exception):
    """Fails when it is pickled."""

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
    """One that pickle cannot carry is rebuilt: same class, same text, and the attributes that can be sent."""

    def fails():
        raise make()

    error, _ = failure_of(fails, platform=ranks(1))
    assert type(error) is type(make())
    assert str(error) == str(make())
    assert {name: getattr(error, name) for name in kept} == kept
    assert "rank 0 of 1" in notes_of(error)


def test_a_class_of_exception_that_travels_by_value_can_be_caught():
    """A class that no module holds is the same class when it comes back."""

    class Local(Exception):
        pass

    def fails():
        raise Local("text")

    error, _ = failure_of(fails)
    assert type(error) is Local


def test_an_exception_that_cannot_be_made_again_keeps_type_and_text():
    """Neither its ``__new__`` nor its ``__init__`` takes what it keeps."""

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


def test_an_exception_that_cannot_be_sent_at_all_is_told_as_text():
    """A class that only the rank has, and that cannot leave it, arrives as a LaunchError with its last line."""

    def fails():
        held = threading.Lock()

        class Unsendable(Exception):
            lock = held

        raise Unsendable("its text")

    error, _ = failure_of(fails, platform=ranks(1))
    assert type(error) is LaunchError
    assert "Unsendable: its text" in str(error)
    assert "rank 0 of 1" in notes_of(error)


def test_what_the_other_ranks_met_is_noted(tmp_path):
    """With the failure of one comes a line on each other that failed by itself before it was ended."""
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
    """A function that ends its process in this way."""

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
    ("_exit_3", None, 3, "left with exit code 3"),
    ("_exit_0", None, 0, "left with exit code 0"),
    ("exit_3", None, 3, "left by sys.exit(3)"),
    ("exit_0", None, 0, "left by sys.exit(0)"),
    ("exit_none", None, 0, "left by sys.exit(0)"),
    ("exit_text", None, 1, "left by sys.exit(1)"),
]


@pytest.mark.parametrize(("how", "number", "code", "text"), DEATHS, ids=[each[0] for each in DEATHS])
def test_a_rank_that_dies_is_named_with_how(how, number, code, text):
    """RankDiedError has rank, signal and exit code, and says them, while another rank is blocked in a collective."""
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
    assert seconds < SOON_S


@pytest.mark.parametrize("method", METHODS)
def test_a_killed_rank_is_named_however_ranks_start(method):
    """Every spawn method tells the signal that killed a rank."""

    def dies():
        dist.barrier()
        if current_rank().global_rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    error, seconds = failure_of(dies, platform=ranks(spawn_method=method))
    assert type(error) is RankDiedError
    assert (error.rank, error.signal) == (0, signal.SIGKILL)
    assert seconds < SOON_S


def test_a_crash_in_c_comes_with_the_python_stack():
    """What faulthandler wrote, and what the rank wrote before, are in the notes."""
    crash = dying("sigsegv")
    error, _ = failure_of(crash, platform=ranks(1))
    assert "Fatal Python error: Segmentation fault" in notes_of(error)
    assert "in sigsegv" in notes_of(error)
    assert "before the crash" in notes_of(error)


def test_the_text_of_sys_exit_is_told():
    """``sys.exit("text")`` is an error that has the text."""
    error, _ = failure_of(dying("exit_text"), platform=ranks(1))
    assert "out of patience" in str(error) + notes_of(error)


# -- returning too early


@pytest.mark.parametrize(("early", "how"), [(0, "all_reduce"), (1, "barrier"), (0, "recv")])
def test_a_rank_that_returns_while_the_other_is_in_a_collective_is_an_error(early, how):
    """The launch ends, and says which rank had returned and that every rank has to take part."""
    blocked = blocking(how)

    def returns():
        if current_rank().global_rank != early:
            blocked()
        return "early"

    error, _ = failure_of(returns, patience_s=SOON_S)
    assert isinstance(error, RuntimeError)
    assert f"rank {1 - early} of 2" in notes_of(error)
    assert f"rank {early} had returned already: in a collective, every rank of the group has to take part" in str(error)


def test_a_rank_that_waits_for_one_that_has_returned_is_told(monkeypatch):
    """Where no connection breaks, the launch ends after a while, says who had returned, and what the others do."""
    monkeypatch.setattr("parawrap.launch.watch._launch.STUCK_S", 0.5)
    blocked = blocking("new_group")

    def returns():
        if current_rank().global_rank == 1:
            blocked()

    error, seconds = failure_of(returns)
    assert type(error) is LaunchError
    assert re.search(r"0 ha(s|ve) returned", str(error))
    assert "every rank of the group has to take part" in str(error)
    assert "in new_group" in str(error)
    assert seconds < SOON_S


def test_a_rank_may_wait_for_one_that_computes(monkeypatch):
    """With a rank gone, another may wait for a third as long as that one is busy."""
    monkeypatch.setattr("parawrap.launch.watch._launch.STUCK_S", 0.3)

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
    """Ranks that need one another no longer end when they like."""

    def returns():
        rank = current_rank().global_rank
        dist.barrier()
        if rank == 1:
            time.sleep(1.5)  # longer than a rank that has returned stays
        return rank

    assert wrapper(ranks())(returns)() == (0, 1)


# -- time limits


@pytest.mark.parametrize(
    ("field", "limit", "how"),
    [
        ("hang_timeout_s", 0.5, "recv"),
        ("hang_timeout_s", 0.5, "half_group"),
        ("hang_timeout_s", 0.5, "event"),
        ("hang_timeout_s", 0.5, "hold_gil"),
        ("timeout_min", 0.5 / 60, "compute"),
    ],
)
def test_time_that_is_up_ends_in_the_stacks_of_every_rank(field, limit, how):
    """LaunchTimeoutError names the limit and has each rank's stack, or that the rank could not answer."""
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
    assert seconds < SOON_S


def test_a_rank_had_returned_when_time_was_up():
    """Only ranks that ran have a stack; the others are named as ended."""

    def hangs():
        if current_rank().global_rank == 0:
            time.sleep(600)

    error, _ = failure_of(hangs, platform=ranks(hang_timeout_s=0.4, grace_s=1))
    assert type(error) is LaunchTimeoutError
    assert sorted(error.stacks) == [0]
    assert "these ranks had ended before: 1" in notes_of(error)


def test_a_rank_that_goes_on_is_not_silent():
    """Neither one that goes from step to step of a loop, nor one that writes, nor one that computes in Python, is ended."""

    def goes_on(kind):
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            if kind == "computes":
                continue
            if kind == "prints":
                print("step", flush=True)
            time.sleep(0.05)
        return kind

    launchable = wrapper(ranks(1, hang_timeout_s=0.6))(goes_on)
    launches = {kind: launchable.submit(kind) for kind in ("steps", "prints", "computes")}
    for kind, launch in launches.items():
        assert launch.results(timeout=PATIENCE_S) == (kind,)


# -- stacks on demand


def test_stacks_tell_what_a_running_launch_does(tmp_path):
    """Each running rank's threads, by global rank, beginning at the user's function; the launch goes on."""
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


def test_stacks_of_a_rank_that_cannot_answer_say_so(tmp_path):
    """A rank that lets no Python run is told as such, in bounded time, and does not keep the others from answering."""
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
    assert seconds < SOON_S


# -- what cannot be sent


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
    """UnsendableError says which part it is, before any rank starts."""
    if address is None:
        args, address = (args,), "args[0]"
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(UnsendableError) as caught:
        wrapper(ranks())(lambda *_, **__: None).submit(*args, **kwargs)
    assert str(caught.value).startswith(f"{address} cannot be sent to another process: ")
    assert isinstance(caught.value, TypeError)
    assert len({child.pid for child in psutil.Process().children()} - before) <= 1  # the warm process


def test_a_variable_that_cannot_be_sent_is_named():
    """What a closure captures has an address too."""
    lock = threading.Lock()

    def uses():
        return lock

    with pytest.raises(UnsendableError, match=r"the variable 'lock' .* the function.* cannot be sent"):
        wrapper(ranks())(uses)()


def test_a_result_that_cannot_be_sent_is_named_by_its_address():
    """UnsendableError says which part of the result it is, and which rank's; the others are ended."""

    def returns():
        if current_rank().global_rank == 1:
            return {"history": [1, threading.Lock()]}
        return time.sleep(600)

    error, seconds = failure_of(returns)
    assert type(error) is UnsendableError
    address, said, reason = str(error).partition(" cannot be sent to another process: ")
    assert said
    assert "the result['history']" in address
    assert "[1]" in address
    assert reason.startswith("lock")
    assert "rank 1 of 2" in notes_of(error)
    assert seconds < SOON_S


def test_an_argument_that_cannot_be_unpacked_says_so():
    """What goes wrong while the rank makes the arguments is raised with a note on when it happened."""

    class Cursed:
        def __reduce__(self):
            return int, ("no number",)

    error, _ = failure_of(lambda _: None, Cursed())
    assert type(error) is ValueError
    assert "unpacking the function and its arguments" in notes_of(error)


def test_a_result_that_cannot_be_unpacked_says_so():
    """What goes wrong while the parent makes the result is raised with a note on whose it was."""

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
    """Told to end, a rank runs its ``finally`` blocks, and no ``except Exception`` gets in the way."""
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
def test_a_rank_that_ignores_everything_is_killed(how, tmp_path):
    """After ``grace_s`` it goes the hard way, whether it catches everything, takes no signal, or is stopped."""
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
    assert seconds < SOON_S


@pytest.mark.parametrize("end", ["returns", "raises", "dies", "cancelled"])
def test_what_a_rank_started_ends_with_it(end, tmp_path):
    """A process that a rank leaves running does not outlive the launch, however the rank ends."""
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


def test_what_a_rank_started_has_time_to_clean_up(tmp_path):
    """A process that ignores being told, as Python's resource tracker does, is not killed while it may still be at work."""
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
    """The next launch starts another."""
    launchable = wrapper(ranks())(lambda: os.getppid())
    (old, _) = launchable()
    os.kill(old, signal.SIGKILL)
    eventually(lambda: is_gone(old), "the end of the warm process")
    (new, _) = launchable()
    assert new != old


@pytest.mark.parametrize("method", METHODS)
def test_a_parent_that_ignores_its_children_hears_how_ranks_end(method):
    """With SIGCHLD ignored, a killed rank is not taken for one that left with exit code 0."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        error, _ = failure_of(dying("sigkill"), platform=ranks(1, spawn_method=method))
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert type(error) is RankDiedError
    assert error.signal is signal.SIGKILL
    assert error.signal in (signal.SIGKILL, None)


def test_a_launch_whose_warm_process_is_killed_fails():
    """Its ranks go with it, the launch says that they are gone, and the next one works."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error, seconds = failure_of(kills)
    assert type(error) is RankDiedError
    assert seconds < SOON_S
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_fork_is_refused_once_cuda_runs(monkeypatch):
    """The reason and the cure are in the message, and the other ways stay open."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlatformError, match=r"spawn_method='fork': CUDA runs in this process already.*give 'forkserver'"):
        wrapper(ranks(spawn_method="fork"))(lambda: None)()
    assert wrapper(ranks())(lambda: "fine")() == ("fine", "fine")


# -- cancel


@pytest.mark.parametrize("how", ["sleep", "all_reduce", "hold_gil"])
def test_cancel_ends_the_ranks_and_waits_for_them(how, tmp_path):
    """When it returns, no rank is left, the state says so, and the results are an error; again, it does nothing."""
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
    """A launch may be cancelled at once."""
    launch = wrapper(ranks())(lambda: time.sleep(600)).submit()
    launch.cancel()
    with pytest.raises(LaunchCancelledError):
        launch.results()


def test_cancel_after_the_end_changes_nothing():
    """Results that are there stay there."""
    launch = wrapper(ranks())(lambda: 5).submit()
    assert launch.results(timeout=PATIENCE_S) == (5, 5)
    launch.cancel()
    assert launch.results() == (5, 5)
    assert launch.state == "finished"


# -- the parent's end

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
    """Parents of running ranks, by what becomes of them; started together, for each loads torch again."""

    def leaving(folder):
        waits = f"while len(os.listdir({str(folder)!r})) < 5: time.sleep(0.01)"
        return PARENT.replace("    works()\n", f"    works.submit()\n    {waits}\n"), "forkserver", folder, "waits"

    interrupted = dict.fromkeys(("parent", "group"), lambda folder: (PARENT, "forkserver", folder, "waits"))
    killed = {case: lambda folder, case=case: (PARENT, case[1], folder, case[2]) for case in KILLED}
    with running_scripts(tmp_path_factory.mktemp("parents"), interrupted | killed | {"leaving": leaving}) as started:
        yield started


@pytest.mark.parametrize("who", ["parent", "group"])
def test_ctrl_c_ends_the_ranks_and_is_raised(who, parents):
    """KeyboardInterrupt comes out of the call once the ranks have cleaned up and gone; what they started goes too."""
    parent, folder = parents[who]
    pids = pids_in(folder, 4)
    (os.killpg if who == "group" else os.kill)(parent.pid, signal.SIGINT)
    said, _ = parent.communicate(timeout=PATIENCE_S)
    assert said.splitlines() == ["[rank 1] cleaned up", "interrupted"]
    assert parent.returncode == 0
    assert_gone(pids)


@pytest.mark.parametrize("case", KILLED, ids=lambda case: f"{case[0].name}-{case[1]}-{case[2]}")
def test_nobody_survives_the_parent(case, parents):
    """Ranks and what they started are gone soon after the parent was killed, also a rank that lets no Python run."""
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


def test_a_launch_that_nobody_waits_for_ends_with_the_interpreter(parents):
    """The parent's own end, with ranks still running, is not held up and leaves nobody."""
    parent, folder = parents["leaving"]
    pids = pids_in(folder, 4)
    parent.communicate(timeout=PATIENCE_S)
    assert parent.returncode == 0
    assert_gone(pids)


def test_a_stopped_rank_that_is_asked_many_times_keeps_nobody_from_cancelling(tmp_path):
    """It is asked once, until it answers: a line that nobody reads fills up."""
    report_pid = report_pid_function()

    def stops(folder):
        report_pid(folder, os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    launch = wrapper(ranks(1, grace_s=0.2))(stops).submit(tmp_path)
    (pid,) = pids_in(tmp_path, 1)
    eventually(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, "the stop")
    for _ in range(1000):
        launch._run_of_ranks._loop.call_soon(launch._run_of_ranks._attempt._request_stacks)
    launch.cancel()
    assert launch.state == "cancelled"
    assert_gone([pid])


def test_a_rank_that_died_before_another_raised_is_told(tmp_path):
    """The error names the rank that died first, itself or in a note."""
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

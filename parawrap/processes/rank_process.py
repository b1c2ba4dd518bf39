"""The process of a rank: it sets up, answers calls in its main thread, and exits.

    data wire ────► main thread: set-up, then one call after the other, each with an answer
    control wire ─► control thread: stacks, interrupts, preemption, and the end, while a call runs

Guarantee: after an order to end, or the death of the launching process, the rank ends within
``grace_s``. Its main thread gets an exception that ``except Exception`` does not catch, so
``finally`` blocks run. If the main thread is blocked in C code of a collective, no clean-up can
run: then the process exits within three seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from parawrap._private_names import join_threads, run_exit_handlers
from parawrap.errors import LaunchError, SessionError, add_note
from parawrap.processes.latch import Latch
from parawrap.processes.main_thread import MainThread, Status, stacks
from parawrap.processes.outcomes import (
    Ended,
    Outcome,
    Raised,
    Requeued,
    Returned,
    outcome_of,
    pack_exception,
)
from parawrap.processes.packing import Packer
from parawrap.processes.preemption import Preemption, RequeueRequested
from parawrap.processes.script_globals import ScriptOfRank
from parawrap.processes.settings import ChangedSettings, Settings
from parawrap.processes.torch_groups import break_links, count_operations
from parawrap.processes.wire import Message, Wire

SET_UP = 0
"""The number of the set-up, which is the first call. Those of functions count from 1."""

FORCED = 1
"""The exit code of a rank that has followed an order to end."""

# For the main thread to handle the signal of an order to end. Enough for a collective to raise its
# error after the process of a failed rank has ended
_REACTION_S = 3.0
_kept: list[Any] = []  # stays alive until the process exits


class EndOrdered(BaseException):
    """Raised in a rank's main thread if the launch ends before the function returns."""


@dataclass(frozen=True)
class Assignment:
    """The first message to a rank."""

    settings: Settings  # of the launching process
    set_up: Callable[[Preemption], None]  # called in the rank before the first call
    # leaves all process groups, and joins those of the generation with this number
    regroup: Callable[[int], None]
    grace_s: float  # for the function to clean up after an order to end
    # True: the rank makes any number of calls, and does not wait for threads of their functions
    stays: bool
    # for workers: replaces the loop of calls, and handles all messages until the wire closes
    serve: Callable[[Wire], None] | None = None


class CallHead(NamedTuple):
    """The part of a call that has no values of the user, in the body of its message."""

    number: int  # from 1
    changes: ChangedSettings | None  # of the script's settings, for ranks that stay
    is_for_this_rank: bool  # False if the rank only takes the globals that come with the call
    # of the process groups to join before the call; None keeps those of the rank
    generation: int | None
    item: Any  # of `PackedCall`: where the function and the arguments are in the block


class Answer(NamedTuple):
    """The part of an answer that has no values of the user, in the body of its message."""

    number: int  # of the call; `SET_UP` for the set-up
    outcome: Outcome  # a `Returned` has no value: `item` says where in the block it is
    # globals that functions of this rank have assigned, and those they have deleted
    owned: tuple[list[Any], list[Any]] | None
    operations: int | None  # collectives that the rank has begun; None without a process group
    has_loaded: bool  # False if the rank could not unpickle the call, or was interrupted before
    item: Any = None


def run_rank(data: socket.socket, control: socket.socket, streams: Sequence[int]) -> int:
    """Run as the rank at this end of two connections. Return the exit code of the process.

    `streams` are the pipes for standard output and standard error.
    """
    gc.enable()
    _start_session(streams)
    wire = Wire(data, waits=True)
    message = wire.receive()
    if message is None:  # the launching process died, or ended the launch before its start
        os._exit(FORCED)
    assignment: Assignment = message.body
    orders = Control(Wire(control, waits=True), assignment.grace_s)
    with contextlib.suppress(EndOrdered):  # raised between two calls
        return _CallLoop(wire, orders, assignment).run()
    return FORCED


def _start_session(streams: Sequence[int]) -> None:
    """Lead a session, which Ctrl-C in a terminal does not reach, with own output and no input."""
    # A handler that does nothing. Programs that the rank starts would inherit SIG_IGN
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.siginterrupt(signal.SIGINT, False)  # else system calls in C code would fail with EINTR
    os.setsid()
    # Kept, because a stream that is freed writes what the server has buffered before the fork
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for number, file in enumerate(streams, start=1):
        os.dup2(file, number)  # output of C code goes there too
        os.close(file)
        os.set_inheritable(number, True)
    _open_streams(is_buffered=True)
    faulthandler.enable()
    # pdb needs a terminal. Debuggers of editors set another hook or this variable
    uses_pdb = os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace")
    if uses_pdb and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse_breakpoint


def _open_streams(*, is_buffered: bool) -> None:
    """Make standard output and error, buffered by lines or, for PYTHONUNBUFFERED, not at all."""
    for number, name in enumerate(("stdout", "stderr"), start=1):
        size = -1 if is_buffered else 0
        raw: Any = open(number, "wb", buffering=size, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            raw,
            "utf-8",
            "backslashreplace",
            line_buffering=is_buffered,
            write_through=not is_buffered,
        )
        _kept.append(getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)  # code that replaces the stream restores it from here


def refuse_breakpoint(*_: object, **__: object) -> NoReturn:
    """Raise LaunchError, in place of ``breakpoint()``."""
    msg = (
        "a rank has no terminal. Call .inline(...) of the decorated function instead: it runs the "
        "function in the launching process, for a debugger"
    )
    raise LaunchError(msg)


class _CallLoop:
    """Answers calls. Used by the main thread."""

    def __init__(self, wire: Wire, control: Control, assignment: Assignment) -> None:
        self._wire = wire
        self._control = control
        self._assignment = assignment
        self._script = ScriptOfRank()
        self._has_regrouped = False  # True once process groups were made again after a failed call
        self._has_loaded = True  # True once the call is unpickled; the set-up has no pickle

    def run(self) -> int:
        """Set up, and answer calls until the connection closes.

        Return the exit code of the process.
        """
        assignment = self._assignment
        self._control.start()
        try:
            assignment.settings.apply()
            if os.environ.get("PYTHONUNBUFFERED"):
                _open_streams(is_buffered=False)
            if not self._answer(SET_UP, partial(assignment.set_up, self._control.preemption)):
                return FORCED
            if assignment.serve is None:
                return self._answer_calls()
            assignment.serve(self._wire)
            return 0
        finally:  # exit handlers follow, which an order to end must not interrupt
            self._control.is_leaving = True

    def _answer_calls(self) -> int:
        # Not in the `try` of `run`: Python 3.13 may leave out the `finally` if a signal handler
        # raises where a `while` goes back
        while (message := self._wire.receive()) is not None:
            head: CallHead = message.body
            self._has_loaded = False
            # Before the call, where no interrupt arrives: later calls do not bring these changes
            if head.changes is not None:
                head.changes.apply()
            if not self._answer(head.number, partial(self._call, message, head)):
                return FORCED
            del message  # frees the memory of the arguments before the wait for the next call
        return 0

    def _call(self, message: Message, head: CallHead) -> Any:
        """Unpickle a call, and run its function. Return its value; None if this rank only loads."""
        if head.generation is not None:
            self._has_regrouped = True
            self._assignment.regroup(head.generation)
        if message.error is not None:
            raise message.error
        try:
            function, args, kwargs = self._script.take(head.item, message.block)
            self._has_loaded = True
        except Exception as error:
            add_note(
                error,
                "raised while the rank unpickled the function, its arguments, and its globals",
            )
            raise
        if not head.is_for_this_rank:
            return None
        value = function(*args, **kwargs)
        if not self._assignment.stays:
            flush_and_join_threads()  # here, so that its errors are errors of the call
        return value

    def _answer(self, number: int, call: Callable[[], Any]) -> bool:
        """Make a call and send its answer. Return False if the process is to end."""
        goes_on = self._assignment.stays  # after an exception
        packer, item, value = Packer(), None, None
        try:
            try:
                self._control.begin(number)
                value = call()
                # Before `end`, so that it can be interrupted: a class of the user may take long
                item = packer.add(value, "the result")
            finally:
                self._control.end()
            outcome: Outcome = Returned(time.time(), b"")
            goes_on = True  # until the connection closes, also if the rank does not stay
        except EndOrdered:
            outcome, goes_on = Ended(time.time()), False
        except RequeueRequested:
            outcome = Requeued(time.time())
            if self._assignment.stays:
                msg = (
                    "requeue() was called in ranks that stay, which cannot restart: use "
                    "@wrapper(Platform(...)) instead"
                )
                outcome = outcome_of(LaunchError(msg))
        except BaseException as error:  # noqa: BLE001 (a rank reports every exception)
            was_interrupted = self._control.interrupted == number
            # The function may turn the KeyboardInterrupt into sys.exit
            if was_interrupted and isinstance(error, (KeyboardInterrupt, SystemExit)):
                outcome = Ended(time.time())
            else:
                outcome = self._outcome_of(error)
                # A rank ends after a failed set-up, and after `sys.exit`
                goes_on = goes_on and number != SET_UP and isinstance(outcome, Raised)

        # Globals that a call brought which could not be unpickled were not assigned by a function
        may_have_assigned = self._assignment.stays and self._has_loaded
        owned = self._script.changes() if may_have_assigned else None
        with contextlib.suppress(Exception):
            flush_streams()  # before the answer, at which the pool reads the output
        answer = Answer(number, outcome, owned, count_operations(), self._has_loaded, item)
        try:
            self._wire.send("answer", answer, packer)
        except (OSError, SessionError) as error:  # a limit of this process: nothing was sent
            self._wire.send("answer", answer._replace(outcome=outcome_of(error), item=None))
        del value  # not before: `packer` borrows the memory of its tensors
        return goes_on

    def _outcome_of(self, error: BaseException) -> Outcome:
        """Return the outcome of a function that has raised, with an error that names the cause."""
        outcome = outcome_of(error)
        if not (self._has_regrouped and isinstance(outcome, Raised) and outcome.is_echo):
            return outcome
        # The lost connection belongs to a group that is gone, which its error does not say
        reason = LaunchError(
            "the process groups of these ranks were made again after a failed call: groups from "
            "before, and models in DistributedDataParallel, no longer work. Make them again: model "
            "= functional.to(functional.unwrap(model)). Then call functional.sync(model, "
            "optimizer) in all ranks: they may have stopped one step apart, and would train on "
            "with different weights"
        )
        return replace(outcome, error=pack_exception(reason).to_bytes())


class Control:
    """The control thread of one rank, and the handlers of its SIGINT and SIGTERM.

    Attributes:
        preemption: The rank's part in the agreement on when to save.
        interrupted: The number of the last call that was interrupted by an exception in the main
            thread.
        is_leaving: True once the rank exits on its own, so that an order to end raises nothing.
    """

    def __init__(self, wire: Wire, grace_s: float) -> None:
        self.preemption = Preemption()
        self.interrupted = -1
        self.is_leaving = False
        self._wire = wire
        self._grace_s = grace_s
        # Both threads use these three without a lock: each assignment is atomic, on all builds
        self._running: int | None = None  # the number of the call that runs; None between calls
        self._halted = -1  # the number of the call to interrupt; -1 equals no value of `_running`
        self._is_ending = False  # True once EndOrdered was raised
        # Not an event: a second SIGTERM within its `set` would wait for the lock of the first
        self._has_handled_end = Latch()
        self._main_thread = MainThread()

    def start(self) -> None:
        """Install the handlers and start the thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, self._interrupt_call)
        os.register_at_fork(after_in_child=self._restore_handlers)
        threading.Thread(target=self._serve, name="parawrap-rank-control", daemon=True).start()

    def _restore_handlers(self) -> None:
        """Give a process that the function has forked Python's own handlers: it is not a rank."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self._interrupt_call:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def begin(self, number: int) -> None:
        """Note the begin of a call. From now on it can be interrupted.

        Raises EndOrdered or KeyboardInterrupt if the order came before.
        """
        self._running = number  # first: a signal from here on finds the call
        if self._is_ending:
            raise EndOrdered
        self._interrupt_call()

    def end(self) -> None:
        """Note the end of the call. From now on no interrupt raises."""
        self._running = None

    def _interrupt_call(self, *_: object) -> None:
        """Raise KeyboardInterrupt if the call that runs is to be interrupted."""
        if self._halted == self._running:
            # Only once, so that the function can clean up
            self.interrupted, self._halted = self._halted, -1
            raise KeyboardInterrupt

    def _on_sigterm(self, *_: object) -> None:
        """Raise EndOrdered, unless the function cleans up after the first, or the rank exits."""
        self._has_handled_end.set()
        if self.is_leaving:
            return
        # `begin` of another call sets `_running`, and raises EndOrdered too
        has_raised = self._is_ending and self._running is None
        if not has_raised:
            self._is_ending = True
            self._running = None
            raise EndOrdered

    def _serve(self) -> None:
        """Follow orders in the control thread, and end the process at the order to end."""
        try:
            self._follow_orders()
            self._end_main_thread()
        except Exception:  # noqa: BLE001 (shown, because the process ends without it)
            traceback.print_exc()
        finally:  # without this thread, nothing could end the rank
            os._exit(FORCED)

    def _follow_orders(self) -> None:
        """Follow orders until the order to end, or the death of the launching process."""
        while (message := self._wire.receive()) is not None:
            if message.word == "end":
                return
            self._follow(message.word, message.body)

    def _follow(self, word: str, body: Any) -> None:
        if word == "look":
            idle_s, waits_s = self._main_thread.look()
            status = Status(idle_s, waits_s, self._main_thread.line(), self.interrupted)
            self._wire.send("look", status)
        elif word == "stacks":
            try:
                self._wire.send("stacks", stacks())
            except (OSError, SessionError) as error:  # a long text needs memory, and a descriptor
                self._wire.send("stacks", f"the rank cannot send its stacks: {error}")
        elif word == "interrupt":
            self._halted = body  # before the signal, whose handler reads it
            signal.pthread_kill(self._main_thread.ident, signal.SIGINT)
        elif word == "break":
            with contextlib.suppress(OSError):  # no descriptor is left to list the others
                break_links()
        elif word == "preempt":
            self._wire.send("steps", self.preemption.hold_back())
        elif word == "checkpoint":
            self.preemption.decide(body)

    def _end_main_thread(self) -> None:
        """Raise an exception in the main thread. Return once its time to clean up is over."""
        until = time.monotonic() + self._grace_s
        self._main_thread.look()  # the second look measures the time since this one
        signal.pthread_kill(self._main_thread.ident, signal.SIGTERM)
        has_reacted = self._has_handled_end.wait(min(_REACTION_S, self._grace_s))
        if not has_reacted:
            _, waits_s = self._main_thread.look()
            if waits_s > 0:  # blocked in C code of a collective: no clean-up can run
                return
        time.sleep(max(0.0, until - time.monotonic()))


# -- the end of the process


def flush_and_join_threads() -> None:
    """Flush the streams, and wait for threads, as an interpreter does before it exits."""
    flush_streams()
    join_threads()


def flush_streams() -> None:
    """Write what the standard streams have buffered."""
    for stream in (sys.stdout, sys.stderr):
        # The function may have replaced the stream by any object, or closed it
        can_flush = hasattr(stream, "flush") and not getattr(stream, "closed", False)
        if can_flush:
            stream.flush()


def leave(code: int) -> NoReturn:
    """Exit like an interpreter, but without unloading torch: the kernel frees its memory faster."""
    run_exit_steps()
    os._exit(code)


def run_exit_steps() -> None:
    """Run the steps of an interpreter before its exit. A second call finds nothing to do."""
    for step in (join_threads, run_exit_handlers, flush_streams, _flush_files):
        try:
            step()
        except BaseException:  # noqa: BLE001 (reported as the interpreter reports it)
            with contextlib.suppress(Exception):
                traceback.print_exc()


def _flush_files() -> None:
    """Write the buffers of files that the function has left open.

    `gc.get_objects` does not list files of the server, which it has frozen.
    """
    for file in gc.get_objects():
        with contextlib.suppress(Exception):  # closed, detached, or on a full disk
            # `isinstance` would read `__class__` of all objects, and some of them warn then
            if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                file.flush()

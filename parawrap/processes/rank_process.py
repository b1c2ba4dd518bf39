"""The process of a rank: it sets up, answers calls in its main thread, and exits.

    data wire ────► main thread: set-up, then one call after the other, each with an answer
    control wire ─► control thread: stacks, interrupts, preemption, and the end, while a call runs

Guarantee: after an order to end, or the death of the launching process, the rank is gone once
    ``grace_s`` is over.

- The main thread gets an exception that ``except Exception`` does not catch, so ``finally`` blocks
  run.
- If the main thread is blocked in C code of a collective, no clean-up can run: the process exits
  within three seconds.
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
from parawrap.processes.main_thread import MainThread, Status, line_of_main_thread, stacks
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

_REACTION_S = 3.0  # a collective ends with an error when the process of a failed rank has ended
FORCED = 1
"""The exit code of a rank that has followed an order to end."""

_kept: list[Any] = []  # until the process exits


class EndOrdered(BaseException):
    """Raised in a rank's main thread if the launch ends before the function returns."""


@dataclass(frozen=True)
class Assignment:
    """The first message to a rank."""

    settings: Settings  # of the launching process
    set_up: Callable[[Preemption], None]  # sets up the rank in its process
    # leaves all process groups, and joins those of a generation with its other ranks
    regroup: Callable[[int], None]
    grace_s: float  # for the function to clean up at an order to end
    # answers any number of calls; the threads of the function then go on after its answer
    stays: bool
    # answers other messages than calls, until the wire closes
    serve: Callable[[Wire], None] | None = None


class CallHead(NamedTuple):
    """The part of a call that is not pickled as the user's values."""

    number: int  # from 1
    changes: ChangedSettings | None  # of the script's settings, for ranks that stay
    is_for_this_rank: bool  # False if the rank only takes the globals that come with the call
    # of the process groups to join before the call; None keeps those of the rank
    generation: int | None
    item: Any  # of the call in the block of the message


class Answer(NamedTuple):
    """The part of an answer that is not pickled as the user's values."""

    number: int  # of the call; `SET_UP` for that of the set-up
    outcome: Outcome  # the value travels next to it
    # globals that functions of this rank have assigned, and have deleted
    owned: tuple[list[Any], list[Any]] | None
    operations: int | None  # collectives that the rank has begun; None without a process group
    has_loaded: bool  # False if the rank could not unpickle the call, or was interrupted before
    item: Any = None  # of the value in the block of the message


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
    with contextlib.suppress(EndOrdered):  # between two calls
        return _CallLoop(wire, orders, assignment).run()
    return FORCED


def _start_session(streams: Sequence[int]) -> None:
    """Lead a session, which Ctrl-C in a terminal does not reach, with own output and no input.

    The rank ignores SIGINT, but processes that it starts do not: with SIG_IGN they would.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.siginterrupt(signal.SIGINT, False)  # else C code may see an interrupted system call
    os.setsid()
    # a freed stream writes text that was buffered before the fork
    _kept.extend((sys.stdin, sys.stdout, sys.stderr))
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    for number, file in enumerate(streams, start=1):
        os.dup2(file, number)  # output of C code goes there too
        os.close(file)
        os.set_inheritable(number, True)
    _open_streams(is_buffered=True)
    faulthandler.enable()
    # Debuggers of editors, which connect over a socket, set another hook or this variable
    uses_pdb = os.environ.get("PYTHONBREAKPOINT", "") in ("", "pdb.set_trace")
    if uses_pdb and sys.breakpointhook is sys.__breakpointhook__:
        sys.breakpointhook = refuse_breakpoint


def _open_streams(*, is_buffered: bool) -> None:
    """Make standard output and error, by lines or, as with PYTHONUNBUFFERED, without a buffer."""
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
        setattr(sys, f"__{name}__", stream)  # functions that replaced the stream put this one back


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
        self._has_regrouped = False  # the process groups were made again after a failed call
        self._has_loaded = True  # the call was unpickled

    def run(self) -> int:
        """Set up, and answer calls until the connection closes.

        Return the exit code of the process.
        """
        self._control.start()
        try:
            self._assignment.settings.apply()
            if os.environ.get("PYTHONUNBUFFERED"):
                _open_streams(is_buffered=False)
            if not self._answer(SET_UP, partial(self._assignment.set_up, self._control.preemption)):
                return FORCED
            if self._assignment.serve is not None:
                self._assignment.serve(self._wire)
                return 0
            while (message := self._wire.receive()) is not None:
                head: CallHead = message.body
                self._has_loaded = False
                # Here, where no interrupt arrives: the next call does not bring them again
                if head.changes is not None:
                    head.changes.apply()
                if not self._answer(head.number, partial(self._call, message, head)):
                    return FORCED
                del message  # with the memory of the arguments
            return 0
        finally:  # exit handlers follow, which an order to end may not interrupt
            self._control.is_leaving = True

    def _call(self, message: Message, head: CallHead) -> Any:
        """Run the function of a call, and return its value."""
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
            finish_function()  # what fails there is an error of the call
        return value

    def _answer(self, number: int, call: Callable[[], Any]) -> bool:
        """Make a call and send its answer. Return False if the process is to end."""
        goes_on = self._assignment.stays  # after an exception
        packer, item, value = Packer(), None, None
        try:
            try:
                self._control.begin(number)
                value = call()
                # Within the call: a class of the user may take long to be pickled
                item = packer.add(value, "the result")
            finally:
                self._control.end()
            outcome: Outcome = Returned(time.time(), b"")
            goes_on = True  # the next message, or the end of the connection, says what follows
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
            # The function may answer KeyboardInterrupt with sys.exit
            if was_interrupted and isinstance(error, (KeyboardInterrupt, SystemExit)):
                outcome = Ended(time.time())
            else:
                outcome = self._outcome_of(error)
                is_set_up = number != SET_UP
                goes_on = goes_on and is_set_up and isinstance(outcome, Raised)
        owned = self._script.changes() if self._assignment.stays else None
        with contextlib.suppress(Exception):
            flush_streams()  # before the answer: the pool reads the output when it arrives
        answer = Answer(number, outcome, owned, count_operations(), self._has_loaded, item)
        try:
            self._wire.send("answer", answer, packer)
        except (OSError, SessionError) as error:  # a limit of this process: nothing was sent
            self._wire.send("answer", answer._replace(outcome=outcome_of(error), item=None))
        del value  # its tensors lend their memory until here
        return goes_on

    def _outcome_of(self, error: BaseException) -> Outcome:
        outcome = outcome_of(error)
        if not (self._has_regrouped and isinstance(outcome, Raised) and outcome.is_echo):
            return outcome
        # The connection belongs to a group from before, whose error says nothing of the cause
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
        # Both threads use these three without a lock: each assignment is one step, on all builds
        self._running: int | None = None  # the number of the call
        self._halted = -1  # the number of the call to interrupt; -1 equals no value of `_running`
        self._is_ending = False
        # Not an event: a second SIGTERM within `set` would wait for the lock of the first for ever
        self._has_handled_end = Latch()
        self._main_thread = MainThread()

    def start(self) -> None:
        """Install the handlers and start the thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGINT, self._interrupt_call)
        os.register_at_fork(after_in_child=self._restore_handlers)
        threading.Thread(target=self._serve, name="parawrap-rank-control", daemon=True).start()

    def _restore_handlers(self) -> None:
        """Give processes that the function forks the usual handlers: they are not ranks."""
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.getsignal(signal.SIGINT) == self._interrupt_call:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def begin(self, number: int) -> None:
        """Note the begin of a call. From now on it can be interrupted.

        An interrupt may have arrived before.
        """
        self._running = number
        if self._is_ending:
            raise EndOrdered
        self._interrupt_call()

    def end(self) -> None:
        """Note the end of the call: it is interrupted no more."""
        self._running = None

    def _interrupt_call(self, *_: object) -> None:
        """Raise KeyboardInterrupt if the call that runs is to be interrupted."""
        if self._halted == self._running:
            # Once: the clean-up of the function may take its time
            self.interrupted, self._halted = self._halted, -1
            raise KeyboardInterrupt

    def _on_sigterm(self, *_: object) -> None:
        self._has_handled_end.set()
        if self.is_leaving:
            return
        # Once: a second signal must not interrupt the clean-up of the function
        has_raised = self._is_ending and self._running is None
        if not has_raised:
            self._is_ending = True
            self._running = None
            raise EndOrdered

    def _serve(self) -> None:
        try:
            while (message := self._wire.receive()) is not None and message.word != "end":
                self._follow(message.word, message.body)
            self._end_main_thread()
        except Exception:  # noqa: BLE001 (without this thread, nothing could end the rank)
            threading.excepthook(
                threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
            )
        finally:
            os._exit(FORCED)

    def _follow(self, word: str, body: Any) -> None:
        if word == "look":
            self._wire.send(
                "look", Status(*self._main_thread.look(), line_of_main_thread(), self.interrupted)
            )
        elif word == "stacks":
            self._wire.send("stacks", stacks())
        elif word == "interrupt":
            self._halted = body  # before the signal, whose handler reads it
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif word == "break":
            break_links()
        elif word == "preempt":
            self._wire.send("steps", self.preemption.hold_back())
        elif word == "checkpoint":
            self.preemption.decide(body)

    def _end_main_thread(self) -> None:
        """Raise an exception in the main thread. Return once its time to clean up is over."""
        until = time.monotonic() + self._grace_s
        self._main_thread.look()  # the begin of the time that the second look measures
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        has_reacted = self._has_handled_end.wait(min(_REACTION_S, self._grace_s))
        if not has_reacted:
            _, waits_s = self._main_thread.look()
            if waits_s > 0:  # in C code of a collective: nothing can be cleaned up
                return
        time.sleep(max(0.0, until - time.monotonic()))


# -- the end of the process


def finish_function() -> None:
    """Write what a function has buffered, and wait for its threads, as an interpreter does."""
    flush_streams()
    join_threads()


def flush_streams() -> None:
    """Write what the standard streams have buffered."""
    for stream in (sys.stdout, sys.stderr):  # the function may have replaced or closed them
        if stream is not None and hasattr(stream, "flush") and not getattr(stream, "closed", False):
            stream.flush()


def leave(code: int) -> NoReturn:
    """Exit like an interpreter, but without unloading torch: the kernel frees its memory faster."""
    run_exit_steps()
    os._exit(code)


def run_exit_steps() -> None:
    """Run what an interpreter runs before it exits. A second call finds nothing to do."""
    for step in (join_threads, run_exit_handlers, flush_streams, _flush_files):
        try:
            step()
        except BaseException:  # noqa: BLE001 (reported as the interpreter reports it)
            with contextlib.suppress(Exception):
                traceback.print_exc()


def _flush_files() -> None:
    """Write the buffers of files that the function left open.

    Those of the server are frozen, and not listed.
    """
    for file in gc.get_objects():
        with contextlib.suppress(Exception):  # closed, detached, or on a full disk
            # `isinstance` would ask objects for their `__class__`, and some warn then
            if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
                file.flush()

"""The control thread of a rank: it answers the launching process while the function runs.

Guarantee: after an order to end, or the death of the launching process, a rank is gone once ``grace_s`` is over, in any
state.

* The main thread gets an exception that ``except Exception`` does not catch, so ``finally`` blocks run.
* If the main thread is blocked in C code of a collective, no clean-up can run: the process exits within three seconds.
* The kernel closes the launching process's end of the connection when that process dies. A process that the user forked may
  hold the connection open, so the thread also checks the id of the parent process.
"""

from __future__ import annotations

import linecache
import os
import signal
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from parawrap.launch.messages._channel import Channel, close_in_forked_children, is_readable
from parawrap.launch.rank._interrupts import Interrupts
from parawrap.launch.rank._preemption import Preemption
from parawrap.launch.rank._process_connections import break_connections, connections_here, sequence_numbers
from parawrap.launch.rank._rank_assignment import Assignment

__all__ = ["FORCED", "PRELOADABLE", "Control", "EndOrdered", "Status"]

_OWN_FILES = str(Path(__file__).parent.parent)
_LIBRARIES = (_OWN_FILES, sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
_CHECKPOINT = str(Path(_DISTRIBUTED, "checkpoint"))  # its code may wait for a disk instead of other ranks
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)
_LOOK_S = 0.1  # short against _REACTION_S, so that a rank ends in time
_REACTION_S = 3.0  # a collective ends with an error when the process of a failed rank has ended
_IDLE = 0.02  # a waiting thread uses at most this share of a processor
FORCED = 1  # the exit code of a rank that its control thread ended

# Modules that many ranks import, at about a second each. All torch optimizers and DistributedDataParallel import the first,
# and torch.use_deterministic_algorithms the second. The warm process imports them in advance for later ranks.
PRELOADABLE = ("torch._dynamo", "torch._inductor.config")


class EndOrdered(BaseException):
    """Raised in a rank's main thread if the launch ends before the function returns."""


class Status(NamedTuple):
    """The state of a rank's main thread, which the control thread reports regularly.

    Attributes:
        unmoved_s: Seconds since the thread last changed its place in the Python code or used a processor.
        still_s: Seconds that the thread has been at one place, almost without using a processor.
        waits_s: Seconds of these in one call that waits for other ranks.
        place: The line of user code that the thread executes.
    """

    unmoved_s: float
    still_s: float
    waits_s: float
    place: str


class Control:
    """The control thread of one rank, and the handler of its SIGTERM.

    Attributes:
        preemption: The rank's part in the agreement on when to save.
        interrupts: The interrupts of its calls, if it is a rank that stays.
    """

    def __init__(self, channel: Channel, assignment: Assignment) -> None:
        self.preemption = Preemption()
        self.interrupts = Interrupts()
        self._channel = channel
        self._assignment = assignment
        self._to_report = [name for name in PRELOADABLE if name not in sys.modules]
        self._report_at = time.monotonic()
        self._parent = os.getppid()
        self._main = threading.main_thread()
        self._end_ordered = threading.Event()
        self._signal_handled = threading.Event()
        self._met = threading.Event()
        self._dismissed = threading.Event()
        self._may_interrupt = True
        self._main_thread = _MainThread()

    def start(self) -> None:
        """Install the SIGTERM handler and start the thread."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        close_in_forked_children(self._channel)  # processes that the function forks are not ranks
        os.register_at_fork(after_in_child=self._restore_sigterm)
        threading.Thread(target=self._serve, name="parawrap-rank-control", daemon=True).start()

    def _restore_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def note_phase(self, name: str) -> None:
        """Report the begin of a phase. From "run" on, other ranks may end: this one has joined the process groups."""
        self._channel.send("reached", (name, time.time()))

    def function_ended(self) -> None:
        """Stop interrupting the main thread: from now on it only reports and exits."""
        self._may_interrupt = False

    def linger(self, seconds: float) -> None:
        """Wait until all ranks have joined the process groups, then until all have ended, for at most `seconds`.

        Until then, the others may need this process: to connect to it, or in a collective.
        """
        self._met.wait()
        self._dismissed.wait(seconds)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Raise in the main thread.

        A cluster sends SIGTERM to every process of a job that it is about to end. Ignore that one: the node's task handles
        it for all its ranks.
        """
        if self._assignment.on_cluster and not self._end_ordered.is_set():
            return
        self._signal_handled.set()
        if self._may_interrupt:
            self._may_interrupt = False
            raise EndOrdered

    def _serve(self) -> None:
        try:
            self._follow_orders()
            self._end_main_thread()
        except Exception:  # noqa: BLE001 (without this thread, nothing could end the rank)
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        finally:
            os._exit(FORCED)

    def _follow_orders(self) -> None:
        """Answer the launching process until it orders the end, or has died."""
        while True:
            if is_readable(self._channel, _LOOK_S / 2 if self.interrupts.is_halting else _LOOK_S):
                message = self._channel.receive()
                if message is None or message.word == "end":
                    return
                self._on_message(message.word, message.body)
            elif os.getppid() != self._parent:
                return
            else:
                self._look()

    def _on_message(self, word: str, body: Any) -> None:
        if word == "bye":
            self._dismiss()
        elif word == "met":
            self._met.set()
        elif word == "stacks":
            self._channel.send("stacks", stacks())
        elif word == "preempt":
            self._channel.send("answered", self.preemption.hold_back())
        elif word == "checkpoint":
            self.preemption.decide(body)
        elif word == "halt":
            self.interrupts.halt(*body)
            self._look_at_halt()
        elif word == "connections":
            self._channel.send("connections", connections_here())
        elif word == "numbers":
            self._channel.send("numbers", sequence_numbers())
        elif word == "break":
            break_connections(body)

    def _dismiss(self) -> None:
        self._met.set()
        self._dismissed.set()

    def _end_main_thread(self) -> None:
        """Raise an exception in the main thread. Return once its time to react, and to clean up, is over."""
        until = time.monotonic() + self._assignment.grace_s
        self._dismiss()
        if not self._signal_handled.is_set() and not self._end_ordered.is_set():
            self._end_ordered.set()
            signal.pthread_kill(self._main.ident or 0, signal.SIGTERM)
        users_own = signal.getsignal(signal.SIGTERM) != self._on_sigterm
        reaction_s = min(_REACTION_S, self._assignment.grace_s)
        self._main_thread.look()
        has_reacted = self._signal_handled.wait(reaction_s)
        self._main_thread.look()
        if users_own or has_reacted or self._main_thread.waits_s < reaction_s / 2:
            time.sleep(max(0.0, until - time.monotonic()))

    def _look(self) -> None:
        """Report modules that the warm process can import for later ranks, and regularly the main thread's state."""
        if loaded := [name for name in self._to_report if name in sys.modules]:
            self._to_report = [name for name in self._to_report if name not in loaded]
            self._channel.send("imports", loaded)
        call = self.interrupts.running
        if self._assignment.stays and call is None:
            return
        self._main_thread.look()
        self._look_at_halt()
        now = time.monotonic()
        if now >= self._report_at and call == self.interrupts.running:  # else the state is that of an idle rank
            self._report_at = now + self._assignment.report_s
            self._channel.send("status", self._main_thread.status())

    def _look_at_halt(self) -> None:
        if word := self.interrupts.look(self._main_thread.waits_s):
            self._channel.send(word)


class _MainThread:
    """Observes the main thread from another thread: its place in the Python code, and its processor time.

    Attributes:
        unmoved_s: As in `Status`.
        still_s: As in `Status`.
        waits_s: As in `Status`.
    """

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._last = self._moved = self._stopped = self._wait_began = self._observe()
        self.unmoved_s = self.still_s = self.waits_s = 0.0

    def look(self) -> None:
        """Observe the thread, and compare it with earlier observations."""
        now = self._observe()
        used_s = now.processor_s - self._last.processor_s
        allowed_s = _IDLE * (now.at - self._last.at) if now.waits_for_ranks else 0.0  # polling a file store takes some time
        if now.place != self._last.place or used_s > allowed_s:
            self._moved = now
        if now.place != self._stopped.place:
            self._stopped = now
        if not (now.waits_for_ranks and now.before_wait == self._wait_began.before_wait):
            self._wait_began = now
        self._last = now
        self.unmoved_s = now.at - self._moved.at
        self.still_s = self._idle_s(self._stopped, now)
        self.waits_s = self._idle_s(self._wait_began, now)

    def status(self) -> Status:
        """Return the state at the last look, and the current place."""
        return Status(self.unmoved_s, self.still_s, self.waits_s, place_of_main_thread())

    def _idle_s(self, then: _Look, now: _Look) -> float:
        """Return the seconds between two looks; 0 if the thread has used more than a small share of a processor."""
        passed_s = now.at - then.at
        return passed_s if now.processor_s - then.processor_s <= _IDLE * passed_s else 0.0

    def _observe(self) -> _Look:
        frame = sys._current_frames().get(self._ident)
        frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        waits = [_waits_in(each.f_code.co_filename) for each in frames]
        outside = waits.index(False) if False in waits else len(frames)
        place = tuple((id(each), each.f_lasti) for each in frames)
        return _Look(time.monotonic(), self._processor_s(), place, place[outside:], outside > 0)

    def _processor_s(self) -> float:
        """Return the processor time of the main thread. With CUDA return 0, because a thread spins to wait for the GPU."""
        if not hasattr(time, "pthread_getcpuclockid") or torch.cuda.is_initialized():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))


def _waits_in(filename: str) -> bool:
    """True for files whose code waits for other ranks.

    These are files of torch.distributed, and of autograd: the backward of DistributedDataParallel waits in C++ code.
    """
    if filename.startswith(_AUTOGRAD):
        return torch.distributed.is_available() and torch.distributed.is_initialized()
    return filename.startswith(_DISTRIBUTED) and not filename.startswith(_CHECKPOINT)


class _Look(NamedTuple):
    """One observation of the main thread."""

    at: float
    processor_s: float
    place: tuple[tuple[int, int], ...]
    before_wait: tuple[tuple[int, int], ...]  # the place, without the innermost frames that wait for ranks
    waits_for_ranks: bool


def stacks() -> str:
    """Return the stacks of all threads except the calling one, without parawrap's own frames."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{_stack_text(frame)}"
        for ident, frame in sys._current_frames().items()
        if ident != mine
    )


def place_of_main_thread() -> str:
    """Return the line that the main thread executes: the innermost outside parawrap, torch, and the standard library."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [] if frame is None else [(each.f_code, line) for each, line in traceback.walk_stack(frame)]
    users = [each for each in frames if not each[0].co_filename.startswith(_LIBRARIES)] or frames
    if not users:
        return "an unknown place"
    code, number = users[0]
    number = number or code.co_firstlineno  # some bytecode belongs to no line
    place = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
    try:
        return f"{place}: {linecache.getline(code.co_filename, number).strip()}"
    except Exception:  # noqa: BLE001 (another thread may change the cache of lines, and other code may fill it)
        return place


def _stack_text(frame: FrameType) -> str:
    try:
        return "".join(_stack_of(frame).format())
    except Exception as error:  # noqa: BLE001 (as above; a rank does not end because of it)
        return f"  its source cannot be read: {error!r}\n"


def _stack_of(frame: FrameType) -> traceback.StackSummary:
    stack = traceback.extract_stack(frame)
    own = [i for i, each in enumerate(stack) if each.filename.startswith(_OWN_FILES)]
    return traceback.StackSummary.from_list(stack[own[-1] + 1 :] if own and own[-1] + 1 < len(stack) else stack)

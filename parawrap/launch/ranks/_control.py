"""A rank's line to its parent, served by a thread of its own while the function runs.

What it guarantees: a rank that is told to end, or whose parent is gone, is gone too after ``grace_s``, whatever it does.

* Told to end, the main thread gets an exception that no ``except Exception`` catches: ``finally`` blocks run.
* A main thread that does not even take the signal, because it waits in C for a collective that will never be complete,
  has nothing to clean up: the process ends within a second.
* The parent is gone when its end of the line is closed, which the kernel does however it died. A process that the user
  forked from the parent may hold the line open; so the id of the parent process is looked at too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

from parawrap.launch.parcels._wire import Wire, close_in_forked_children, is_readable
from parawrap.launch.ranks._assignment import Assignment
from parawrap.launch.ranks._preemption import Preemption

__all__ = ["FORCED", "Control", "ToldToEnd"]

_OWN_FILES = str(Path(__file__).parent.parent)
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
_LOOK_S = 0.1
_DEAF_S = 1.0
_IDLE = 0.02  # of the time, whoever only waits uses at most this share of a processor
FORCED = 1  # the exit code of a rank that its own control ended


class ToldToEnd(BaseException):
    """Raised in a rank's main thread when the launch ends before the function does."""


class Control:
    """Serves one rank, from its start to its end.

    Attributes:
        preemption: the rank's part in agreeing on when to save.
    """

    def __init__(self, wire: Wire, orders: Assignment) -> None:
        self.preemption = Preemption()
        self._wire = wire
        self._orders = orders
        self._others_left = False
        self._is_stuck = False
        self._parent = os.getppid()
        self._main = threading.main_thread()
        self._told = threading.Event()
        self._heard = threading.Event()
        self._dismissed = threading.Event()
        self._interrupts = True
        self._main_thread = _MainThread()

    def start(self) -> None:
        """Take the signal that tells the rank to end, and serve the line."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        close_in_forked_children(self._wire)  # what the function forks is no rank: it has nothing to say to the parent
        os.register_at_fork(after_in_child=self._let_go_of_sigterm)
        threading.Thread(target=self._serve, name="parawrap-rank-control", daemon=True).start()

    def _let_go_of_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def function_ended(self) -> None:
        """From now on the rank only reports and leaves: nothing is left that would have to be told to end."""
        self._interrupts = False

    def linger(self, seconds: float) -> None:
        """Wait until the parent needs this process no longer, but not longer than this."""
        self._dismissed.wait(seconds)

    def _on_sigterm(self, _number: int, _frame: FrameType | None) -> None:
        """Run in the main thread as soon as that runs Python; also when somebody else sends the signal.

        A cluster sends it to every process of a job that it is about to end; what that means for ranks, their node decides.
        """
        if self._orders.on_cluster and not self._told.is_set():
            return
        self._heard.set()
        if self._interrupts:
            self._interrupts = False
            raise ToldToEnd

    def _serve(self) -> None:
        while True:
            if is_readable(self._wire, _LOOK_S):
                message = self._wire.receive()
                if message is None:
                    break
                if message.word == "bye":
                    self._dismissed.set()
                elif message.word == "left":
                    self._others_left = True
                elif message.word == "stacks":
                    self._wire.send("stacks", stacks())
                elif message.word == "preempt":
                    self._wire.send("answered", self.preemption.hold_back())
                elif message.word == "checkpoint":
                    self.preemption.decide(message.body)
                elif message.word == "end":
                    break
            elif os.getppid() != self._parent:
                break
            elif self._orders.tells_of_life or self._others_left:
                self._look_at_main_thread()
        self._end()

    def _end(self) -> None:
        """End this process: by the main thread's own doing if it can, else from here."""
        self._dismissed.set()
        if not self._heard.is_set() and not self._told.is_set():
            self._told.set()
            signal.pthread_kill(self._main.ident or 0, signal.SIGTERM)
        users_own = signal.getsignal(signal.SIGTERM) != self._on_sigterm
        if users_own or self._heard.wait(_DEAF_S) or not self._main_thread.is_in_distributed():
            time.sleep(self._orders.grace_s)
        os._exit(FORCED)

    def _look_at_main_thread(self) -> None:
        """Tell the parent of life, where it wants to know; and of being stuck, where other ranks have left."""
        moved = self._main_thread.has_moved()
        if moved and self._orders.tells_of_life:
            self._wire.send("alive")
        is_stuck = self._others_left and self._main_thread.waits_for_others(self._orders.stuck_s)
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self._wire.send("stuck" if is_stuck else "moves", stacks())


class _MainThread:
    """What can be seen of the main thread from another one: where it is in its Python code, and what it has computed."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._seen: _Look | None = None
        self._wait_began: _Look | None = None

    def has_moved(self) -> bool:
        """Whether it is at another place than when last asked, or has used its processor in between."""
        last, now = self._seen, self._look()
        self._seen = now
        began = self._wait_began
        if not now.in_distributed:
            self._wait_began = None
        elif began is None or began.before_distributed != now.before_distributed:
            self._wait_began = now
        return last is None or (last.place, last.processor_s) != (now.place, now.processor_s)

    def is_in_distributed(self) -> bool:
        """Whether it is in a call of torch.distributed."""
        return self._look().in_distributed

    def waits_for_others(self, seconds: float) -> bool:
        """Whether it has been in one call of torch.distributed for so long, and has done next to nothing there."""
        if self._seen is None or self._wait_began is None:
            return False
        waited = self._seen.at - self._wait_began.at
        return waited >= seconds and self._seen.processor_s - self._wait_began.processor_s <= _IDLE * waited

    def _look(self) -> _Look:
        frame = sys._current_frames().get(self._ident)
        frames = [] if frame is None else [each for each, _ in traceback.walk_stack(frame)]
        in_distributed = [each.f_code.co_filename.startswith(_DISTRIBUTED) for each in frames]
        outside = in_distributed.index(False) if False in in_distributed else len(frames)
        place = tuple((id(each), each.f_lasti) for each in frames)
        return _Look(time.monotonic(), self._processor_s(), place, place[outside:], outside > 0)

    def _processor_s(self) -> float:
        """What the main thread alone has used. On CUDA nothing can be told from it: whoever waits for the GPU spins."""
        if not hasattr(time, "pthread_getcpuclockid") or torch.cuda.is_initialized():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))


class _Look(NamedTuple):
    """One look at the main thread."""

    at: float
    processor_s: float
    place: tuple[tuple[int, int], ...]
    before_distributed: tuple[tuple[int, int], ...]  # the place, without the frames within torch.distributed
    in_distributed: bool


def stacks() -> str:
    """What every thread of this process is doing, but for the one that asks; without what led to the user's function."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(_stack_of(frame).format())
        for ident, frame in sys._current_frames().items()
        if ident != mine
    )


def _stack_of(frame: FrameType) -> traceback.StackSummary:
    stack = traceback.extract_stack(frame)
    own = [i for i, each in enumerate(stack) if each.filename.startswith(_OWN_FILES)]
    return traceback.StackSummary.from_list(stack[own[-1] + 1 :] if own and own[-1] + 1 < len(stack) else stack)

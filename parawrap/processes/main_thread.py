"""The main thread of a rank, as its control thread sees it: where it is, and how long it idles."""

from __future__ import annotations

import linecache
import sys
import sysconfig
import threading
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

# Folders
_PARAWRAP = str(Path(__file__).parent.parent)
_LIBRARIES = (_PARAWRAP, sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
# its code may wait for a disk instead of other ranks
_CHECKPOINT = str(Path(_DISTRIBUTED, "checkpoint"))
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)

# A guess: an idle thread uses at most this share of a processor. It polls the file store
_IDLE_SHARE = 0.02


class Status(NamedTuple):
    """The state of a rank's main thread."""

    # how long it has been at one place of its code, almost without using a processor
    idle_s: float
    waits_s: float  # the same, if this place is in code that waits for other ranks; else 0
    line: str  # the line of user code that it executes: file, number, function, and text
    # the number of the last call in which it has raised KeyboardInterrupt, -1 before the first
    interrupted: int


class MainThread:
    """Observes the main thread of this process from another thread.

    Attributes:
        ident: Its number, as in `threading.get_ident`.
    """

    def __init__(self) -> None:
        self.ident = threading.main_thread().ident or 0  # for type checkers: it is never None
        # Where it was seen first at its present place, when, and its processor time then
        self._place: tuple[tuple[int, int], ...] = ()
        self._stopped_at = self._used_s = 0.0

    def look(self) -> tuple[float, float]:
        """Observe the thread, and compare it with an earlier observation.

        Return `idle_s` and `waits_s` of its status.
        """
        frame = sys._current_frames().get(self.ident)
        # A place is the frames of the stack and their instructions. Not lines: a loop of one line
        # would seem to stand still. A new frame may have the id of a freed one: then the thread
        # counts as idle until its next step
        place: tuple[tuple[int, int], ...] = ()
        if frame is not None:
            place = tuple((id(each), each.f_lasti) for each, _ in traceback.walk_stack(frame))
        now, used_s = time.monotonic(), self._processor_s()
        is_busy = used_s - self._used_s > _IDLE_SHARE * (now - self._stopped_at)
        if is_busy or place != self._place:
            self._place, self._stopped_at, self._used_s = place, now, used_s
        idle_s = now - self._stopped_at
        waits = frame is not None and _waits_in(frame.f_code.co_filename)
        return idle_s, idle_s if waits else 0.0

    def line(self) -> str:
        """Return the innermost line of user code that the thread executes."""
        innermost = sys._current_frames().get(self.ident)
        if innermost is None:  # the thread has ended
            return "an unknown place"
        code, number = innermost.f_code, innermost.f_lineno
        for frame, number_in_frame in traceback.walk_stack(innermost):
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                code, number = frame.f_code, number_in_frame
                break
        number = number or code.co_firstlineno  # some bytecode belongs to no line
        where = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
        try:
            return f"{where}: {linecache.getline(code.co_filename, number).strip()}"
        except Exception:  # noqa: BLE001 (other threads may change the cache of lines meanwhile)
            return where

    def _processor_s(self) -> float:
        """Return the processor time of the main thread.

        With CUDA return 0: a thread that waits for the GPU uses a whole processor.
        """
        if not hasattr(time, "pthread_getcpuclockid") or torch.cuda.is_initialized():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))


def _waits_in(filename: str) -> bool:
    """True for files of torch whose code waits for other ranks.

    These are files of torch.distributed, and of autograd: the backward of DistributedDataParallel
    waits in C++ code that autograd has called.
    """
    if filename.startswith(_AUTOGRAD):
        return torch.distributed.is_available() and torch.distributed.is_initialized()
    return filename.startswith(_DISTRIBUTED) and not filename.startswith(_CHECKPOINT)


def stacks() -> str:
    """Return the stacks of all threads except the calling one, without parawrap's own frames."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    mine = threading.get_ident()
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{_stack_text(frame)}"
        for ident, frame in sys._current_frames().items()
        if ident != mine
    )


def _stack_text(frame: FrameType) -> str:
    """Return the frames of a stack that come after the last one of parawrap, or all of them."""
    try:
        stack = traceback.extract_stack(frame)
        shown: list[traceback.FrameSummary] = []
        for each in stack:
            if each.filename.startswith(_PARAWRAP):
                shown = []
            else:
                shown.append(each)
        # A thread of parawrap has none after its own
        return "".join(traceback.StackSummary.from_list(shown or stack).format())
    except Exception as error:  # noqa: BLE001 (as above; a rank does not end because of it)
        return f"  its source cannot be read: {error!r}\n"

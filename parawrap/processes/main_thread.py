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

_OWN_FILES = str(Path(__file__).parent.parent)
_LIBRARIES = (_OWN_FILES, sysconfig.get_path("stdlib"), str(Path(torch.__file__).parent))
_DISTRIBUTED = str(Path(torch.distributed.__file__).parent)
# its code may wait for a disk instead of other ranks
_CHECKPOINT = str(Path(_DISTRIBUTED, "checkpoint"))
_AUTOGRAD = str(Path(torch.autograd.__file__).parent)
# an idle thread uses at most this share of a processor: polling a file store takes some time
_IDLE = 0.02


class Status(NamedTuple):
    """The state of a rank's main thread."""

    # that the thread has been at one place of its code, almost without using a processor
    idle_s: float
    waits_s: float  # the same, if this place is in code that waits for other ranks; else 0
    line: str  # of user code, which the thread executes: file, number, function, and text
    interrupted: int  # the number of the last call that was interrupted


class MainThread:
    """Observes the main thread of this process from another thread."""

    def __init__(self) -> None:
        self._ident = threading.main_thread().ident or 0
        self._place: tuple[tuple[int, int], ...] = ()
        self._stopped_at = self._used_s = 0.0  # when it came there, and its processor time then

    def look(self) -> tuple[float, float]:
        """Observe the thread, and compare it with an earlier observation.

        Return `idle_s` and `waits_s` of its status.
        """
        frame = sys._current_frames().get(self._ident)
        # Frames and instructions, not lines: a loop of one line moves. A frame that is freed may
        # leave its id to another one, which then counts as the same place until its next step
        place: tuple[tuple[int, int], ...] = ()
        if frame is not None:
            place = tuple((id(each), each.f_lasti) for each, _ in traceback.walk_stack(frame))
        now, used_s = time.monotonic(), self._processor_s()
        is_busy = used_s - self._used_s > _IDLE * (now - self._stopped_at)
        if is_busy or place != self._place:
            self._place, self._stopped_at, self._used_s = place, now, used_s
        idle_s = now - self._stopped_at
        waits = frame is not None and _waits_in(frame.f_code.co_filename)
        return idle_s, idle_s if waits else 0.0

    def _processor_s(self) -> float:
        """Return the processor time of the main thread.

        With CUDA return 0, because a thread spins to wait for the GPU.
        """
        if not hasattr(time, "pthread_getcpuclockid") or torch.cuda.is_initialized():
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))


def _waits_in(filename: str) -> bool:
    """True for files whose code waits for other ranks.

    These are files of torch.distributed, and of autograd: the backward of DistributedDataParallel
    waits in C++ code.
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


def line_of_main_thread() -> str:
    """Return the line of user code that the main thread executes: the innermost one."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    if innermost is None:  # the thread has ended
        return "an unknown place"
    found, found_number = innermost, innermost.f_lineno
    for frame, number_in_frame in traceback.walk_stack(innermost):
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            found, found_number = frame, number_in_frame
            break
    code = found.f_code
    number = found_number or code.co_firstlineno  # some bytecode belongs to no line
    where = f"{Path(code.co_filename).name}:{number} in {code.co_name}"
    try:
        return f"{where}: {linecache.getline(code.co_filename, number).strip()}"
    except Exception:  # noqa: BLE001 (other code may change the cache of lines)
        return where


def _stack_text(frame: FrameType) -> str:
    try:
        stack = traceback.extract_stack(frame)
        after_own: list[traceback.FrameSummary] = []
        for each in stack:
            if each.filename.startswith(_OWN_FILES):
                after_own = []
            else:
                after_own.append(each)
        shown = after_own or stack  # a thread of parawrap may have only such frames
        return "".join(traceback.StackSummary.from_list(shown).format())
    except Exception as error:  # noqa: BLE001 (as above; a rank does not end because of it)
        return f"  its source cannot be read: {error!r}\n"

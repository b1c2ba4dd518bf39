"""Print the output of ranks in a thread, so that a reader that does not drain standard output cannot stop supervision."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import os
import re
import select
import stat
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["Lines", "Printer"]

_LONGEST_LINE = 1 << 16  # characters that are held back; a longer line is shown in parts
_LINE_END = re.compile(r"(\r\n|\n|\r)")
_PIECE = 4096  # a pipe that is ready for writing takes this many bytes without blocking (PIPE_BUF of Linux)
_PATIENCE_S = 1.0  # `finish` gives up if standard output takes nothing for this long; a guess that no test has contradicted


class Printer:
    """Prints the output of one launch in order of arrival. Any thread may call its methods.

    The thread starts with the first output, and ends once all output is printed after `finish`. At the exit of the
    interpreter, output that is not printed yet blocks the exit, as it does without parawrap.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: deque[Callable[[], None]] = deque()
        self._printed = 0
        self._added = self._shown = 0
        self._is_finished = False
        self._thread: threading.Thread | None = None

    def add(self, show: Callable[[], None]) -> None:
        """Call `show` after the output that was added before."""
        with self._changed:
            self._pending.append(show)
            self._added += 1
            if self._thread is None:
                self._start()
            self._changed.notify_all()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="parawrap-launch-printer", daemon=True)
        _printing.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # the limit on threads: print here, where a reader may block supervision
            self._thread = None
            _printing.discard(self)
            while self._pending:
                self._pending.popleft()()
                self._shown += 1

    def write(self, stream: str, text: str) -> None:
        """Write to ``sys.stdout`` or ``sys.stderr``. Called in the thread."""
        target: TextIO | None = getattr(sys, stream)  # looked up each time, because notebooks and tests replace it
        if not text or target is None:
            return
        with contextlib.suppress(Exception):  # the stream may be closed; the transcript is complete anyway
            encoding = getattr(target, "encoding", None) or "utf-8"
            data = text.encode(encoding, "backslashreplace")
            file = _find_blocking_file(target)
            for piece in [data] if file is None else _pieces(data):
                if file is not None:
                    _await_writable(file)
                target.write(piece.decode(encoding))
                target.flush()
                with self._changed:
                    self._printed += 1

    def finish(self) -> None:
        """Wait until all output is printed. If standard output takes nothing for a second, return: the thread goes on."""
        with self._changed:
            self._is_finished = True
            self._changed.notify_all()
            printed = -1
            while self._thread is not None and self._printed != printed:
                printed = self._printed
                self._changed.wait_for(lambda: self._thread is None, _PATIENCE_S)

    def flush(self) -> None:
        """Wait until the output so far is printed. Return if standard output takes nothing for a second."""
        with self._changed:
            added, printed = self._added, -1
            while self._shown < added and self._printed != printed:
                printed = self._printed
                self._changed.wait_for(lambda: self._shown >= added, _PATIENCE_S)

    def drain(self) -> None:
        """Wait until all output is printed."""
        with self._changed:
            self._changed.wait_for(lambda: self._thread is None)

    def _run(self) -> None:
        while (show := self._next()) is not None:
            show()
            with self._changed:
                self._shown += 1
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_finished)
            if self._pending:
                return self._pending.popleft()
            self._thread = None
            _printing.discard(self)
            self._changed.notify_all()
            return None


class Lines:
    """Splits a stream into lines, which end with a newline or a carriage return, and prints only whole lines."""

    def __init__(self, printer: Printer, prefix: str, stream: str) -> None:
        self._printer = printer
        self._prefix = prefix
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._returned = False

    def take(self, data: bytes, *, final: bool = False) -> None:
        """Print the lines that end in `data`. Keep the rest until its end arrives, or print it if it is `final`."""
        text = self._begun + self._decoder.decode(data, final)
        if self._returned and text.startswith("\n"):  # the second half of a split "\r\n"
            self._printer.write(self._stream, "\n")
            text = text[1:]
        *lines, self._begun = _LINE_END.split(text)
        shown = [line + end for line, end in zip(lines[::2], lines[1::2], strict=True)]
        if self._begun and (final or len(self._begun) > _LONGEST_LINE):
            shown.append(self._begun + "\n")
            self._begun = ""
        if text:
            self._returned = text.endswith("\r")
        self._printer.write(self._stream, "".join(self._prefix + line for line in shown))


def _find_blocking_file(target: TextIO) -> int | None:
    """Return the descriptor of a stream if a write to it may block until another process reads. Else None."""
    try:
        file = target.fileno()
        return None if stat.S_ISREG(os.fstat(file).st_mode) else file
    except Exception:  # noqa: BLE001 (notebooks and tests have streams without a descriptor)
        return None


def _pieces(data: bytes) -> Iterator[bytes]:
    """Split encoded text into pieces of whole lines of at most `_PIECE` bytes. A longer line is one piece."""
    piece = b""
    for line in data.splitlines(keepends=True):
        if piece and len(piece) + len(line) > _PIECE:
            yield piece
            piece = b""
        piece += line
    yield piece


def _await_writable(file: int) -> None:
    poll = select.poll()  # select() is limited to descriptors below 1024
    poll.register(file, select.POLLOUT)
    poll.poll()


_printing: weakref.WeakSet[Printer] = weakref.WeakSet()


def _drain_all() -> None:
    for printer in list(_printing):
        printer.drain()


atexit.register(_drain_all)
os.register_at_fork(after_in_child=_printing.clear)  # the threads stay in the parent

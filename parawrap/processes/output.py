"""The output of ranks: kept for `Launch.logs`, written to log files, and printed by lines."""

from __future__ import annotations

import codecs
import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from parawrap.errors import LaunchError

_log = logging.getLogger("parawrap.launch")

# Bytes of a rank's output that stay in memory; more go to a file. Most ranks write less
_IN_MEMORY = 1 << 20
# Bytes that are printed at a time. Meanwhile, memory has them twice. A guess
_PIECE = 1 << 16
# Bytes at the end of the output that are searched for the last line. A guess: even a progress bar,
# which writes one line again and again, has shorter ones
_LAST_LINE = 1 << 16
_LAST_WORDS = 4000  # characters of the output in an error: enough for a traceback

_LINE_END = re.compile(r"(\r\n|\n|\r)")
_ESCAPE_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colors and movements of the cursor
_TERMINAL_S = 1.0  # the longest wait for a terminal that takes no output


class Printer:
    """Prints the output of one launch in a thread: a slow reader cannot stop supervision.

    If output is not printed yet when the interpreter exits, the exit waits for it, as it does for
    the output of any program.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "parawrap-printer")
        self._last: Future[object] | None = None

    def add(self, show: Callable[[], object]) -> None:
        """Call `show` after the output that was added before. Any thread may call it."""
        try:
            self._last = self._executor.submit(show)
        except RuntimeError:  # the interpreter exits: then threads take no more work
            with contextlib.suppress(Exception):
                show()

    def flush(self) -> None:
        """Wait until the output so far is printed, for at most a second."""
        if self._last is not None:
            # One thread prints in order: the last piece is printed after all others
            wait([self._last], _TERMINAL_S)

    def finish(self) -> None:
        """Print all output, and end the thread then. Wait for it for at most a second."""
        self.flush()
        has_printed_all = self._last is None or self._last.done()
        # A blocked terminal must not block the launch: then the thread ends on its own, later
        self._executor.shutdown(wait=has_printed_all)


class _Lines:
    """Splits a stream at newlines and carriage returns, and prints only whole lines."""

    def __init__(self, prefix: str, stream: str) -> None:
        self._prefix = prefix
        self._stream = stream  # its name in `sys`
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""  # the last line, whose end has not arrived

    def take(self, data: bytes, *, final: bool = False) -> None:
        """Print the lines that end in `data`. Keep the rest, or print it if `data` is `final`."""
        # A line, its end, a line, its end, and so on, then a line without an end
        *lines, begun = _LINE_END.split(self._begun + self._decoder.decode(data, final))
        texts, ends = lines[::2], lines[1::2]
        shown = [self._prefix + text + end for text, end in zip(texts, ends, strict=True)]
        self._begun = "" if final else begun
        if final and begun:
            shown.append(self._prefix + begun + "\n")
        self._write("".join(shown))

    def _write(self, text: str) -> None:
        # Looked up each time, because notebooks and tests replace it
        target: Any = getattr(sys, self._stream)
        if text and target is not None:
            encoding = getattr(target, "encoding", None) or "utf-8"
            # A character that is not in this encoding would raise in `write`
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()


class _Kept:
    """Output in memory up to 1 MiB, then all of it in a file without a name."""

    def __init__(self) -> None:
        self.size = 0
        self._memory = bytearray()
        self._file: BinaryIO | None = None

    def append(self, data: bytes) -> None:
        """Add output.

        Raises:
            OSError: If the disk has no room. Nothing is added then, and a later call may succeed.
        """
        if self._file is None and self.size + len(data) > _IN_MEMORY:
            file: Any = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (see `close`)
            try:
                _write_at(file, self._memory, 0)
            except OSError:
                file.close()
                raise
            # Not before the file has everything: `read` needs the memory until then
            self._file, self._memory = file, bytearray()
        if self._file is None:
            self._memory += data
        else:
            _write_at(self._file, data, self.size)
        self.size += len(data)

    def read(self, start: int, size: int) -> bytes:
        """Return a part of the output."""
        if self._file is None:
            return bytes(self._memory[start : start + size])
        return os.pread(self._file.fileno(), size, start)

    def close(self) -> None:
        """Free the file."""
        if self._file is not None:
            self._file.close()


def _write_at(file: BinaryIO, data: bytes | bytearray, start: int) -> None:
    """Write all of the data. If the disk is full, a later write replaces the part of it there."""
    rest = memoryview(data)
    while rest:
        count = os.pwrite(file.fileno(), rest, start)
        rest, start = rest[count:], start + count


class _Unshown(NamedTuple):
    """Output that is not printed yet: a part of what is kept, or data that could not be kept."""

    stream: int  # 1 or 2
    start: int  # the place in what is kept
    size: int
    data: bytes | None = None  # None for a part of what is kept

    def is_followed_by(self, stream: int, start: int) -> bool:
        """True if output that is kept from `start` on continues this part, in the same stream."""
        return self.stream == stream and self.start + self.size == start


class Transcript:
    """The output of one rank, from both streams, in order of arrival.

    Output beyond 1 MiB is kept on disk. Output that is not printed yet is not in memory a second
    time: the printer reads it from what is kept.

    Args:
        printer: Prints the output; None prints nothing.
        prefix: Stands in front of each printed line.
        path: The log file, or None.

    Raises:
        LaunchError: If the log file cannot be opened.
    """

    def __init__(self, printer: Printer | None, prefix: str = "", path: Path | None = None) -> None:
        # Guards all attributes below: the thread of the pool writes, the thread of the printer
        # takes, and any thread reads. Never held during a print: a terminal may block. Reentrant,
        # because a signal handler may read the output too
        self._access = threading.RLock()
        self._printer = printer
        self._kept = _Kept()
        weakref.finalize(self, self._kept.close)
        self._has_output = False
        self._has_warned = False
        self._log_file = None if path is None else _open_file(path)
        self._lines = _Lines(prefix, "stdout"), _Lines(prefix, "stderr")
        self._unshown: deque[_Unshown] = deque()
        self._is_showing = False  # True while `_show` waits for its turn or runs

    def write(self, stream: int, data: bytes) -> None:
        """Add output of stream 1 (standard output) or 2 (standard error)."""
        with self._access:
            start = self._kept.size
            is_kept = self._keep(data)
            if self._printer is None:
                return
            last = self._unshown[-1] if self._unshown else None
            # Adjacent parts become one entry: a blocked terminal costs no memory
            if is_kept and last is not None and last.is_followed_by(stream, start):
                self._unshown[-1] = last._replace(size=last.size + len(data))
            else:
                self._unshown.append(_Unshown(stream, start, len(data), None if is_kept else data))
            was_showing = self._is_showing
            self._is_showing = True
        if not was_showing:
            self._printer.add(self._show)

    def record(self, text: str) -> None:
        """Add a text that the rank did not write. It is not printed."""
        with self._access:
            self._keep(f"{text}\n".encode(errors="backslashreplace"))

    def _keep(self, data: bytes) -> bool:
        """Keep output, also in the log file. Return False if it could not be kept.

        A full disk loses output, and does not end the launch.
        """
        self._has_output = True
        try:
            if self._log_file is not None:
                self._log_file.write(data)
        except OSError as error:
            self._warn(error)
        try:
            self._kept.append(data)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("the output of a rank cannot be kept completely: %s", error)

    def _show(self) -> None:
        """Print what is not printed yet, in the thread of the printer."""
        while True:
            with self._access:
                if not self._unshown:
                    self._is_showing = False
                    return
                stream, start, size, data = self._unshown.popleft()
                if data is None:  # it is in `_kept`
                    data = self._kept.read(start, min(size, _PIECE))
                    if size > _PIECE:
                        rest = _Unshown(stream, start + _PIECE, size - _PIECE)
                        self._unshown.appendleft(rest)
            with contextlib.suppress(Exception):  # standard output of the script is broken
                self._lines[stream - 1].take(data)

    def text(self, most: int | None = None) -> str:
        """Return all output so far, or at most `most` bytes of its end."""
        with self._access:
            size = self._kept.size
            start = 0 if most is None else max(0, size - most)
            kept = self._kept.read(start, size - start)
        return kept.decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line of output that is not blank, without escape codes."""
        text = _ESCAPE_CODE.sub("", self.text(_LAST_LINE))
        for piece in reversed(_LINE_END.split(text)):  # lines, and their ends, which are blank
            line = piece.strip()
            if line:
                return line
        return ""

    def last_words(self) -> str:
        """Return the end of the output."""
        return self.text(_LAST_WORDS)

    def show_unfinished(self) -> None:
        """Print the last lines of both streams, although they have not ended."""
        if self._printer is not None and self._has_output:
            for lines in self._lines:
                self._printer.add(partial(lines.take, b"", final=True))

    def finish(self) -> None:
        """Print the unfinished last lines, and close the log file. `text` still works."""
        self.show_unfinished()
        with self._access, contextlib.suppress(OSError):
            if self._log_file is not None:
                file, self._log_file = self._log_file, None
                file.close()


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        msg = f"console_logs: {path} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error

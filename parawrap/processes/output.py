"""The output of ranks: kept for `Launch.logs`, written to log files, and printed line by line with the rank in front."""

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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from parawrap.errors import LaunchError

_log = logging.getLogger("parawrap.launch")

_IN_MEMORY = 1 << 20  # bytes per rank; most ranks write less
_LAST_LINE = 1 << 16  # bytes of output that are searched for the last line
_LAST_WORDS = 4000  # bytes, enough for a traceback
_LINE_END = re.compile(r"(\r\n|\n|\r)")
_ESCAPE_CODE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # colors and movements of the cursor
_PATIENCE_S = 1.0  # for a terminal that takes no output; supervision goes on then


class Printer:
    """Prints the output of one launch in a thread, so that a reader that does not drain it cannot stop supervision.

    At the exit of the interpreter, output that is not printed yet blocks the exit, as it does without parawrap.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "parawrap-printer")
        self._last: Future[object] | None = None

    def add(self, show: Callable[[], object]) -> None:
        """Call `show` after the output that was added before. Any thread may call it."""
        try:
            self._last = self._executor.submit(show)
        except RuntimeError:  # the interpreter exits
            with contextlib.suppress(Exception):
                show()

    def flush(self) -> None:
        """Wait until the output so far is printed, for at most a second."""
        if self._last is not None:
            wait([self._last], _PATIENCE_S)

    def finish(self) -> None:
        """Print all output, and end the thread then. Wait for it for at most a second."""
        self.flush()
        self._executor.shutdown(wait=self._last is None or self._last.done())


class _Lines:
    """Splits a stream into lines, which end with a newline or a carriage return, and prints only whole lines."""

    def __init__(self, prefix: str, stream: str) -> None:
        self._prefix = prefix
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""

    def take(self, data: bytes, *, final: bool = False) -> None:
        """Print the lines that end in `data`. Keep the rest until its end arrives, or print it if it is `final`."""
        *lines, begun = _LINE_END.split(self._begun + self._decoder.decode(data, final))
        shown = [self._prefix + line + end for line, end in zip(lines[::2], lines[1::2], strict=True)]
        self._begun = "" if final else begun
        if final and begun:
            shown.append(self._prefix + begun + "\n")
        self._write("".join(shown))

    def _write(self, text: str) -> None:
        target: Any = getattr(sys, self._stream)  # looked up each time, because notebooks and tests replace it
        if text and target is not None:
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()


class Transcript:
    """The output of one rank, from both streams, in order of arrival. Output beyond 1 MiB is kept on disk.

    Args:
        printer: Prints the output; None prints nothing.
        prefix: Stands in front of each printed line.
        path: The log file, or None.

    Raises:
        LaunchError: If the log file cannot be opened.
    """

    def __init__(self, printer: Printer | None, prefix: str = "", path: Path | None = None) -> None:
        self._access = threading.Lock()
        self._printer = printer
        self._kept: Any = tempfile.SpooledTemporaryFile(_IN_MEMORY, buffering=0)  # noqa: SIM115 (closed by the finalizer)
        weakref.finalize(self, self._kept.close)
        self._has_output = False
        self._has_warned = False
        self._files = [self._kept] if path is None else [self._kept, _open_file(path)]
        self._lines = _Lines(prefix, "stdout"), _Lines(prefix, "stderr")

    def write(self, stream: int, data: bytes) -> None:
        """Add output of stream 1 (standard output) or 2 (standard error)."""
        self._keep(data)
        if self._printer is not None:
            self._printer.add(partial(self._lines[stream - 1].take, data))

    def record(self, text: str) -> None:
        """Add a text that the rank did not write. It is not printed."""
        self._keep(f"{text}\n".encode(errors="backslashreplace"))

    def _keep(self, data: bytes) -> None:
        """Write to both files. A full disk cuts the output that is kept, and ends no launch."""
        with self._access:
            self._has_output = True
            for file in self._files:
                try:
                    file.seek(0, os.SEEK_END)
                    file.write(data)
                except OSError as error:
                    if not self._has_warned:
                        self._has_warned = True
                        _log.warning("the output of a rank cannot be kept completely: %s", error)

    def text(self, most: int | None = None) -> str:
        """Return all output so far, or at most so many bytes of its end."""
        with self._access:
            size = self._kept.seek(0, os.SEEK_END)
            self._kept.seek(0 if most is None else max(0, size - most))
            kept: bytes = self._kept.read()
        return kept.decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line of output that is not blank, or the end of a long one, without escape codes."""
        text = _ESCAPE_CODE.sub("", self.text(_LAST_LINE))
        return next((line.strip() for line in reversed(_LINE_END.split(text)) if line.strip()), "")

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
            while len(self._files) > 1:
                self._files.pop().close()


def _open_file(path: Path) -> BinaryIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        msg = f"console_logs: {path} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error

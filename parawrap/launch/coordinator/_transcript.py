"""The output of ranks: kept for `Launch.logs`, written to log files, and printed line by line with the rank in front.

Used by the thread that watches a launch. Any thread may call `Transcript.text`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import threading
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from parawrap.displays import last_shown_line
from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform
from parawrap.launch.coordinator._printer import Lines, Printer
from parawrap.launch.messages._last_words import last_words_of

__all__ = ["Record", "Transcript", "new_log_folder"]

_log = logging.getLogger("parawrap.launch")

_IN_MEMORY = 1 << 20  # bytes per rank; most ranks write less
_LAST_LINE = 1 << 16  # bytes of output that are searched for the last line
_SEARCHED = 1 << 16  # the last bytes of the output, which are searched for a crash report


def new_log_folder(platform: Platform, name: str) -> Path | None:
    """Make the log folder of one launch under ``console_logs``. Return None if ``console_logs`` is not set.

    Args:
        platform: The launch's platform.
        name: The function's name. The folder's name consists of it and the time.

    Raises:
        LaunchError: If the folder cannot be made.
    """
    if platform.console_logs is None:
        return None
    readable = "".join(each if each.isalnum() else "-" for each in name).strip("-")
    folder = Path(platform.console_logs).expanduser().absolute()
    prefix = f"{readable}-{datetime.now():%Y%m%d-%H%M%S-%f}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
    except OSError as error:
        msg = f"console_logs={str(platform.console_logs)!r} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error


class Record(Protocol):
    """Receives the output of one rank."""

    def write(self, stream: int, data: bytes) -> None:
        """Add output of stream 1 (standard output) or 2 (standard error)."""

    def record(self, text: str) -> None:
        """Add a text that the rank did not write. It is not printed."""

    def last_words(self, at_most: int) -> str:
        """Return the end of the output, in whole lines if possible, including the start of a crash report."""
        ...


class Transcript:
    """The output of one rank, from both streams, in order of arrival. Output beyond 1 MiB is kept on disk.

    Raises:
        LaunchError: If the log file cannot be opened.
    """

    def __init__(self, rank: int, *, printer: Printer | None, prefix: str = "", folder: Path | None = None) -> None:
        self._access = threading.Lock()
        self._printer = printer
        path = None if folder is None else folder / f"rank-{rank}.log"
        self._file = None if path is None else _TolerantFile(_open_file(path), str(path))
        self._spool = _Spool()
        self._words_from = 0
        self._kept = _TolerantFile(self._spool, f"the transcript of rank {rank}")
        self._lines = () if printer is None else (Lines(printer, prefix, "stdout"), Lines(printer, prefix, "stderr"))

    def write(self, stream: int, data: bytes) -> None:
        if self._file is not None:
            self._file.write(data)
        with self._access:
            start = self._spool.size
            self._kept.write(data)
            is_kept = self._spool.size == start + len(data)
        if self._printer is not None:
            lines = self._lines[stream - 1]
            if is_kept:  # read again when it is printed, so that output that waits for its reader takes no memory
                self._printer.add(lambda: lines.take(self._read(start, len(data))))
            else:
                self._printer.add(lambda: lines.take(data))

    def _read(self, start: int, size: int) -> bytes:
        with self._access:
            return self._spool.read_at(start, size)

    def record(self, text: str) -> None:
        data = f"{text}\n".encode(errors="backslashreplace")
        if self._file is not None:
            self._file.write(data)
        with self._access:
            self._kept.write(data)

    def text(self) -> str:
        """Return all output so far."""
        with self._access:
            return self._spool.read_at(0, self._spool.size).decode(errors="replace")

    def last_line(self) -> str:
        """Return the last line of output that is not blank, or the end of a long one, as a terminal shows it."""
        with self._access:
            end = self._end(_LAST_LINE)
        return last_shown_line(end.decode(errors="replace"))

    def leave_out(self) -> None:
        """Leave the output so far out of `last_words`."""
        with self._access:
            self._words_from = self._spool.size

    def last_words(self, at_most: int) -> str:
        with self._access:
            end = self._end(min(_SEARCHED, self._spool.size - self._words_from))
        return last_words_of(end.decode(errors="replace"), at_most)

    def _end(self, size: int) -> bytes:
        return self._spool.read_at(max(0, self._spool.size - size), size)

    def end_lines(self) -> None:
        """Add the unfinished last lines to the printer."""
        if self._printer is not None:
            for lines in self._lines:
                self._printer.add(partial(lines.take, b"", final=True))

    def finish(self) -> None:
        """Add the unfinished last lines to the printer, and close the log file. `text` still works."""
        self.end_lines()
        if self._file is not None:
            self._file.close()


def _open_file(path: Path) -> io.FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        msg = f"console_logs: {path} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error


class _TolerantFile:
    """A file that may be incomplete: on a full disk, log one warning and drop further output."""

    def __init__(self, file: Any, name: str) -> None:
        self._file = file
        self._name = name
        self._ended = False

    def write(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            while data:
                data = data[self._file.write(data) or 0 :]
        except OSError as error:
            self._ended = True
            _log.warning("%s ends here: %s", self._name, error)

    def close(self) -> None:
        self._ended = True
        with contextlib.suppress(OSError):
            self._file.close()

    def __del__(self) -> None:
        self.close()


class _Spool(io.BytesIO):
    """Bytes in memory, and in an unnamed file beyond `_IN_MEMORY`.

    Attributes:
        size: The number of bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._file: Any = None
        self._in_memory = 0
        self.size = 0

    def write(self, data: Any) -> int:
        if self._file is None and self.size + len(data) > _IN_MEMORY:
            self._in_memory = self.size
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        written = super().write(data) if self._file is None else int(self._file.write(data))
        self.size += written
        return written

    def read_at(self, start: int, size: int) -> bytes:
        """Return at most `size` bytes from this position on."""
        if self._file is None:
            return bytes(self.getbuffer()[start : start + size])
        head = bytes(self.getbuffer()[start : start + size])
        return head + os.pread(self._file.fileno(), size - len(head), max(0, start - self._in_memory))

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

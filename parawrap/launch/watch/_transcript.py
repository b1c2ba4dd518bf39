"""What ranks write: kept for `Launch.logs`, copied into files, and shown line by line behind the rank's number.

Used by the thread that watches a launch; `Transcript.text` by any.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import re
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol, TextIO

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform

__all__ = ["Record", "Transcript", "end_of", "open_log_folder"]

_log = logging.getLogger("parawrap.launch")

_IN_MEMORY = 1 << 20
_LONGEST_LINE = 1 << 16
_SEARCHED = 1 << 16  # bytes before the end in which the report of a crash may begin
_CRASH = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)  # the first line of faulthandler's report
_LEFT_OUT = "\n...\n"
_LINE_END = re.compile(r"(\r\n|\n|\r)")


def open_log_folder(platform: Platform) -> Path | None:
    """The folder of ``console_logs``, there and writable; None where the platform names none.

    Raises:
        LaunchError: it cannot be made, or not written to.
    """
    if platform.console_logs is None:
        return None
    folder = Path(platform.console_logs).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        msg = f"console_logs={str(platform.console_logs)!r} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error
    return folder


class Record(Protocol):
    """Where what one rank writes is taken to."""

    def write(self, stream: int, data: bytes) -> None:
        """Take what the rank wrote to this stream: 1 is standard output, 2 standard error."""

    def record(self, text: str) -> None:
        """Keep what the rank did not write itself, without showing it."""

    def last_words(self, at_most: int) -> str:
        """The end of it, in whole lines where that can be, behind what Python said of a crash."""
        ...


class Transcript:
    """All that one rank wrote, on both streams, in the order in which it arrived. Grows beyond memory onto the disk.

    Raises:
        LaunchError: the log file cannot be opened.
    """

    def __init__(self, rank: int, *, prefix: str, shown: bool, folder: Path | None) -> None:
        self._access = threading.Lock()
        path = None if folder is None else folder / f"rank-{rank}.log"
        self._file = None if path is None else _Keeper(_opened(path), str(path))
        self._spool = _Spool()
        self._kept = _Keeper(self._spool, f"the transcript of rank {rank}")
        self._lines = {1: _Lines(prefix, "stdout"), 2: _Lines(prefix, "stderr")} if shown else {}

    def write(self, stream: int, data: bytes) -> None:
        """Take what the rank wrote to this stream: 1 is standard output, 2 standard error."""
        if stream in self._lines:
            self._lines[stream].take(data)
        if self._file is not None:
            self._file.write(data)
        with self._access:
            self._kept.write(data)

    def record(self, text: str) -> None:
        """Keep what the rank did not write itself, without showing it."""
        data = f"{text}\n".encode()
        if self._file is not None:
            self._file.write(data)
        with self._access:
            self._kept.write(data)

    def text(self) -> str:
        """Everything so far."""
        with self._access:
            return self._spool.everything().decode(errors="replace")

    def last_words(self, at_most: int) -> str:
        with self._access:
            end = self._spool.end(_SEARCHED)
        return end_of(end.decode(errors="replace"), at_most)

    def finish(self) -> None:
        """Nothing more will come; `text` goes on working."""
        for lines in self._lines.values():
            lines.finish()
        if self._file is not None:
            self._file.close()


def end_of(text: str, at_most: int) -> str:
    """The end of a text, in whole lines where that can be.

    Where a crash is beyond it, because of the stacks that follow, a quarter of the room is for what led up to that.
    """
    if len(text) <= at_most:
        return text
    crash = _CRASH.search(text)
    if crash is None or crash.start() >= len(text) - at_most:
        return _end_of(text, at_most)
    head = _end_of(text[: crash.end()], max(at_most // 4, len(crash[0]))) + _LEFT_OUT
    return head + _end_of(text, at_most - len(head))


def _end_of(text: str, at_most: int) -> str:
    end = text[max(0, len(text) - at_most) :]
    _, newline, rest = end.partition("\n")
    return rest if newline and len(end) < len(text) else end


def _opened(path: Path) -> io.FileIO:
    try:
        return path.open("wb", buffering=0)
    except OSError as error:
        msg = f"console_logs: {path} cannot be written to: {error}; give another folder, or None"
        raise LaunchError(msg) from error


class _Keeper:
    """A file that takes what it can: a full disk ends what is kept, which is told once, and not the launch."""

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
    """Bytes in memory, and from a certain size on in a file without a name and without a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self._file: Any = None

    def write(self, data: Any) -> int:
        if self._file is None and self.tell() + len(data) > _IN_MEMORY:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        return super().write(data) if self._file is None else int(self._file.write(data))

    def everything(self) -> bytes:
        if self._file is None:
            return self.getvalue()
        size = self._file.seek(0, io.SEEK_END)
        return self.getvalue() + os.pread(self._file.fileno(), size, 0)

    def end(self, size: int) -> bytes:
        """The last bytes, so many at the most."""
        if self._file is None:
            return self.getvalue()[-size:]
        length = self._file.seek(0, io.SEEK_END)
        return (self.getvalue() + os.pread(self._file.fileno(), size, max(0, length - size)))[-size:]

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()


class _Lines:
    """Cuts a stream into lines, ended by a newline or (progress bars) a carriage return, and writes each in one piece."""

    def __init__(self, prefix: str, stream: str) -> None:
        self._prefix = prefix
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""
        self._returned = False

    def take(self, data: bytes, *, final: bool = False) -> None:
        text = self._begun + self._decoder.decode(data, final)
        if self._returned and text.startswith("\n"):  # the second half of a line end, whose first half was shown before
            self._write("\n")
            text = text[1:]
        *lines, self._begun = _LINE_END.split(text)
        shown = [line + end for line, end in zip(lines[::2], lines[1::2], strict=True)]
        if self._begun and (final or len(self._begun) > _LONGEST_LINE):
            shown.append(self._begun + "\n")
            self._begun = ""
        if text:
            self._returned = text.endswith("\r")
        self._write("".join(self._prefix + line for line in shown))

    def finish(self) -> None:
        self.take(b"", final=True)

    def _write(self, text: str) -> None:
        target: TextIO | None = getattr(sys, self._stream)  # looked up each time: notebooks and tests put others there
        if not text or target is None:
            return
        with contextlib.suppress(Exception):  # nobody reads on, or it was closed; the transcript has it all
            encoding = getattr(target, "encoding", None) or "utf-8"
            target.write(text.encode(encoding, "backslashreplace").decode(encoding))
            target.flush()

"""What ranks write: kept for `Launch.logs`, copied into files, and shown line by line behind the rank's number.

Used by the thread that watches a launch; `Transcript.text` by any.
"""

from __future__ import annotations

import codecs
import contextlib
import logging
import sys
import tempfile
import threading
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform

__all__ = ["Transcript", "open_log_folder"]

_log = logging.getLogger("parawrap.launch")

_IN_MEMORY = 1 << 20
_LONGEST_LINE = 1 << 16


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


class Transcript:
    """All that one rank wrote, on both streams, in the order in which it arrived. Grows beyond memory onto the disk."""

    def __init__(self, rank: int, *, prefix: str, shown: bool, folder: Path | None) -> None:
        self._kept = cast("BinaryIO", tempfile.SpooledTemporaryFile(_IN_MEMORY))  # noqa: SIM115
        self._access = threading.Lock()
        self._path = None if folder is None else folder / f"rank-{rank}.log"
        self._file: BinaryIO | None = None if self._path is None else self._path.open("wb")
        self._lines = {1: _Lines(prefix, "stdout"), 2: _Lines(prefix, "stderr")} if shown else {}

    def write(self, stream: int, data: bytes) -> None:
        """Take what the rank wrote to this stream: 1 is standard output, 2 standard error."""
        with self._access:
            self._kept.write(data)
        if stream in self._lines:
            self._lines[stream].take(data)
        if self._file is not None:
            try:
                self._file.write(data)
                self._file.flush()
            except OSError as error:  # a full disk costs the file, not the launch
                _log.warning("%s ends here: %s", self._path, error)
                self._close_file()

    def text(self) -> str:
        """Everything so far."""
        with self._access:
            self._kept.seek(0)
            data = self._kept.read()
            self._kept.seek(0, 2)
        return data.decode(errors="replace")

    def last_words(self, at_most: int) -> str:
        """The end of it, in whole lines where that can be."""
        text = self.text()
        _, newline, rest = text[-at_most:].partition("\n")
        return text if len(text) <= at_most else rest if newline else text[-at_most:]

    def finish(self) -> None:
        """Nothing more will come; `text` goes on working."""
        for lines in self._lines.values():
            lines.finish()
        self._close_file()

    def __del__(self) -> None:
        self._kept.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


class _Lines:
    """Cuts a stream into lines, ended by a newline or (progress bars) a carriage return, and writes each in one piece."""

    def __init__(self, prefix: str, stream: str) -> None:
        self._prefix = prefix
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = ""

    def take(self, data: bytes) -> None:
        pieces = (self._begun + self._decoder.decode(data)).splitlines(keepends=True)
        self._begun = pieces.pop() if pieces and not pieces[-1].endswith(("\n", "\r")) else ""
        if len(self._begun) > _LONGEST_LINE:
            pieces.append(self._begun + "\n")
            self._begun = ""
        self._show(pieces)

    def finish(self) -> None:
        if self._begun:
            self._show([self._begun + "\n"])
            self._begun = ""

    def _show(self, lines: list[str]) -> None:
        target: TextIO | None = getattr(sys, self._stream)  # looked up each time: notebooks and tests put others there
        if not lines or target is None:
            return
        with contextlib.suppress(OSError, ValueError):  # nobody reads on, or it was closed; the transcript has it all
            target.write("".join(self._prefix + line for line in lines))
            target.flush()

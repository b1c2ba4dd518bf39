"""The journal of a launch: a growing file with reports from the first node to the submitting process.

On a network file system, other machines see an entry only after fsync.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from parawrap.errors import LaunchError
from parawrap.launch.coordinator._transcript import end_of
from parawrap.launch.messages._private_files import open_private

__all__ = ["Journal", "JournalReader", "JournalRecord", "LogsIntoJournal"]

_HEAD = struct.Struct("<Q")
_PAUSE_S = 0.1  # between two calls of fsync, to limit the load from frequent output
_PIECE = 1 << 22
_KEPT = 1 << 16
_MOST_WAITING = 512

Entry = tuple[Any, ...]


class Journal:
    """Writes journal entries. Thread-safe. A slow disk blocks the writers. After `close`, all entries are in the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._entries: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._error: OSError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write, name="parawrap-journal", daemon=True)
        self._thread.start()

    def add(self, *entry: Any) -> None:
        """Queue an entry for writing.

        Raises:
            LaunchError: If the file cannot be written.
        """
        if self._error is not None:
            msg = f"{self._path} cannot be written: {self._error}"
            raise LaunchError(msg) from self._error
        data = pickle.dumps(entry)
        self._entries.put(_HEAD.pack(len(data)) + data)

    def close(self) -> None:
        """Write the queued entries and close the file."""
        self._entries.put(None)
        self._closing.set()
        self._thread.join()

    def _write(self) -> None:
        with self._file as file:
            while (entries := self._next_entries())[-1] is not None:
                self._append(file, entries)
                self._closing.wait(_PAUSE_S)
            self._append(file, entries[:-1])

    def _append(self, file: BinaryIO, entries: Sequence[bytes | None]) -> None:
        try:
            if self._error is None:
                file.write(b"".join(filter(None, entries)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._error = error

    def _next_entries(self) -> list[bytes | None]:
        """Wait for an entry and return all queued entries. None marks the end."""
        entries = [self._entries.get()]
        while entries[-1] is not None and not self._entries.empty():
            entries.append(self._entries.get())
        return entries


class JournalReader:
    """Reads a journal while it is written, from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = b""
        self._position = 0

    def new_entries(self) -> list[Entry]:
        """Return the complete entries since the last call."""
        with open_private(self._path) as file:
            file.seek(self._position)
            while data := file.read(_PIECE):
                self._read += data
                self._position += len(data)
        entries, at = [], 0
        while len(self._read) >= (start := at + _HEAD.size) and len(self._read) >= (end := start + self._length_at(at)):
            entries.append(pickle.loads(self._read[start:end]))
            at = end
        self._read = self._read[at:]
        return entries

    def _length_at(self, position: int) -> int:
        return int(_HEAD.unpack_from(self._read, position)[0])


class JournalRecord:
    """Writes one rank's output to a journal. Has the same interface as `Transcript`."""

    def __init__(self, journal: Journal, rank: int) -> None:
        self._journal = journal
        self._rank = rank
        self._end = b""

    def write(self, stream: int, data: bytes) -> None:
        self._end = (self._end + data)[-_KEPT:]
        self._journal.add("output", self._rank, stream, data)

    def record(self, text: str) -> None:
        self._journal.add("record", self._rank, text)

    def last_words(self, at_most: int) -> str:
        return end_of(self._end.decode(errors="replace"), at_most)


class LogsIntoJournal(logging.Handler):
    """Writes the node's log records to a journal. The submitting process logs them."""

    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._journal.add("log", record.levelno, self.format(record))
        except Exception:  # noqa: BLE001 (the code that logs must not fail)
            self.handleError(record)

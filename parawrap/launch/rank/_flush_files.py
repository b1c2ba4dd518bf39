"""Write the buffers of files that a rank's function left open, as the end of an interpreter does.

Nothing else is finalized, because unloading torch takes 0.1 s.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import stat
import sys
import threading
import zipfile
from typing import Any

from parawrap.launch._private_names import TEMPORARY_FILE

__all__ = ["flush_files"]

WAIT_S = 10.0  # a pipe that no process reads blocks for ever
_FILE: Any = io.TextIOWrapper.__mro__[-2]  # the base of all classes of files; checks with io.IOBase itself are slow
_WITHOUT_BUFFER = (io.FileIO, io.BufferedReader, io.BytesIO, io.StringIO)


def flush_files() -> None:
    """Write the buffers of all open files but the standard streams, for at most `WAIT_S`.

    Report files that remain incomplete on standard error.

    Files that were open when this process was forked are left out, because they belong to its parent: they are frozen, and
    the garbage collector does not list frozen objects.
    """
    flushed = {id(each) for stream in (sys.stdout, sys.stderr) for each in (stream, getattr(stream, "buffer", None))}
    files = [each for each in gc.get_objects() if issubclass(type(each), (_FILE, zipfile.ZipFile, TEMPORARY_FILE))]
    pending = [each for each in files if not issubclass(type(each), _WITHOUT_BUFFER) and id(each) not in flushed]
    if not pending:
        return
    pending.sort(key=lambda file: (_may_block(file), -_distance_from_disk(file)))
    writing = threading.Thread(target=_write, args=(pending,), name="parawrap-flush", daemon=True)
    try:
        writing.start()
    except RuntimeError:  # the limit on threads
        _write(pending)
    else:
        writing.join(WAIT_S)
    if pending:
        _report(pending[0], f"its buffer was not written in {WAIT_S:g} s", set())


def _may_block(file: Any) -> bool:
    """True for pipes, sockets, and terminals. They come last, so that a blocked one does not keep others from the disk."""
    with contextlib.suppress(Exception):  # closed, or without a descriptor
        return not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    return False


def _distance_from_disk(file: Any) -> int:
    """Return the number of kinds of files that this one may write into."""
    if isinstance(file, (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)):
        return 0
    return 3 if isinstance(file, io.TextIOWrapper) else 1 if isinstance(file, zipfile.ZipFile) else 2


def _write(pending: list[Any]) -> None:
    """Write the buffers of these files, and remove each from the list afterwards."""
    reported: set[str] = set()  # a text file and the binary file below it fail alike
    while pending:
        try:
            _write_one(pending[0])
        except BaseException as error:  # noqa: BLE001 (classes of files may raise anything)
            _report(pending[0], f"{type(error).__name__}: {error}", reported)
        del pending[0]


def _write_one(file: Any) -> None:
    try:
        is_closed = isinstance(file, _FILE) and file.closed
    except ValueError:  # detached, or never opened
        return
    if is_closed:
        return
    if _distance_from_disk(file) in (0, 3):
        file.flush()
    else:
        file.close()  # compressed files end with a checksum, and temporary files are removed


def _report(file: Any, why: str, reported: set[str]) -> None:
    with contextlib.suppress(Exception):
        name = getattr(file, "name", None) or getattr(file, "filename", None) or type(file).__qualname__
        msg = f"the file {name!r}, which the function left open, is incomplete: {why}. Close it in the function\n"
        if msg not in reported:
            reported.add(msg)
            sys.stderr.write(msg)
            sys.stderr.flush()

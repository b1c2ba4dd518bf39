"""Exceptions on their way from a rank to the parent: kept in type, with the traceback they had there as text.

A pickled exception loses its traceback, and many cannot be pickled: their ``__init__`` takes other arguments than they
keep, or they hold a lock. The pickler (`_exceptions`) has them rebuilt from class, ``args`` and attributes.
"""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from types import TracebackType

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch.parcels._packing import packed, unpack

__all__ = ["add_note", "is_echo", "pack_exception", "summary_of", "traceback_of"]

# What gloo, NCCL and the store say when the rank at the other end is gone.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|remote process exited|"
    r"socket closed|failed to recv|nccl .*(abort|remote)|peer .*(closed|exited)",
    re.IGNORECASE,
)
_LONGEST_CHAIN = 20


def pack_exception(error: BaseException) -> int:
    """A file that holds the exception, or, where it cannot even be rebuilt in this process, a stand-in that tells of it."""
    with contextlib.suppress(Exception):  # whatever a class does on its way
        file = packed(error, "exception", type(error).__qualname__)
        with contextlib.suppress(Exception):
            if type(unpack(file)) is type(error):
                return file
        os.close(file)
    return packed(LaunchError(f"an exception that cannot be sent: {summary_of(error)}"), "exception", "the stand-in")


def summary_of(error: BaseException) -> str:
    """The line of its traceback that names it."""
    lines = [line.strip() for line in traceback.format_exception_only(error)]
    name = type(error).__qualname__
    return next((line for line in lines if line.partition(":")[0].endswith(name)), lines[0])


def traceback_of(error: BaseException, *without: str) -> str:
    """The whole traceback as text, from the first frame that lies in none of these files."""
    return "".join(traceback.format_exception(type(error), error, _below(error.__traceback__, without))).rstrip()


def _below(trace: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return trace


def add_note(error: BaseException, note: str) -> None:
    """``error.add_note``, also where the class lets nobody set an attribute."""
    try:
        error.add_note(note)
    except Exception:  # noqa: BLE001 (whatever its __setattr__ raises)
        error.__dict__.setdefault("__notes__", []).append(note)


def is_echo(error: BaseException) -> bool:
    """Whether it only tells that another rank is gone, or was raised because of an exception that does.

    Such an exception is what comes of a failure, not what it came from.
    """
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return False
        if isinstance(link, (RuntimeError, OSError, dist.DistError)) and _ECHO.search(summary_of(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False

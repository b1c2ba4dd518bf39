"""Send exceptions from a rank to the launching process. They keep their type, and their traceback arrives as text.

A pickled exception loses its traceback. Many exceptions cannot be pickled: their ``__init__`` takes arguments that they do
not store, or they hold a lock. `_exceptions` rebuilds them from class, ``args``, and attributes.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
import traceback
from typing import Any

import torch.distributed as dist

from parawrap.backends import user_frames
from parawrap.errors import LaunchError, add_note
from parawrap.launch.messages._pickle_values import packed, unpack

__all__ = ["add_note", "description_of", "is_echo", "pack_exception", "summary_of", "traceback_of"]

# Messages of gloo, NCCL, and the store about a lost connection to another rank.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|remote process exited|"
    r"socket closed|failed to recv|nccl .*(abort|remote)|peer .*(closed|exited)",
    re.IGNORECASE,
)
_LONGEST_CHAIN = 20  # causes and contexts; a chain may be a circle


def pack_exception(error: BaseException) -> int:
    """Return a file with the exception. If it cannot be rebuilt, the file has a LaunchError that describes it."""
    with contextlib.suppress(Exception):  # classes may raise anything
        file = packed(error, "exception", type(error).__qualname__)
        with contextlib.suppress(Exception):
            if type(unpack(file)) is type(error):
                return file
        os.close(file)
    return packed(LaunchError(f"an exception that cannot be pickled: {summary_of(error)}"), "exception", "the stand-in")


def summary_of(error: BaseException) -> str:
    """Return the line of the traceback that names the exception."""
    lines = [line.strip() for line in traceback.format_exception_only(error)]
    name = type(error).__qualname__
    return next((line for line in lines if line.partition(":")[0].endswith(name)), lines[0])


def traceback_of(error: BaseException) -> str:
    """Return the traceback as text, from its first frame outside parawrap on; all of it without such a frame."""
    trace = user_frames(error.__traceback__) or error.__traceback__
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def description_of(error: BaseException) -> dict[str, Any]:
    """Return what the launching process shows of an exception, if it cannot unpickle it, and the time."""
    return {
        "at": time.time(),
        "summary": summary_of(error),
        "traceback": traceback_of(error),
        "is_echo": is_echo(error),
    }


def is_echo(error: BaseException) -> bool:
    """True if the exception, or one in its chain of causes, reports a lost connection to another rank.

    Such an exception is a consequence of another rank's end, not the original failure.
    """
    link: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if link is None:
            return False
        if isinstance(link, (RuntimeError, OSError, dist.DistError)) and _ECHO.search(summary_of(link)):
            return True
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return False

"""Exceptions on their way from a rank to the parent: kept in type, with the traceback they had there as text.

A pickled exception loses its traceback, and many cannot be pickled: their ``__init__`` takes other arguments than they
keep, or they hold a lock. Such ones are rebuilt from their class, ``args`` and attributes, without ``__init__``.
"""

from __future__ import annotations

import os
import re
import traceback
from types import TracebackType
from typing import Any

import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._packing import memory_file, pack, unpack

__all__ = ["is_echo", "pack_exception", "summary_of", "traceback_of"]

# What gloo, NCCL and the store say when the rank at the other end is gone.
_ECHO = re.compile(
    r"connection (was )?(closed|reset|refused)|connection closed by peer|broken pipe|remote process exited|"
    r"socket closed|failed to recv|nccl .*(abort|remote)|peer .*(closed|exited)",
    re.IGNORECASE,
)


def pack_exception(error: BaseException) -> int:
    """A file that holds the exception; the most of it that can be sent and rebuilt."""
    for value in (error, _Rebuilt(error), _Rebuilt(error, without_state=True)):
        file = memory_file("exception")
        try:
            pack(value, file, type(error).__qualname__)
            if type(unpack(file)) is type(error):
                return file
        except Exception:  # noqa: BLE001 (whatever a class does on its way: the next form is tried)
            pass
        os.close(file)
    file = memory_file("exception")
    pack(LaunchError(f"an exception that cannot be sent: {summary_of(error)}"), file, "the stand-in")
    return file


class _Rebuilt:
    """Pickles as an exception of the same class with the same args, made without its ``__init__``."""

    def __init__(self, error: BaseException, *, without_state: bool = False) -> None:
        state = {"__notes__": getattr(error, "__notes__", [])} if without_state else dict(error.__dict__)
        args = tuple(map(str, error.args)) if without_state else error.args
        self._parts = (type(error), args, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self._parts


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(state)
    return error


def summary_of(error: BaseException) -> str:
    """The last line of its traceback."""
    return traceback.format_exception_only(error)[0].strip()


def traceback_of(error: BaseException, *without: str) -> str:
    """The whole traceback as text, from the first frame that lies in none of these files."""
    return "".join(traceback.format_exception(type(error), error, _below(error.__traceback__, without))).rstrip()


def _below(trace: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in files:
        trace = trace.tb_next
    return trace


def is_echo(error: BaseException) -> bool:
    """Whether the exception only tells that another rank is gone: what comes of a failure, not what it came from."""
    return isinstance(error, (RuntimeError, OSError, dist.DistError)) and bool(_ECHO.search(str(error)))

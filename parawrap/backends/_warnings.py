"""Warnings and tracebacks that point at the user's line instead of a line in parawrap."""

from __future__ import annotations

import concurrent.futures
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
import wrapt


def _folder_of(file: str | Path) -> str:
    # With the separator, as "/site-packages/torch" is a prefix of "/site-packages/torchvision" too
    return f"{Path(file).parent}{os.sep}"


_PARAWRAP = _folder_of(Path(__file__).parent)
_TORCH = _folder_of(torch.__file__)
_FUTURES = _folder_of(concurrent.futures.__file__)
_WRAPT = _folder_of(wrapt.__file__)


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the innermost frame outside parawrap, torch, and wrapt."""
    # By hand, since `skip_file_prefixes` of `warnings.warn` needs Python 3.12. For `warn`, level 1
    # is this function, and level 2 its caller
    level = 2
    frame = sys._getframe(1)
    inside = (_PARAWRAP, _TORCH, _WRAPT)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


def user_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without its first frames in parawrap; None if all are in parawrap.

    Frames of wrapt, and of concurrent.futures, which hands exceptions from thread to thread, count
    as parawrap's.
    """
    inside = (_PARAWRAP, _FUTURES, _WRAPT)
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(inside):
        trace = trace.tb_next
    return trace


def drop_own_frames(error: BaseException) -> None:
    """Let a traceback start at its first frame outside parawrap.

    If there is none, keep the innermost frame.
    """
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    shown = user_frames(error.__traceback__) or innermost
    error.with_traceback(shown)  # not an assignment: a class of the user's may refuse it


@contextmanager
def ignore_speed_warnings() -> Iterator[None]:
    """Ignore the warnings about slow calls in blocks that parawrap itself opens."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"a call of \d+ rows on \d+ lanes .*, because the sizes")
        warnings.filterwarnings("ignore", "a model in eval mode is called with gradients enabled")
        yield

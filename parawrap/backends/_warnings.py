"""Warnings that point at the user's line instead of a line in parawrap or torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

__all__ = ["ignore_speed_warnings", "warn_caller"]

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the innermost frame outside parawrap and torch."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level + 1)


@contextmanager
def ignore_speed_warnings() -> Iterator[None]:
    """Run the block without warnings about the speed of blocks that parawrap itself opens."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"a call of \d+ rows on \d+ lanes .*, because the sizes")
        warnings.filterwarnings("ignore", "a model in eval mode is called with gradients enabled")
        yield

"""Warnings that point at the user's line instead of a line in parawrap or torch."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

__all__ = ["warn_caller"]

_OURS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def warn_caller(message: str) -> None:
    """Issue a UserWarning at the innermost frame outside parawrap and torch."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level + 1)

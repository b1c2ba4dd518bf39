"""Ids of parametrized tests."""

from __future__ import annotations

import re


def short_repr(value):
    """Return the repr without addresses, which differ between the workers of pytest-xdist."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))

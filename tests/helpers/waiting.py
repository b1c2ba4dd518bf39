"""Wait for an event that must happen."""

from __future__ import annotations

import time

PATIENCE_S = 120.0
"""Upper limit for an event that must happen: ten times what a quiet machine needs.

It does not measure speed.
"""


def eventually(condition, event, patience_s=PATIENCE_S):
    """Wait until `condition()` is true and return its value; fail after `patience_s` and name the
    event.
    """
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {patience_s} seconds: {event}"
        time.sleep(0.01)
    return value

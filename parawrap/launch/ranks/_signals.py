"""Signals that a cluster sends to every process of a job, when it is about to end it.

What they mean for ranks is for their node's keeper to say. The processes that it starts are to ignore them from their first
moment; so it starts them with these signals blocked, and that is how they know.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FROM_CLUSTER", "heed_signals", "not_for_children"]

FROM_CLUSTER = (signal.SIGUSR2, signal.SIGTERM)


@contextmanager
def not_for_children() -> Iterator[None]:
    """What this thread starts meanwhile ignores these signals; this process gets those that come, a moment later."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_CLUSTER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_CLUSTER)


def heed_signals() -> None:
    """At the start of a process: block none, whatever its starter had blocked; but ignore what is for keepers."""
    if signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        for number in FROM_CLUSTER:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

"""Signals that a cluster sends to every process of a job that it is about to end.

The node's task handles them for its ranks. The processes that it starts must ignore them from the beginning. So they start
with these signals blocked, which also tells them apart from other processes.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["FROM_CLUSTER", "heed_signals", "not_for_children"]

FROM_CLUSTER = (signal.SIGUSR2, signal.SIGTERM)


@contextmanager
def not_for_children() -> Iterator[None]:
    """Block the signals, so that processes started in the block ignore them. This process gets them after the block."""
    signal.pthread_sigmask(signal.SIG_BLOCK, FROM_CLUSTER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FROM_CLUSTER)


def heed_signals() -> None:
    """Unblock all signals at the start of a process. If the cluster's signals were blocked, ignore them from now on."""
    if signal.SIGUSR2 in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        for number in FROM_CLUSTER:
            signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

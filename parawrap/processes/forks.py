"""Descriptors that a fork of this process must not inherit: those of connections to ranks.

If a forked child holds a copy of this end of a connection, the rank does not see that this process
has ended. If it holds a copy of the rank's end, this process does not see that the rank has ended.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from types import TracebackType
from typing import Protocol


class Closable(Protocol):
    """A connection."""

    def close(self) -> None:
        """Close it."""


class _Handover:
    """A lock, held from the making of descriptors for another process until they are closed here.

    Forks of this process take it too, so a child that another thread forks inherits none of these
    descriptors. Programs that `subprocess` starts inherit none anyway: exec closes them.

    The lock is reentrant, because a signal handler that runs inside the block may fork. Such a
    child closes the descriptors that were noted.

    A handler that raises just after `acquire`, or before `release`, would leave the lock taken. So
    the main thread enters a block only while it holds signals back (`HeldSignals`).
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        # One list per open block: a signal handler that runs inside a block may begin another one
        self._in_transit: list[list[int]] = []

    def __enter__(self) -> list[int]:
        """Return the list for the descriptors that this process closes before the block ends."""
        self._lock.acquire()
        files: list[int] = []
        self._in_transit.append(files)
        return files

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # In this order: after the release, the last list may be that of another thread
        self._in_transit.pop()
        self._lock.release()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_in_parent(self) -> None:
        self._lock.release()

    def after_fork_in_child(self) -> None:
        for files in self._in_transit:
            for file in files:
                with contextlib.suppress(OSError):  # the parent had closed it
                    os.close(file)
            files.clear()
        # the only thread of the child is the one that forked, and has acquired the lock
        self._lock.release()


handover = _Handover()
"""Enter it, make descriptors, add those that are closed here to the list, send them, close them."""

# Weak, so that a connection that is dropped without `close` frees its descriptor as usual
_closed_in_children: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_forked_children(connection: Closable) -> None:
    """Close a connection in processes that the user forks from this one."""
    _closed_in_children.add(connection)


def _close_in_child() -> None:
    for connection in list(_closed_in_children):
        connection.close()
    _closed_in_children.clear()


os.register_at_fork(
    before=handover.before_fork,
    after_in_parent=handover.after_fork_in_parent,
    after_in_child=handover.after_fork_in_child,
)
os.register_at_fork(after_in_child=_close_in_child)

"""The events of a pool of processes: readable files, timers, and actions of other threads.

::

    thread of the pool ── turn ───────────► posted actions, status, control, and output of the ranks
                                            └─► answers, unless they are lent
    a caller ──────────── turn_of_caller ─► answers, while they are lent to it

"The answers" are the data wires on which ranks answer. They have a selector of their own, so that
lending them to the thread of a caller takes one step.

Both threads run timers that are due. All handlers run under `lock`. No wait is without a deadline.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from parawrap.processes.wire import Wire

NEVER = float("inf")
"""A time of the monotonic clock that does not come."""

_LONGEST_WAIT_S = 3600.0  # selectors reject very long timeouts

Act = Callable[[], object]


class _Waker:
    """A pipe that ends the wait of a selector. Any thread may call `wake`, also a signal handler.

    Nothing closes the pipe before the collector frees this object: a late `wake` must not write
    into another file that has got the number of a closed one.
    """

    file = _end = -1  # for `__del__`, if `os.pipe` fails

    def __init__(self) -> None:
        self.file, self._end = os.pipe()
        for file in (self.file, self._end):
            os.set_blocking(file, False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full: the selector wakes anyway
            os.write(self._end, b"!")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.file, 4096)

    def __del__(self) -> None:
        for file in (self.file, self._end):
            if file >= 0:
                os.close(file)


class Events:
    """The events of one pool.

    Attributes:
        lock: Held while an event is handled, and by any thread that changes the state of the pool.
        timers: When each action is due, by the monotonic clock. Two bound methods of one function
            and object are equal, so an action that is set again has one timer, with the new time.
        is_lent: True while a caller reads the answers.
    """

    def __init__(self) -> None:
        # Reentrant: `_handle_answers` is a handler, and takes it again
        self.lock = threading.RLock()
        self.timers: dict[Act, float] = {}
        self._posted: deque[Act] = deque()
        # When the wait of the thread of the pool ends at the latest; 0 once it was woken
        self._wakes_at = 0.0
        self._selector = selectors.DefaultSelector()
        # Any: epoll and kqueue have a descriptor, so that the other selector can watch this one
        self._answers: Any = selectors.DefaultSelector()
        self._waker, self._caller_waker = _Waker(), _Waker()
        self._selector.register(self._waker.file, selectors.EVENT_READ, self._run_posted)
        self._answers.register(
            self._caller_waker.file, selectors.EVENT_READ, self._caller_waker.clear
        )
        # The thread of the pool reads the answers first
        self.is_lent = True
        self.take_back()

    # Any thread

    def post(self, act: Act) -> None:
        """Run an action in the thread of the pool. After `close`, do nothing."""
        # In this order: the thread that wakes must find the action. `append` is atomic
        self._posted.append(act)
        self._waker.wake()

    def wake_caller(self) -> None:
        """End the wait of `turn_of_caller`."""
        self._caller_waker.wake()

    # Under the lock

    def wake_in_time(self) -> None:
        """Wake the thread of the pool if it would sleep past a timer that this thread has set."""
        first_due_at = min(self.timers.values(), default=NEVER)
        if first_due_at < self._wakes_at:
            self._wakes_at = 0.0  # no second wake before its next wait
            self._waker.wake()

    def watch(self, file: Any, act: Act) -> None:
        """Call `act` in the thread of the pool when a file or wire is readable."""
        self._selector.register(file, selectors.EVENT_READ, act)

    def watch_answers(self, wire: Wire, act: Act) -> None:
        """Call `act` when a wire is readable, in the thread that has the answers."""
        self._answers.register(wire, selectors.EVENT_READ, act)

    def forget(self, file: Any) -> None:
        """Stop watching a file or wire. Call this before it is closed."""
        self._selector_of(file).unregister(file)

    def update_watch(self, wire: Wire) -> None:
        """Call the action of a wire also when its socket has room, while the wire has unsent data.

        Call this after each change of `has_unsent`.
        """
        number = wire.fileno()
        if number < 0:  # the wire is closed
            return
        selector = self._selector_of(number)
        key = selector.get_key(number)
        wanted = selectors.EVENT_READ
        # Only while needed: a socket nearly always has room, which would end each wait at once
        if wire.has_unsent:
            wanted |= selectors.EVENT_WRITE
        if key.events != wanted:
            selector.modify(number, wanted, key.data)

    def lend(self) -> None:
        """Leave the answers to a caller."""
        if not self.is_lent:
            self.is_lent = True
            self._selector.unregister(self._answers)

    def take_back(self) -> None:
        """Have the thread of the pool read the answers again."""
        if self.is_lent:
            self.is_lent = False
            self._selector.register(self._answers, selectors.EVENT_READ, self._handle_answers)

    def _selector_of(self, file: Any) -> selectors.BaseSelector:
        return self._answers if file in self._answers.get_map() else self._selector

    # The thread of the pool, and a caller

    def turn(self, until: float = NEVER) -> None:
        """Wait for events until a time, handle them, and run the timers that are due."""
        self._handle(self._selector, until)

    def turn_of_caller(self) -> None:
        """Wait for answers, handle them, and run the timers that are due, in a caller's thread."""
        self._handle(self._answers, NEVER)

    def _handle_answers(self) -> None:
        self._handle(self._answers, 0.0)

    def _handle(self, selector: selectors.BaseSelector, until: float) -> None:
        wait_s = 0.0
        if until > 0:  # 0: handle the events that are ready, without a wait
            # Under the lock: a thread that sets a timer does so before this line reads the timers,
            # or finds `_wakes_at` in `wake_in_time`
            with self.lock:
                due_at = min(until, min(self.timers.values(), default=NEVER))
                if selector is self._selector:
                    self._wakes_at = due_at
            wait_s = min(max(0.0, due_at - time.monotonic()), _LONGEST_WAIT_S)
        ready = selector.select(wait_s)
        with self.lock:
            files = selector.get_map()
            for key, _ in ready:
                # An earlier handler may have closed the file, and a new file may have its number
                current = files.get(key.fd)
                if current is not None and current.data is key.data:
                    key.data()
            now = time.monotonic()
            for act, at in list(self.timers.items()):
                # An earlier action may have deleted or changed the timer
                is_unchanged = self.timers.get(act) == at
                if is_unchanged and now >= at:
                    del self.timers[act]
                    act()

    def _run_posted(self) -> None:
        self._waker.clear()  # first: `post` of a later action then writes to the pipe again
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Close the selectors, and drop all actions: each refers to the pool."""
        with self.lock:
            self.timers.clear()
            self._posted.clear()
            self._answers.close()
            self._selector.close()

"""The events of a pool of processes: readable files, timers, and actions of other threads.

::

    thread of the pool ── turn ───────────► posted actions, status, control, and output of the ranks
                                            └─► answers, unless they are lent
    a caller ──────────── turn_of_caller ─► answers, while they are lent to it

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
"""A time by the monotonic clock."""

_LONGEST_WAIT_S = 3600.0  # selectors reject very long timeouts

Act = Callable[[], object]


class _Waker:
    """A pipe that ends the wait of a selector. Any thread may call `wake`, also a signal handler.

    The pipe is closed with this object, and not before: a late `wake` must not write into a file
    that has got the number of a closed one.
    """

    file = _end = -1  # if the pipe cannot be made

    def __init__(self) -> None:
        self.file, self._end = os.pipe()
        for file in (self.file, self._end):
            os.set_blocking(file, False)

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full: the selector will wake
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
        timers: When each action is due, by the monotonic clock. A bound method is equal to itself,
            so an action that is set again has one timer, with the new time.
    """

    def __init__(self) -> None:
        # Reentrant: handlers run with it held, and one of them handles the answers, as `turn` does
        self.lock = threading.RLock()
        self.timers: dict[Act, float] = {}
        self._posted: deque[Act] = deque()
        # When the thread of the pool ends its wait, at the latest; 0 once it was woken
        self._wakes_at = 0.0
        self._selector = selectors.DefaultSelector()
        # epoll and kqueue can be watched themselves
        self._answers: Any = selectors.DefaultSelector()
        self._waker, self._caller_waker = _Waker(), _Waker()
        self._selector.register(self._waker.file, selectors.EVENT_READ, self._run_posted)
        self._answers.register(
            self._caller_waker.file, selectors.EVENT_READ, self._caller_waker.clear
        )
        self.is_lent = True  # so that this registers the answers: the thread of the pool begins
        self.take_back()

    # Any thread

    def post(self, act: Act) -> None:
        """Run an action in the thread of the pool. After `close`, do nothing."""
        self._posted.append(act)  # before the wake, and in one step of C
        self._waker.wake()

    def wake_caller(self) -> None:
        """End the turn of a caller."""
        self._caller_waker.wake()

    # Under the lock

    def wake_in_time(self) -> None:
        """Wake the thread of the pool if it would sleep past a timer that this thread has set."""
        first_due_at = min(self.timers.values(), default=NEVER)
        if first_due_at < self._wakes_at:
            self._wakes_at = 0.0  # it is woken once
            self._waker.wake()

    def watch(self, file: Any, act: Act) -> None:
        """Call `act` in the thread of the pool when a file is readable."""
        number = file if isinstance(file, int) else file.fileno()
        self._selector.register(number, selectors.EVENT_READ, act)

    def watch_answers(self, wire: Wire, act: Act) -> None:
        """Call `act` when a wire is readable, in the thread that has the answers."""
        self._answers.register(wire.fileno(), selectors.EVENT_READ, act)

    def forget(self, file: Any) -> None:
        """Watch a file no more. Call this before the file is closed."""
        number = file if isinstance(file, int) else file.fileno()
        self._selector_of(number).unregister(number)

    def update_watch(self, wire: Wire) -> None:
        """Call the action of a wire also when its socket has room, while something waits for it.

        Call this after each change of `has_unsent`.
        """
        number = wire.fileno()
        if number < 0:
            return
        selector = self._selector_of(number)
        key = selector.get_key(number)
        wanted = selectors.EVENT_READ
        if wire.has_unsent:  # always watched, it would end each wait at once
            wanted |= selectors.EVENT_WRITE
        if key.events != wanted:
            selector.modify(number, wanted, key.data)

    def lend(self) -> None:
        """Leave the answers to a caller."""
        if not self.is_lent:
            self.is_lent = True
            self._selector.unregister(self._answers)

    def take_back(self) -> None:
        """Have the thread of the pool read the answers."""
        if self.is_lent:
            self.is_lent = False
            self._selector.register(self._answers, selectors.EVENT_READ, self._handle_answers)

    def _selector_of(self, number: int) -> selectors.BaseSelector:
        return self._answers if number in self._answers.get_map() else self._selector

    # The thread of the pool, and a caller

    def turn(self, until: float = NEVER) -> None:
        """Wait for events until a time, handle them, and do what is due."""
        self._handle(self._selector, until)

    def turn_of_caller(self) -> None:
        """Do the same for the answers alone, in the thread of a caller."""
        self._handle(self._answers, NEVER)

    def _handle_answers(self) -> None:
        self._handle(self._answers, 0.0)

    def _handle(self, selector: selectors.BaseSelector, until: float) -> None:
        wait_s = 0.0
        if until > 0:  # 0: handle what is ready, and return
            with self.lock:  # so that `wake_in_time` sees either no sleep or all of it
                due_at = min(until, min(self.timers.values(), default=NEVER))
                if selector is self._selector:
                    self._wakes_at = due_at
            wait_s = min(max(0.0, due_at - time.monotonic()), _LONGEST_WAIT_S)
        ready = selector.select(wait_s)
        with self.lock:
            files = selector.get_map()
            for key, _ in ready:
                # An earlier handler may have closed the file, and its number may have another one
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
        self._waker.clear()  # first: an action that is posted meanwhile wakes again
        while self._posted:
            self._posted.popleft()()

    def close(self) -> None:
        """Forget everything, so that nothing refers to the pool from here."""
        with self.lock:
            self.timers.clear()
            self._posted.clear()
            self._answers.close()
            self._selector.close()

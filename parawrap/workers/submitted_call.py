"""A whole call that `submit` sends to a worker, and its future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any

from parawrap.processes.events import NEVER
from parawrap.processes.held_signals import HeldSignals, do_nothing
from parawrap.workers.worker_lanes import WorkerCall, WorkerLanes


class _WorkerFuture(Future[Any]):
    """A future. The thread that waits in `result` receives the answer, without another thread."""

    def __init__(self, lanes: WorkerLanes) -> None:
        super().__init__()
        self._lanes = lanes
        self.has_callbacks = False
        self.is_ended = False  # `done` takes a lock, which Ctrl-C in this thread could keep

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self.is_ended = True  # no answer comes. A thread in `result` looks within a second
        return is_cancelled

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        # Before the callback is added: the thread that ends the call reads the flag, and leaves
        # the future to the receiving thread
        self.has_callbacks = True
        super().add_done_callback(fn)
        if not self.done() and self._lanes.are_here:
            self._lanes.receive_for_futures(at_once=True)

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._receive(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._receive(timeout))

    def _receive(self, timeout: float | None) -> float | None:
        """Receive until the answer has arrived, or the time is over. Return the seconds left."""
        until = NEVER if timeout is None else monotonic() + timeout
        lanes = self._lanes
        if not self.is_ended and lanes.are_here:  # a forked child has no workers
            if lanes.is_receiver:
                # In its own callbacks it is done, and not ended. Here Ctrl-C keeps no lock
                lanes.wait_in_callback(self.done, until)
            elif not self.has_callbacks:  # else the receiver ends it
                lanes.wait(lambda: self.is_ended, until)
        return None if timeout is None else max(0.0, until - monotonic())


class SubmittedCall(WorkerCall):
    """A whole call with a future.

    `finish` takes the output of the worker, and returns the caller's.
    """

    __slots__ = ("_finish", "future")

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        finish: Callable[[Any, WorkerCall], Any],
        lanes: WorkerLanes,
    ) -> None:
        super().__init__(args, kwargs)
        self._finish = finish
        self.future = _WorkerFuture(lanes)

    def begin(self) -> bool:
        # Ctrl-C may have come between an earlier `begin` and the next step of its caller
        if self.future.running():
            return True
        try:
            return self.future.set_running_or_notify_cancel()
        except RuntimeError:  # cancelled, and those who wait were notified
            return False

    @property
    def has_callbacks(self) -> bool:
        return self.future.has_callbacks

    def end(self) -> None:
        held = HeldSignals(wake=do_nothing)  # the future must not stay half resolved
        try:
            self._resolve()
        finally:
            self.future.is_ended = True
            held.end()

    def _resolve(self) -> None:
        if self.future.cancel():  # it was cancelled before, or its lanes ended before it was sent
            # Notifies concurrent.futures.wait, which would wait forever otherwise
            with suppress(RuntimeError):  # `begin` has notified them
                self.future.set_running_or_notify_cancel()
            return
        try:
            output = self._finish(self.load(), self)
        except BaseException as error:  # noqa: BLE001 (the reader of the future gets it)
            self.future.set_exception(error.with_traceback(None))  # its frames refer to the future
        else:
            self.future.set_result(output)

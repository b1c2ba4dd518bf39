"""A whole call that `submit` sends to a worker, and its future."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from time import monotonic
from typing import Any

from parawrap.processes.events import NEVER
from parawrap.workers.worker_lanes import WorkerCall, WorkerLanes


class _WorkerFuture(Future[Any]):
    """A future. The thread that waits in `result` receives the answer, without another thread."""

    def __init__(self, lanes: WorkerLanes) -> None:
        super().__init__()
        self._lanes = lanes
        self.is_ended = False  # `done` takes a lock, which Ctrl-C in this thread could keep

    def cancel(self) -> bool:
        is_cancelled = super().cancel()
        if is_cancelled:
            self.is_ended = True  # no answer comes. A thread in `result` looks within a second
        return is_cancelled

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        lanes = self._lanes
        if self.done() or not lanes.are_here:
            super().add_done_callback(fn)
            return
        super().add_done_callback(
            # Without a reference to this future, which would be a cycle. A future that is done
            # calls `fn` at once, and logs its exceptions
            lambda done: lanes.run_in_receiver(partial(Future.add_done_callback, done, fn))
        )
        lanes.receive_for_futures(at_once=True)

    def result(self, timeout: float | None = None) -> Any:
        return super().result(self._receive(timeout))

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return super().exception(self._receive(timeout))

    def _receive(self, timeout: float | None) -> float | None:
        """Receive until the answer has arrived, or the time is over. Return the seconds left."""
        until = NEVER if timeout is None else monotonic() + timeout
        if not self.is_ended and self._lanes.are_here:  # a forked child has no workers
            self._lanes.wait(lambda: self.is_ended, until)
        return None if timeout is None else max(0.0, until - monotonic())


class SubmittedCall(WorkerCall):
    """A whole call with a future.

    `finish` takes the output of the worker and this call, and returns the caller's output.
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
        self.callbacks.append(SubmittedCall._resolve)

    def begin(self) -> bool:
        # Ctrl-C may have come between an earlier `begin` and the next step of its caller
        if not (self.is_cancelled or self.future.running()):
            try:
                self.is_cancelled = not self.future.set_running_or_notify_cancel()
            except RuntimeError:  # Ctrl-C came before `is_cancelled` was set
                self.is_cancelled = True
        return not self.is_cancelled

    def _resolve(self) -> None:
        """Give the future its result. Signals are held: it must not stay half resolved."""
        try:
            if self.future.cancel():  # it was cancelled, or its lanes ended before it was sent
                self.begin()  # notifies `concurrent.futures.wait`, which would wait forever
                return
            try:
                output = self._finish(self.load(), self)
            except BaseException as error:  # noqa: BLE001 (the reader of the future gets it)
                # Without its frames, which refer to the future
                self.future.set_exception(error.with_traceback(None))
            else:
                self.future.set_result(output)
        finally:
            self.future.is_ended = True

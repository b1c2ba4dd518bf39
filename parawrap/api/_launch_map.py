"""Run one launch per item of an iterable, and yield the results or the exceptions in order."""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from parawrap.backends import user_frames
from parawrap.errors import LaunchCancelledError
from parawrap.launch import Job, Launch, RankResults, cancel_all, launch, launch_array, runs_here

ResultsOrError = RankResults[Any] | Exception


def launch_each(jobs: Sequence[Job], max_parallel: int | None) -> Iterator[ResultsOrError]:
    """Launch the jobs, and yield the results or the exception of each launch in order.

    A launcher with job arrays (Slurm) gets all jobs at once. Other launchers run at most `max_parallel` jobs at a time: by
    default one on this machine, and all of them on a cluster. Closing the iterator cancels unfinished launches.
    """
    if not jobs:
        return iter(())
    array = launch_array(jobs, max_parallel)
    if array is not None:
        return _Outcomes([launched.results for launched in array], partial(cancel_all, array))
    if max_parallel is None:
        max_parallel = 1 if runs_here(jobs[0]) else len(jobs)
    if max_parallel == 1:
        return _one_by_one(jobs)
    if runs_here(jobs[0]):
        jobs = [replace(job, beside=min(max_parallel, len(jobs))) for job in jobs]
    queue = _Queue(jobs, max_parallel)
    return _Outcomes([future.result for future in queue.futures], queue.cancel)


def _outcome(wait: Callable[[], RankResults[Any]]) -> ResultsOrError:
    """Return the results, or the exception without frames of parawrap. Its notes show where it was raised in the rank."""
    try:
        return wait()
    except Exception as error:  # noqa: BLE001 (yielded instead of results)
        return error.with_traceback(user_frames(error.__traceback__))


def _one_by_one(jobs: Sequence[Job]) -> Iterator[ResultsOrError]:
    """Launch each job in the calling thread, when the iterator reaches it."""
    for job in jobs:
        running = None
        try:
            running = launch(job)
            outcome = _outcome(running.results)
        except Exception as error:  # noqa: BLE001 (yielded instead of results)
            outcome = error
        finally:
            if running is not None and not running.done():
                running.cancel()
        yield outcome


class _Outcomes(Iterator[ResultsOrError]):
    """The outcomes of running launches.

    This is not a generator, because closing a generator that has not started runs no cleanup.
    """

    def __init__(self, waits: Sequence[Callable[[], RankResults[Any]]], cancel: Callable[[], None]) -> None:
        self._waits = iter(waits)
        self._cancel = cancel

    def __next__(self) -> ResultsOrError:
        return _outcome(next(self._waits))

    def close(self) -> None:
        """Cancel the unfinished launches."""
        self._waits = iter(())
        self._cancel()

    def __del__(self) -> None:
        self.close()


class _Queue:
    """The pending jobs and the running launches.

    Daemon threads start the jobs. At exit, the interpreter cancels the queue and does not start the pending jobs.
    """

    def __init__(self, jobs: Sequence[Job], max_parallel: int) -> None:
        self.futures: list[Future[RankResults[Any]]] = [Future() for _ in jobs]
        self._access = threading.Lock()
        self._waiting = deque(zip(jobs, self.futures, strict=True))
        self._running: set[Launch[Any]] = set()
        atexit.register(self.cancel)
        for _ in range(min(max_parallel, len(jobs))):
            threading.Thread(target=self._serve, name="parawrap-launch-map", daemon=True).start()

    def _serve(self) -> None:
        while (started := self._start_next()) is not None:
            running, future = started
            try:
                future.set_result(running.results())
            except BaseException as error:  # noqa: BLE001 (yielded instead of results)
                future.set_exception(error)
            with self._access:
                self._running.discard(running)

    def _start_next(self) -> tuple[Launch[Any], Future[RankResults[Any]]] | None:
        """Launch the next job that can be launched; return None if no job is left."""
        with self._access:
            while self._waiting:
                job, future = self._waiting.popleft()
                try:
                    running = launch(job)
                except BaseException as error:  # noqa: BLE001 (yielded instead of results)
                    future.set_exception(error)
                else:
                    self._running.add(running)
                    return running, future
        return None

    def cancel(self) -> None:
        """End the running launches, and start no others."""
        atexit.unregister(self.cancel)
        with self._access:
            left = [future for _, future in self._waiting]
            self._waiting.clear()
            running = list(self._running)
        for future in left:
            future.set_exception(LaunchCancelledError("the launch was cancelled before it started"))
        cancel_all(running)

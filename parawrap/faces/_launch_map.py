"""One launch per item of an iterable: the results in order, and errors in their places."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from parawrap.errors import LaunchCancelledError
from parawrap.launch import Job, Launch, RankResults, launch, launch_array, runs_here

__all__ = ["launch_each"]

Outcome = RankResults[Any] | Exception


def launch_each(jobs: Sequence[Job], max_parallel: int | None) -> Iterator[Outcome]:
    """Launch the jobs. Yield the results of each in order, or the exception in their place.

    Launchers with job arrays (Slurm) get all jobs at once. Others run at most `max_parallel` at a time: by default one on
    this machine, and all of them on a cluster. Closing the iterator cancels the launches that have not ended.
    """
    if not jobs:
        return iter(())
    array = launch_array(jobs, max_parallel)
    if array is not None:
        return _outcomes([launched.results for launched in array], lambda: _cancel(array))
    if max_parallel is None:
        max_parallel = 1 if runs_here(jobs[0]) else len(jobs)
    if max_parallel == 1:
        return _one_by_one(jobs)
    queue = _Queue(jobs, max_parallel)
    return _outcomes([future.result for future in queue.futures], queue.cancel)


def _one_by_one(jobs: Sequence[Job]) -> Iterator[Outcome]:
    """Launch each job in the calling thread, when its results are asked for."""
    for job in jobs:
        running = None
        try:
            running = launch(job)
            outcome: Outcome = running.results()
        except Exception as error:  # noqa: BLE001 (yielded in the results' place)
            outcome = error
        finally:
            if running is not None and not running.done():
                running.cancel()
        yield outcome


def _outcomes(waits: Sequence[Callable[[], RankResults[Any]]], cancel: Callable[[], None]) -> Iterator[Outcome]:
    try:
        for wait in waits:
            try:
                outcome: Outcome = wait()
            except Exception as error:  # noqa: BLE001 (yielded in the results' place)
                outcome = error
            yield outcome
    finally:
        cancel()


def _cancel(launches: Sequence[Launch[Any]]) -> None:
    for each in launches:
        if not each.done():
            each.cancel()


class _Queue:
    """Jobs that wait for their turn, and the launches that run."""

    def __init__(self, jobs: Sequence[Job], max_parallel: int) -> None:
        self._access = threading.Lock()
        self._running: set[Launch[Any]] = set()
        self._is_cancelled = False
        self._threads = ThreadPoolExecutor(max_parallel, thread_name_prefix="parawrap-launch-map")
        self.futures: list[Future[RankResults[Any]]] = [self._threads.submit(self._run, job) for job in jobs]

    def _run(self, job: Job) -> RankResults[Any]:
        with self._access:
            if self._is_cancelled:
                msg = f"the launch of {job.name} was cancelled before its turn"
                raise LaunchCancelledError(msg)
            running = launch(job)
            self._running.add(running)
        try:
            return running.results()
        finally:
            with self._access:
                self._running.discard(running)

    def cancel(self) -> None:
        """End the launches that run, and start no more."""
        with self._access:
            self._is_cancelled = True
            running = list(self._running)
        _cancel(running)
        self._threads.shutdown(cancel_futures=True)

"""Run one launch per item of an iterable, and yield the results or the exceptions in order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from parawrap.backends import user_frames
from parawrap.launch import (
    Job,
    Launch,
    RankResults,
    cancel_launches,
    cancel_runs,
    launch,
    launch_array,
    report_places,
    running,
    runs_here,
)


def run(job: Job) -> RankResults[Any]:
    """Launch a job, and wait for its results."""
    try:
        return launch(job).results()
    except BaseException as error:  # also Ctrl-C before this function has the handle
        runs = running(job)  # by their job: the launch may have no handle yet
        try:
            if isinstance(error, KeyboardInterrupt):
                report_places(runs)
        finally:  # also after a second Ctrl-C
            cancel_runs(runs)
        raise


def launch_each(jobs: Sequence[Job], max_parallel: int | None) -> Iterator[RankResults[Any] | Exception]:
    """Launch the jobs, and yield the results or the exception of each launch in order.

    The first launches start with the first ``next``. A launcher with job arrays (Slurm) gets all
    jobs at once. Other launchers run at most `max_parallel` jobs at a time: by default one on this
    machine, and all of them on a cluster. Closing the iterator cancels unfinished launches.
    """
    if not jobs:
        return
    is_here = runs_here(jobs[0])
    waits: list[Callable[[], RankResults[Any]]]
    cancel: Callable[[], None]
    array = launch_array(jobs, max_parallel)
    if array is not None:
        waits, cancel = [launched.results for launched in array], partial(cancel_launches, array)
    elif max_parallel == 1 or (max_parallel is None and is_here):
        waits, cancel = [partial(run, job) for job in jobs], lambda: None
    else:
        count = min(max_parallel or len(jobs), len(jobs))
        queue = _Queue([replace(job, beside=count) for job in jobs] if is_here else jobs, count)
        waits, cancel = [future.result for future in queue.futures], queue.cancel
    try:
        for wait in waits:
            yield _outcome(wait)
    finally:
        cancel()


def _outcome(wait: Callable[[], RankResults[Any]]) -> RankResults[Any] | Exception:
    """Return the results, or the exception without frames of parawrap.

    Its notes show where it was raised in the rank.
    """
    try:
        return wait()
    except Exception as error:  # noqa: BLE001 (yielded instead of results)
        return error.with_traceback(user_frames(error.__traceback__))


class _Queue:
    """The pending jobs and the running launches. Daemon threads start the jobs.

    At the exit of the interpreter, the launches end, and further ones are refused.
    """

    def __init__(self, jobs: Sequence[Job], threads: int) -> None:
        self.futures: list[Future[RankResults[Any]]] = [Future() for _ in jobs]
        # A job is pending or its launch is among the running ones: `cancel` misses none
        self._access = threading.Lock()
        self._pending = deque(zip(jobs, self.futures, strict=True))
        self._running: set[Launch[Any]] = set()
        for _ in range(threads):
            threading.Thread(target=self._serve, name="parawrap-launch-map", daemon=True).start()

    def _serve(self) -> None:
        while True:
            with self._access:
                if not self._pending:
                    return
                job, future = self._pending.popleft()
                try:
                    launched = launch(job)
                except BaseException as error:  # noqa: BLE001 (yielded instead of results)
                    future.set_exception(error)
                    continue
                self._running.add(launched)
            try:
                future.set_result(launched.results())
            except BaseException as error:  # noqa: BLE001 (yielded instead of results)
                future.set_exception(error)
            self._running.discard(launched)

    def cancel(self) -> None:
        """End the running launches, and start no others."""
        with self._access:
            self._pending.clear()
            launches = list(self._running)
        cancel_launches(launches)

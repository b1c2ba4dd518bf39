"""Run one launch per item of an iterable, and yield the results or the exceptions in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Generic, TypeVar

from parawrap._public import public
from parawrap.backends import user_frames
from parawrap.displays import spell_count
from parawrap.errors import LaunchError, add_note
from parawrap.launch import (
    Job,
    Launch,
    PlatformFields,
    RankResults,
    Share,
    cancel_launches,
    cancel_runs,
    describe_device,
    launch,
    launch_array,
    launcher_name,
    preview,
    report_launches,
    report_places,
    running,
    share_out,
)

R = TypeVar("R", covariant=True)

# Waits for one launch, and returns its results
_Wait = Callable[[], RankResults[Any]]

_log = logging.getLogger("parawrap.launch")


def run_job(job: Job) -> RankResults[Any]:
    """Launch a job, and wait for its results.

    After Ctrl-C, log where its ranks are, and end them.
    """
    try:
        return launch(job).results()
    except BaseException as error:
        # Looked up by their job: after Ctrl-C inside `launch`, this function has no handle
        runs = running(job)
        try:
            if isinstance(error, KeyboardInterrupt):
                report_places(runs)
        finally:  # also after a second Ctrl-C, during the report
            cancel_runs(runs)
        raise


@public
class Sweep(Iterator[RankResults[R] | Exception], Generic[R]):
    """The results of one launch per item, in order. ``map`` of a decorated function returns it.

    The first launches start with the first ``next``. Closing the iterator, or dropping it, cancels
    the launches that have not ended. One thread iterates.

    >>> from parawrap import Platform, wrapper
    >>> train = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(lambda lr: 1 / lr)
    >>> sweep = train.map([0.5, 0, 0.1])
    >>> next(sweep), next(sweep)
    (RankResults(2.0), ZeroDivisionError('division by zero'))
    >>> sweep.close()
    """

    def __init__(self, jobs: Sequence[Job], max_parallel: int | None) -> None:
        self._jobs = jobs
        self._max_parallel = max_parallel
        # The generator owns the launches. Its `finally` ends them, also if this object is dropped
        self._outcomes = _launch_each(jobs, max_parallel)

    def __next__(self) -> RankResults[R] | Exception:
        return next(self._outcomes)

    def close(self) -> None:
        """Cancel the launches that have not ended, and start no others.

        Call it in the thread that iterates.

        Raises:
            ValueError: If another thread waits in ``next``.
        """
        self._outcomes.close()

    def dry_run(self) -> str:
        """Describe the launches without starting them: how many run at the same time, and where.

        Raises:
            UnsendableError: If the function or an item cannot be sent.

        >>> from parawrap import Platform, wrapper
        >>> train = wrapper(Platform(device="cpu", n_cpus=1))(print)
        >>> print(train.map([0.1, 0.2]).dry_run())
        2 launches of print, one after another
        print on launcher 'local': 1 process on this machine, forked from one with torch loaded
        meeting at file (in a new private folder); one process group
        ... bytes of function and arguments for the rank
        rank 0: node 0, local rank 0, cpu
        """
        if not self._jobs:
            return "no launches"
        first = self._jobs[0]
        shares = _shares_of(self._jobs, self._max_parallel)
        if _is_sequential(first.platform, self._max_parallel):
            how = "one after another"
        elif shares:
            how = f"{len(shares)} at the same time"
        elif self._max_parallel is None:
            how = "all at the same time"
        else:
            how = f"at most {self._max_parallel} at the same time"
        lines = [f"{len(self._jobs)} launches of {first.name}, {how}"]
        lines += [f"launch {number}: {_describe(share)}" for number, share in enumerate(shares)]
        if len(self._jobs) > len(shares) > 0:
            lines.append("later launches: the share of the first launch that ends")
        if shares:
            first = replace(first, platform=shares[0].platform)
        return "\n".join([*lines, preview(first)])


def _launch_each(
    jobs: Sequence[Job], max_parallel: int | None
) -> Generator[RankResults[Any] | Exception, None, None]:
    """Launch the jobs, and yield the results or the exception of each launch in order.

    A launcher with job arrays (Slurm) gets all jobs at once. Other launchers run at most
    `max_parallel` jobs at a time: by default one on this machine, and all of them on a cluster.
    """
    if not jobs:
        return
    platform = jobs[0].platform
    waits: deque[_Wait]
    cancel: Callable[[], None]
    queue: _Queue | None = None
    array = launch_array(jobs, max_parallel)
    if array is not None:
        waits = deque(launched.results for launched in array)
        cancel = partial(cancel_launches, array)
    elif _is_sequential(platform, max_parallel):
        waits = deque(partial(run_job, job) for job in jobs)
        cancel = _cancel_nothing  # `run_job` itself cancels its launch
    else:
        most = len(jobs) if max_parallel is None else max_parallel
        wanted = min(most, len(jobs))
        shares = _shares_of(jobs, max_parallel)
        if shares and len(shares) < wanted:
            _log.warning(_explain_limit(platform, wanted, shares))
        # Without shares, the launcher places the ranks of each launch
        queue = _Queue(jobs, shares or [None] * wanted)
        waits = deque(future.result for future in queue.take_futures())
        cancel = queue.cancel
    try:
        if queue is not None:  # here, so that what it has launched ends if not all threads start
            queue.start()
        # Under launcher "env", the function runs in this process, which torchrun has started
        yield from _wait_in_order(waits, runs_here=launcher_name(platform) == "env")
    except KeyboardInterrupt:
        if queue is not None:  # `run_job` reports itself, and an array is on other machines
            queue.report()
        raise
    finally:
        cancel()


def _wait_in_order(
    waits: deque[_Wait], *, runs_here: bool
) -> Iterator[RankResults[Any] | Exception]:
    # A function of its own: on Python 3.13, Ctrl-C at the end of a round of a `while` that stands
    # directly in a `try` leaves out its `finally`. Each function leaves the deque before its call:
    # nothing here keeps results, which belong to the caller once they are yielded
    while waits:
        yield _outcome(waits.popleft(), runs_here=runs_here)


def _cancel_nothing() -> None:
    pass


def _is_sequential(platform: PlatformFields, max_parallel: int | None) -> bool:
    """True if one launch runs at a time."""
    launcher = launcher_name(platform)
    if launcher == "env":
        # The function runs in this process. In another thread, it could handle no signals
        return True
    return max_parallel == 1 or (max_parallel is None and launcher == "local")


def _shares_of(jobs: Sequence[Job], max_parallel: int | None) -> list[Share]:
    """Return a share of this machine's devices and cores for each launch that runs at a time.

    There are no shares if one launch runs at a time, or if another launcher places the ranks.
    """
    platform = jobs[0].platform
    if max_parallel in (None, 1) or launcher_name(platform) != "local":
        return []
    return share_out(platform, min(max_parallel, len(jobs)))


def _explain_limit(platform: PlatformFields, wanted: int, shares: list[Share]) -> str:
    """Say why fewer launches run at the same time than `max_parallel` allows."""
    count = platform.ranks_per_node
    one = "one device" if count == 1 else f"{count} devices"
    text = (
        f"{len(shares)} of the {wanted} launches that max_parallel allows at the same time can "
        f"run, as each has {one} of its own. "
    )
    if platform.n_gpus is None:
        return f"{text}Give n_gpus: without it, a launch uses all devices"
    numbers = {number for share in shares for number in share.platform.own_device_ids}
    repeated = sorted([*numbers, *numbers])  # each twice
    return f"{text}To run two launches on a device, repeat its number: device_ids={repeated}"


def _describe(share: Share) -> str:
    """Return the devices and the cores of a share."""
    platform, cores = share
    if cores.pinned:
        return f"CPU cores {', '.join(map(str, cores.pinned))}"
    threads = spell_count(cores.count, "CPU thread")
    if platform.device_ids is None:
        return f"{threads}, on any core"
    devices = [describe_device(platform, rank) for rank in range(platform.ranks_per_node)]
    return f"{', '.join(devices)}; {threads}"


def _outcome(wait: _Wait, *, runs_here: bool) -> RankResults[Any] | Exception:
    """Return the results, or the exception without frames of parawrap.

    The notes of the exception show where the rank raised it.

    Args:
        wait: Waits for a launch, and returns its results.
        runs_here: True if the function runs in this process. Ctrl-C in the function then ends the
            sweep.
    """
    try:
        return wait()
    except Exception as error:  # noqa: BLE001 (yielded instead of results)
        return error.with_traceback(user_frames(error.__traceback__))
    except BaseException as error:
        # Exceptions of ranks have notes. Ctrl-C in this process has none, and ends the sweep
        notes = getattr(error, "__notes__", ())
        if runs_here or not notes:
            raise
        return _as_exception(error, notes)


def _as_exception(error: BaseException, notes: Sequence[str]) -> LaunchError:
    """Return an `Exception` for a KeyboardInterrupt, for example, that a rank raised.

    Loops over a sweep find failed launches with ``isinstance(outcome, Exception)``.
    """
    failure = LaunchError(f"a rank raised {type(error).__name__}, so this launch has no results")
    failure.__cause__ = error.with_traceback(None)
    for note in notes:
        add_note(failure, note)
    return failure


class _Queue:
    """The pending jobs and the running launches of a sweep.

    Daemon threads start the jobs, and end when no job is pending. At the exit of the interpreter,
    the launches end, and further launches are refused.
    """

    def __init__(self, jobs: Sequence[Job], shares: Sequence[Share | None]) -> None:
        self._futures: list[Future[RankResults[Any]]] = [Future() for _ in jobs]
        # Held from the moment a job leaves `_pending` until its launch is in `_running`: `cancel`
        # finds each job in one of the two
        self._access = threading.Lock()
        self._pending = deque(zip(jobs, self._futures, strict=True))
        self._running: set[Launch[Any]] = set()
        self._shares = shares

    def start(self) -> None:
        """Start the threads. `cancel` may be called before, and if this raises."""
        # Each share has its own thread, which makes one launch after another. The processes of a
        # launch end before its results come, so that the next launch finds the devices free
        for share in self._shares:
            serve = partial(self._serve, share)
            threading.Thread(target=serve, name="parawrap-launch-map", daemon=True).start()

    def take_futures(self) -> list[Future[RankResults[Any]]]:
        """Hand over the futures of the jobs, in order: nothing here keeps the results."""
        futures, self._futures = self._futures, []
        return futures

    def report(self) -> None:
        """Log where the ranks of the running launches are."""
        # Without the lock, which a thread holds while it launches: Ctrl-C must not wait for it.
        # `list` copies a set in one step
        report_launches(list(self._running))

    def _serve(self, share: Share | None) -> None:
        """Launch pending jobs on a share, one after another, until none is left."""
        while True:
            with self._access:
                if not self._pending:
                    return
                job, future = self._pending.popleft()
                if share is not None:
                    job = replace(job, platform=share.platform, cores=share.cores)
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

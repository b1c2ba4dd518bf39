"""A batch job, followed to its end: by what its first node writes into the folder, and where that is silent, by Slurm.

What it guarantees: `follow` returns, or raises, in bounded time after the job's end, however it ended; and then the job has
left the queue, or has been told to.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any, NoReturn

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._platform import Platform
from parawrap.launch.clusters import _queue as queue
from parawrap.launch.clusters._batch import log_ends
from parawrap.launch.clusters._folder import Folder
from parawrap.launch.clusters._journal import JournalReader
from parawrap.launch.clusters._slurm_task import ALIVE_S
from parawrap.launch.parcels._outcomes import Died, error_of
from parawrap.launch.watch._ending import Ending

__all__ = ["JobFollower"]

_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0  # into the folder: a job that says nothing for long costs it little
_ASK_S, _LONGEST_ASK_S = 1.0, 15.0  # Slurm is asked often at first: most that goes wrong goes wrong then
_SIGN_S = 5.0
_LATE_S = 5.0  # what was written before a job's end may be seen that much later
_LEAVING_S = 15.0  # tasks that are done have this long to be gone
_SILENCE_S = 12 * ALIVE_S  # Slurm itself may take minutes to see that a node is gone
_LOG_END = 2000


class JobFollower:
    """Follows one job; one thread calls `follow`, any may `cancel`.

    Args:
        number: the job's.
        name: of the function.
        platform: of the launch.
        folder: of the launch.
        take: called with each entry of the journal that is not the last.

    Attributes:
        has_begun: whether the job has its machines, and its ranks are about to start or have.
    """

    def __init__(
        self, number: str, name: str, platform: Platform, folder: Folder, take: Callable[[str, tuple[Any, ...]], None]
    ) -> None:
        self.has_begun = False
        self._number = number
        self._name = name
        self._platform = platform
        self._folder = folder
        self._take = take
        self._cancelled = threading.Event()
        self._start = 0
        self._hosts: list[str] = []
        self._signal: str | None = None

    def cancel(self) -> None:
        """Have the ranks end, and the job."""
        self._cancelled.set()  # first: where the folder takes nothing, Slurm's own means remain
        with contextlib.suppress(OSError):
            self._folder.request("cancel")

    def follow(self) -> Ending:
        """The launch's end.

        Raises:
            LaunchError: the job ended in a way of which its ranks could tell nothing, or the folder cannot be used.
        """
        try:
            with self._giving_signs_of_life():
                ending = self._followed_to_last_start()
            job = self._left(ending)
        except OSError as error:
            queue.cancel_job(self._number)
            raise self._unusable(error) from error
        except BaseException:
            queue.cancel_job(self._number)
            raise
        if ending.requeued:
            return Ending({}, cancelled=True)
        return self._completed(ending, job)

    @contextmanager
    def _giving_signs_of_life(self) -> Iterator[None]:
        """By a thread that does nothing else: whoever follows may be held up, by a terminal that is stopped say."""
        over = threading.Event()

        def give() -> None:
            for number in count():
                with contextlib.suppress(OSError):
                    self._folder.give_sign_of_life(number)
                if over.wait(_SIGN_S):
                    return

        thread = threading.Thread(target=give, name=f"parawrap-launch-signs-{self._number}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _unusable(self, error: OSError) -> LaunchError:
        if self._folder.path.exists():
            return self._folder.unusable(error)
        return LaunchError(f"job {self._number} of Slurm has had no sign of life from this process for long, and has ended")

    # -- one start of the job

    def _followed_to_last_start(self) -> Ending:
        """How the last start of the job ended."""
        ending = self._followed()
        while ending.requeued and not self._cancelled.is_set():
            self._start += 1
            self.has_begun = False
            ending = self._followed()
        return ending

    def _followed(self) -> Ending:
        """How this start of the job ended."""
        journal, times = JournalReader(self._folder.journal(self._start)), _Times()
        while True:
            for word, *told in journal.new_entries() if self._folder.has_journal(self._start) else ():
                if word == "ending":
                    return told[0]  # type: ignore[no-any-return]
                self._note(word, tuple(told))
                times.hear()  # now: showing what ranks write may have taken long
            if troubles := self._folder.troubles(self._start):
                raise LaunchError("; ".join(troubles))
            if times.is_time_to_ask(self._cancelled) and (ending := self._told_by_slurm(times)) is not None:
                return ending
            time.sleep(times.pause_to_look())

    def _note(self, word: str, told: tuple[Any, ...]) -> None:
        self.has_begun = True
        if word == "hosts":
            (self._hosts,) = told
        elif word == "signal":
            (self._signal,) = told
        else:
            self._take(word, told)

    def _told_by_slurm(self, times: _Times) -> Ending | None:
        """How the launch ended, where the state of the job alone tells it."""
        is_silent = time.monotonic() - times.heard_at > _SILENCE_S  # before Slurm is asked, which may take long
        job, has_journal = queue.job_state(self._number), self._folder.has_journal(self._start)
        if job.waits:
            times.hear()
            self.has_begun = False
        if self._cancelled.is_set() and (job.waits or times.have_ranks_had(self._platform.grace_s)):
            queue.cancel_job(self._number)
        if job.starts > self._start and not (self._folder.was_preempted(self._start) or self._platform.max_restarts):
            self._raise_lost(job)
        if job.starts > self._start and self._folder.has_journal(self._start + 1):
            return Ending({}, requeued=True)
        if job.name == "RUNNING" and job.starts == self._start and has_journal and is_silent:
            self._raise_lost(job)
        if job.is_over and times.has_been_over_for(_LATE_S if has_journal else _ASK_S):
            return self._ended_by_slurm(job)
        return None

    def _left(self, ending: Ending) -> queue.JobState:
        """How the job ended. Its last tasks write into the folder, which goes next, so they are waited for."""
        if ending.requeued:  # and cancelled since
            queue.cancel_job(self._number)
        if any(isinstance(outcome, Died) and outcome.lost_with for outcome in ending.outcomes.values()):
            queue.cancel_job(self._number)  # the task of a node that is gone is not waited for
            return queue.JobState("NODE_FAIL")
        until = time.monotonic() + _LEAVING_S
        while not (job := queue.job_state(self._number)).is_over and time.monotonic() < until:
            time.sleep(5 * _LOOK_S)
        if not job.is_over:
            queue.cancel_job(self._number)
        return job

    # -- what a job's state means

    def _completed(self, ending: Ending, job: queue.JobState) -> Ending:
        """The ending that the ranks have told, with what Slurm knows better."""
        if ending.is_success or ending.cancelled:
            return ending
        if job.name == "CANCELLED" and not self._cancelled.is_set():
            return self._ended_by_slurm(job)
        if job.name == "OUT_OF_MEMORY":
            note = f"Slurm says of job {self._number}: out of memory; ram={self._platform.ram} GB a node was reserved"
            return replace(ending, history=[*ending.history, note])
        return ending

    def _ended_by_slurm(self, job: queue.JobState) -> Ending:
        """Slurm ended the job before its ranks told how they ended."""
        name, of_slurm = self._name, f"job {self._number} of Slurm"
        if self._cancelled.is_set():
            return Ending({}, cancelled=True)
        if job.name == "NODE_FAIL":
            self._raise_lost(job)
        # Slurm forgets an element of an array that is cancelled before it starts.
        if job.name == "CANCELLED" or (job.name == "FORGOTTEN" and not self._folder.has_journal(0)):
            msg = f"the launch of {name} was cancelled, but not from here: {of_slurm} has been taken from the queue"
            raise LaunchCancelledError(msg)
        if job.name in ("TIMEOUT", "DEADLINE"):
            msg = f"{name} was ended by Slurm at the time limit of its job, {job.time_limit}; {of_slurm}"
            raise LaunchTimeoutError(msg)
        if job.name == "OUT_OF_MEMORY":
            msg = f"{name} took more memory than ram={self._platform.ram} GB a node, which its job had reserved; {of_slurm}"
            raise LaunchError(msg)
        if job.name == "PREEMPTED":
            msg = f"{name} was preempted, and the cluster does not requeue {of_slurm}"
            raise LaunchError(msg)
        msg = f"{of_slurm}, which ran {name}, ended as {job.name} ({job.reason}) before its ranks could tell of anything"
        error = LaunchError(msg)
        if logs := log_ends(self._folder, self._number, _LOG_END):
            error.add_note(f"its tasks wrote:\n{logs}")
        else:
            where = f"{self._folder.root} on a file system that all nodes share"
            error.add_note(f"its tasks wrote nothing: is {where}? PARAWRAP_LAUNCH_DIR names another place")
        raise error

    def _raise_lost(self, job: queue.JobState) -> NoReturn:
        """A node is gone, and with it, or with what Slurm did then, all that was known of the ranks.

        Raises:
            RankDiedError: for the first rank of the node.
            LaunchError: no node is down any more.
        """
        hosts = self._hosts or [job.nodes] * self._platform.n_nodes
        down = [node for node, host in enumerate(hosts) if queue.is_down(host)]
        if self._signal is not None and not down:
            msg = (
                f"Slurm ended job {self._number}, which ran {self._name}, by {self._signal} and started it again: a node "
                "was lost, or the job was preempted without its own signal; give max_restarts for that to be allowed"
            )
            raise LaunchError(msg)
        node = down[0] if down else 0
        rank = node * self._platform.ranks_per_node
        died = Died(time.time(), 0, lost_with=f"its node, in job {self._number} of Slurm")
        raise error_of(rank, {rank: died}, self._platform.world_size, f"node {node}, {hosts[node]}")


class _Times:
    """When what was done last, in following one start of a job."""

    def __init__(self) -> None:
        self.heard_at = self._ask_at = time.monotonic()
        self._pause_s = _ASK_S
        self._look_s = _LOOK_S
        self._over_since: float | None = None
        self._cancelled_since: float | None = None

    def hear(self) -> None:
        """The job has told something."""
        self.heard_at = time.monotonic()
        self._look_s = _LOOK_S

    def pause_to_look(self) -> float:
        self._look_s = min(1.1 * self._look_s, _LONGEST_LOOK_S)
        return self._look_s

    def is_time_to_ask(self, cancelled: threading.Event) -> bool:
        """Ever more seldom; but soon when something is about to happen."""
        now = time.monotonic()
        if cancelled.is_set() or self._over_since is not None:
            self._ask_at = min(self._ask_at, now + _ASK_S)
            self._pause_s = _ASK_S
        if now < self._ask_at:
            return False
        self._ask_at = now + self._pause_s
        self._pause_s = min(1.2 * self._pause_s, _LONGEST_ASK_S)
        return True

    def has_been_over_for(self, seconds: float) -> bool:
        """Whether the job was seen to be over that long ago."""
        self._over_since = self._over_since or time.monotonic()
        return time.monotonic() - self._over_since >= seconds

    def have_ranks_had(self, grace_s: float) -> bool:
        """Whether the ranks have had their time to end by themselves, since it was first asked."""
        self._cancelled_since = self._cancelled_since or time.monotonic()
        return time.monotonic() - self._cancelled_since >= grace_s + _LATE_S

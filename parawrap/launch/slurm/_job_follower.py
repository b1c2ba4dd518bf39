"""Follow a batch job to its end, through the journal of its first node and through Slurm.

`follow` returns or raises in bounded time after any end of the job. By then the job has left the queue or is cancelled.
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
from parawrap.launch.coordinator._ending import Ending
from parawrap.launch.messages._first_rank_failure import Died, error_of
from parawrap.launch.slurm import _commands as queue
from parawrap.launch.slurm._batch_job import log_ends
from parawrap.launch.slurm._launch_folder import Folder
from parawrap.launch.slurm._report_journal import JournalReader
from parawrap.launch.slurm._task import ALIVE_S

__all__ = ["JobFollower"]

_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0  # pause between two reads of the folder; it grows while the job writes nothing
_POLL_S, _LONGEST_POLL_S = 1.0, 15.0  # pause between two calls of scontrol; it grows with time, as most failures come early
_JOBS_PER_POLL = 20  # with more jobs, each is polled less often
_SIGN_S = 5.0
_LATE_S = 5.0  # a file written at the job's end may appear this much later on a network file system
_LEAVING_S = 15.0  # time for the tasks to exit after the ending
_SILENCE_S = 12 * ALIVE_S  # Slurm itself may notice a lost node minutes later
_LOG_END = 2000

_followed: set[JobFollower] = set()


class JobFollower:
    """Follows one job. One thread calls `follow`; any thread may call `cancel`.

    Args:
        number: The job's number.
        name: The function's name.
        platform: The launch's platform.
        folder: The launch's folder.
        on_entry: Called with the word and body of journal entries, except those that the follower handles itself.

    Attributes:
        has_begun: True if the job has its machines, so that its ranks run or are about to start.
    """

    def __init__(
        self, number: str, name: str, platform: Platform, folder: Folder, on_entry: Callable[[str, tuple[Any, ...]], None]
    ) -> None:
        self._number = number
        self._name = name
        self._platform = platform
        self._folder = folder
        self._on_entry = on_entry
        self._cancelled = threading.Event()
        self._start = 0
        self._hosts: list[str] = []
        self._signal: str | None = None
        self._note_start()

    def _note_start(self) -> None:
        self.has_begun = False
        self._start_at = self._sign_at = self._poll_at = time.monotonic()
        self._over_since: float | None = None
        self._cancelled_since: float | None = None

    def cancel(self) -> None:
        """Request the end of the ranks and the job, without waiting for it."""
        self._cancelled.set()  # if the folder cannot be written, the job is cancelled through Slurm
        with contextlib.suppress(OSError):
            self._folder.request("cancel")

    def follow(self) -> Ending:
        """Wait for the job's end and return the launch's ending.

        Raises:
            LaunchError: If the job ended before its ranks reported an ending, or the folder cannot be used.
        """
        try:
            _followed.add(self)
            with self._signs_of_life():
                ending = self._follow_starts()
            job = self._await_exit(ending)
        except OSError as error:
            queue.cancel_job(self._number)
            raise self._unusable(error) from error
        except BaseException:
            queue.cancel_job(self._number)
            raise
        finally:
            _followed.discard(self)
        if ending.requeued:
            return Ending({}, cancelled=True)
        return self._completed(ending, job)

    @contextmanager
    def _signs_of_life(self) -> Iterator[None]:
        """Write signs of life in a separate thread, because the following thread can block, say on a stopped terminal."""
        over = threading.Event()

        def write() -> None:
            for number in count():
                with contextlib.suppress(OSError):
                    self._folder.write_sign_of_life(number)
                if over.wait(_SIGN_S):
                    return

        thread = threading.Thread(target=write, name=f"parawrap-launch-signs-{self._number}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _unusable(self, error: OSError) -> LaunchError:
        if self._folder.path.exists():
            return self._folder.unusable(error)
        return LaunchError(f"Slurm job {self._number} ended itself, because this process gave no sign of life for too long")

    # -- one start of the job

    def _follow_starts(self) -> Ending:
        """Return the ending of the job's last start."""
        ending = self._follow_start()
        while ending.requeued and not self._cancelled.is_set():
            self._start += 1
            self._note_start()
            times = ending.times
            ending = self._follow_start()
            ending = replace(ending, times=[*times, *ending.times])
        return ending

    def _follow_start(self) -> Ending:
        """Return the ending of this start of the job."""
        journal = JournalReader(self._folder.journal(self._start))
        while True:
            for word, *body in journal.new_entries() if self._folder.has_journal(self._start) else ():
                if word == "ending":
                    return body[0]  # type: ignore[no-any-return]
                self._handle(word, tuple(body))
                self._sign_at = time.monotonic()  # after showing the ranks' output, which may take long
            if troubles := self._folder.troubles(self._start):
                raise LaunchError("; ".join(troubles))
            if time.monotonic() >= self._poll_at + self._poll_pause_s() and (ending := self._poll_slurm()) is not None:
                return ending
            time.sleep(min(_LOOK_S + (time.monotonic() - self._sign_at) / 20, _LONGEST_LOOK_S))

    def _poll_pause_s(self) -> float:
        """Return the pause between two polls. It grows with time and with the number of jobs, and is short near the end."""
        if self._cancelled.is_set() or self._over_since is not None:
            return _POLL_S
        pause_s = min(max(_POLL_S, (time.monotonic() - self._start_at) / 5), _LONGEST_POLL_S)
        return pause_s * max(1.0, len(_followed) / _JOBS_PER_POLL)

    def _handle(self, word: str, body: tuple[Any, ...]) -> None:
        self.has_begun = True
        if word == "hosts":
            (self._hosts,) = body
        elif word == "signal":
            (self._signal,) = body
        else:
            self._on_entry(word, body)

    def _poll_slurm(self) -> Ending | None:
        """Return the launch's ending if Slurm's state of the job determines it."""
        self._poll_at = now = time.monotonic()  # scontrol may take long
        job, has_journal = queue.job_state(self._number), self._folder.has_journal(self._start)
        if job.waits:
            self._sign_at = now
            self.has_begun = False
        if self._cancelled.is_set():
            self._cancelled_since = self._cancelled_since or now
            if job.waits or now - self._cancelled_since >= self._platform.grace_s + _LATE_S:
                queue.cancel_job(self._number)
        if job.starts > self._start and not (self._folder.was_preempted(self._start) or self._platform.max_restarts):
            self._raise_lost(job)
        if job.starts > self._start and self._folder.has_journal(self._start + 1):
            return Ending({}, requeued=True)
        if job.name == "RUNNING" and job.starts == self._start and has_journal and now - self._sign_at > _SILENCE_S:
            self._raise_lost(job)
        if job.is_over:
            self._over_since = self._over_since or now
            if now - self._over_since >= (_LATE_S if has_journal else _POLL_S):
                return self._ended_by_slurm(job)
        return None

    def _await_exit(self, ending: Ending) -> queue.JobState:
        """Wait until the job has left its machines, because its tasks use the folder. Return its state."""
        if ending.requeued:  # and cancelled in the meantime
            queue.cancel_job(self._number)
        if any(isinstance(outcome, Died) and outcome.lost_with for outcome in ending.outcomes.values()):
            queue.cancel_job(self._number)  # the task of a lost node never exits
            return queue.JobState("NODE_FAIL")
        until = time.monotonic() + _LEAVING_S
        while not (job := queue.job_state(self._number)).is_over and time.monotonic() < until:
            time.sleep(5 * _LOOK_S)
        if not job.is_over:
            queue.cancel_job(self._number)
        return job

    # -- from a job's state to an ending

    def _completed(self, ending: Ending, job: queue.JobState) -> Ending:
        """Return the ranks' ending, completed with details from Slurm."""
        if ending.is_success or ending.cancelled:
            return ending
        if job.name == "CANCELLED" and not self._cancelled.is_set():
            return self._ended_by_slurm(job)
        if job.name == "OUT_OF_MEMORY":
            note = (
                f"Slurm reports that job {self._number} ran out of memory; it had reserved ram={self._platform.ram} GB per "
                "node"
            )
            return replace(ending, history=[*ending.history, note])
        return ending

    def _ended_by_slurm(self, job: queue.JobState) -> Ending:
        """Return or raise the ending of a job that ended before its ranks reported one."""
        name, slurm_job = self._name, f"Slurm job {self._number}"
        if self._cancelled.is_set():
            return Ending({}, cancelled=True)
        if job.name == "NODE_FAIL":
            self._raise_lost(job)
        # Slurm forgets an array element that is cancelled before it starts.
        if job.name == "CANCELLED" or (job.name == "FORGOTTEN" and not self._folder.has_journal(0)):
            msg = f"the launch of {name} was cancelled by another process: {slurm_job} was removed from the queue"
            raise LaunchCancelledError(msg)
        if job.name in ("TIMEOUT", "DEADLINE"):
            msg = f"{name} reached the time limit of {slurm_job}, {job.time_limit}"
            raise LaunchTimeoutError(msg)
        if job.name == "OUT_OF_MEMORY":
            msg = f"{name} used more memory than {slurm_job} had reserved, ram={self._platform.ram} GB per node"
            raise LaunchError(msg)
        if job.name == "PREEMPTED":
            msg = f"{name} was preempted, and the cluster does not requeue {slurm_job}"
            raise LaunchError(msg)
        msg = f"{slurm_job}, which ran {name}, ended as {job.name} ({job.reason}) before its ranks could report anything"
        error = LaunchError(msg)
        if logs := log_ends(self._folder, self._number, _LOG_END):
            error.add_note(f"its tasks wrote:\n{logs}")
        else:
            where = f"{self._folder.root} is on a file system that all nodes share"
            error.add_note(f"its tasks wrote nothing: check that {where}, or set PARAWRAP_LAUNCH_DIR to another folder")
        raise error

    def _raise_lost(self, job: queue.JobState) -> NoReturn:
        """Raise the error for a lost node.

        Raises:
            RankDiedError: For the first rank of the lost node.
            LaunchError: If the job received a signal and no node is down.
        """
        hosts = self._hosts or [job.nodes] * self._platform.n_nodes
        down = [node for node, host in enumerate(hosts) if queue.is_down(host)]
        if self._signal is not None and not down:
            msg = (
                f"Slurm ended job {self._number}, which ran {self._name}, with {self._signal} and started it again: a node "
                "was lost, or the job was preempted without SIGUSR2; set max_restarts to allow this"
            )
            raise LaunchError(msg)
        node = down[0] if down else 0
        rank = node * self._platform.ranks_per_node
        died = Died(time.time(), 0, lost_with=f"its node, in Slurm job {self._number}")
        raise error_of(rank, {rank: died}, self._platform.world_size, f"node {node}, {hosts[node]}")

"""Follow a batch job to its end, through the files of its tasks and through Slurm.

`follow` returns or raises in bounded time after any end of the job. By then the job has left the queue or is cancelled.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import NoReturn

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._platform import Platform
from parawrap.launch._private_files import open_private
from parawrap.launch.slurm import _job_commands as queue
from parawrap.launch.slurm._batch_job import log_ends
from parawrap.launch.slurm._launch_folder import Folder
from parawrap.launch.slurm._task import TaskResult
from parawrap.processes.outcomes import Died, Ending, Outcome, Raised, Returned, error_of
from parawrap.processes.output import Transcript

__all__ = ["JobFollower"]

_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.5  # pause between two reads of the folder; it grows while the job writes nothing
_POLL_S, _LONGEST_POLL_S = 1.0, 15.0  # pause between two calls of scontrol; it grows with time, as most failures come early
_JOBS_PER_POLL = 20  # with more jobs, each is polled less often
_SIGN_S = 5.0  # a network file system shows a new file within seconds
_LATE_S = 5.0  # a file written at the job's end may appear this much later on a network file system
_LEAVING_S = 15.0  # time for the tasks to exit after the ending
_LOG_END = 2000  # characters: about thirty lines, enough for a traceback
_DEATH = re.compile(r"srun: error: \S+: tasks? (\d+)[\d,-]*: (?!Terminated)(.+)")  # a task that could not report anything

_log = logging.getLogger("parawrap.launch")
_followed: set[JobFollower] = set()


class JobFollower:
    """Follows one job. One thread calls `follow`; any thread may call `cancel`.

    Args:
        number: The job's number.
        name: The function's name.
        platform: The launch's platform.
        folder: The launch's folder.

    Attributes:
        has_begun: True if the tasks have met, so that the ranks run.
    """

    def __init__(self, number: str, name: str, platform: Platform, folder: Folder) -> None:
        self._number = number
        self._name = name
        self._platform = platform
        self._folder = folder
        self._transcripts: Sequence[Transcript] = ()
        self._output: list[tuple[Transcript, int, _Tail]] = []
        self._cancelled = threading.Event()
        self._files = [folder.task_files(number, rank) for rank in range(platform.world_size)]
        self._log_lines = _Tail(folder.log)
        self._seen: tuple[float, ...] | None = None
        self._nodes = ""
        self._start = -1
        self._note_start(0)

    def _note_start(self, start: int) -> None:
        """Note that this start of the job, counted from 0, has begun."""
        if start <= self._start:
            return
        self._start = start
        self.has_begun = False
        self._start_at = self._changed_at = self._poll_at = time.monotonic()
        self._over_since: float | None = None
        self._cancelled_since: float | None = None

    def cancel(self) -> None:
        """Request the end of the ranks and the job, without waiting for it."""
        self._cancelled.set()  # if the folder cannot be written, the job is cancelled through Slurm
        with contextlib.suppress(OSError):
            self._folder.request("cancel")

    def write_output_to(self, transcripts: Sequence[Transcript]) -> None:
        """Write the output of each task to the transcript of its rank."""
        self._transcripts = transcripts
        self._output = [
            (transcript, stream, _Tail(Path(path)))
            for transcript, files in zip(transcripts, self._files, strict=True)
            for stream, path in ((1, files.stdout), (2, files.stderr))
        ]

    def follow(self, transcripts: Sequence[Transcript]) -> Ending:
        """Wait for the job's end and return the launch's ending, with the values of the ranks.

        Args:
            transcripts: One per rank, for the output of its task.

        Raises:
            LaunchError: If the job ended before its ranks reported an ending, or the folder cannot be used.
        """
        self.write_output_to(transcripts)
        try:
            _followed.add(self)
            with self._signs_of_life():
                ending = self._follow_job()
                job = self._await_exit(ending)
            self.take_output()
            return self._complete(ending, job)
        except OSError as error:
            queue.cancel_job(self._number)
            raise self._unusable(error) from error
        except BaseException:
            queue.cancel_job(self._number)
            raise
        finally:
            _followed.discard(self)

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

    # -- the job's attempts

    def _follow_job(self) -> Ending:
        """Return the ending of the last attempt."""
        while True:
            self.take_output()
            self.has_begun = self._folder.has_begun(self._start)
            if (result := self.new_result()) is not None and result.ending is not None:
                self._note_start(int(result.attempt.partition("-")[0]))
                if result.is_requeued and self._cancelled.is_set():
                    return Ending({}, cancelled=True)
                completed = self._with_values(result.ending)
                if result.is_final:
                    return completed
            if troubles := self._folder.troubles(self._start):
                raise LaunchError("; ".join(troubles))
            if time.monotonic() >= self._poll_at + self._poll_pause_s() and (ending := self._poll_slurm()) is not None:
                return ending
            time.sleep(min(_LOOK_S + (time.monotonic() - self._changed_at) / 20, _LONGEST_LOOK_S))

    def take_output(self) -> None:
        """Add the new output of the tasks to the transcripts, and log the new messages of the coordinator."""
        names = {path.name for path in self._folder.submitit.iterdir()}
        for transcript, stream, tail in self._output:
            if tail.path.name in names and (data := tail.new_bytes()):
                transcript.write(stream, data)
                self._changed_at = time.monotonic()
        if self._log_lines.path.exists():
            for line in self._log_lines.new_lines():
                _log.log(*json.loads(line))

    def new_result(self) -> TaskResult | None:
        """Return the result of rank 0's task if it is a new one."""
        path = Path(self._files[0].result_pickle)
        try:
            status = path.stat()
        except FileNotFoundError:
            return None
        seen = (status.st_ino, status.st_mtime_ns)
        if seen == self._seen:
            return None
        result = self.result_of(0)
        self._seen = seen
        return result

    def result_of(self, rank: int) -> TaskResult | None:
        """Return the value that a task returned. None if there is none yet, or the task raised."""
        try:
            with open_private(Path(self._files[rank].result_pickle)) as file:
                word, value = pickle.load(file)
        except FileNotFoundError:
            return None
        return value if word == "success" else None

    def _with_values(self, ending: Ending) -> Ending:
        """Return an ending with memory in place of the bytes of values, and with the last output of ranks that died."""
        self.take_output()
        outcomes: dict[int, Outcome] = {}
        for rank, outcome in ending.outcomes.items():
            outcomes[rank] = outcome
            if isinstance(outcome, Returned):
                outcomes[rank] = replace(outcome, value=memoryview(bytearray(outcome.value)))
            elif isinstance(outcome, Raised):
                outcomes[rank] = replace(outcome, error=memoryview(bytearray(outcome.error)))
                self._transcripts[rank].record(outcome.traceback)
            elif isinstance(outcome, Died) and not outcome.last_words:
                outcomes[rank] = replace(outcome, last_words=self._transcripts[rank].last_words())
        return replace(ending, outcomes=outcomes)

    def _poll_pause_s(self) -> float:
        """Return the pause between two polls. It grows with time and with the number of jobs, and is short near the end."""
        if self._cancelled.is_set() or self._over_since is not None:
            return _POLL_S
        pause_s = min(max(_POLL_S, (time.monotonic() - self._start_at) / 5), _LONGEST_POLL_S)
        return pause_s * max(1.0, len(_followed) / _JOBS_PER_POLL)

    def _poll_slurm(self) -> Ending | None:
        """Return the launch's ending if Slurm's state of the job determines it."""
        job = queue.job_state(self._number)
        self._poll_at = now = time.monotonic()  # scontrol may take long
        if job.starts > self._start and not (self._folder.was_preempted(self._start) or self._platform.max_restarts):
            self._raise_lost(queue.hosts_of(self._nodes))
        self._note_start(job.starts)
        self._nodes = job.nodes or self._nodes  # a requeued job has none
        if self._cancelled.is_set():
            self._cancelled_since = self._cancelled_since or now
            if job.waits or now - self._cancelled_since >= self._platform.grace_s + _LATE_S:
                queue.cancel_job(self._number)
        if job.is_over:
            self._over_since = self._over_since or now
            if now - self._over_since >= (_LATE_S if self.has_begun else _POLL_S):
                return self._explain_end(job)
        return None

    def _await_exit(self, ending: Ending) -> queue.JobState:
        """Wait until the job has left its machines, because its tasks use the folder. Return its state."""
        if ending.cancelled:  # also a requeued job that was cancelled in the meantime
            queue.cancel_job(self._number)
        until, pause_s = time.monotonic() + _LEAVING_S, _LOOK_S
        while not (job := queue.job_state(self._number)).is_over and time.monotonic() < until:
            if job.starts > self._start:  # Slurm has requeued it
                break
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, _POLL_S)
        if not job.is_over:
            queue.cancel_job(self._number)
        return job

    # -- from a job's state to an ending

    def _complete(self, ending: Ending, job: queue.JobState) -> Ending:
        """Return the ranks' ending, completed with details from Slurm."""
        if ending.is_success or ending.cancelled:
            return ending
        if job.starts > self._start or job.name == "NODE_FAIL":  # the failure of the ranks is a consequence
            self._raise_lost(queue.hosts_of(job.nodes or self._nodes))
        if job.name == "CANCELLED" and not self._cancelled.is_set():
            return self._explain_end(job)
        if job.name == "OUT_OF_MEMORY":
            note = (
                f"Slurm reports that job {self._number} ran out of memory; it had reserved ram={self._platform.ram} GB per "
                "node"
            )
            return replace(ending, history=[*ending.history, note])
        return ending

    def _explain_end(self, job: queue.JobState) -> Ending:
        """Return or raise the ending of a job that ended before its ranks reported one."""
        name, slurm_job = self._name, f"Slurm job {self._number}"
        if self._cancelled.is_set():
            return Ending({}, cancelled=True)
        if job.name == "NODE_FAIL":
            self._raise_lost(queue.hosts_of(job.nodes or self._nodes) or [job.nodes])
        # Slurm forgets an array element that is cancelled before it starts.
        if job.name == "CANCELLED" or (job.name == "FORGOTTEN" and not self._folder.has_begun(0)):
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
        logs = log_ends(self._folder, self._number, _LOG_END)
        if death := _DEATH.search(logs):
            rank, how = int(death[1]), death[2].strip()
            died = Died(time.time(), 0, None, lost_with=f"its task in {slurm_job}: {how}", last_words=logs)
            node = rank // self._platform.ranks_per_node
            raise error_of(rank, {rank: died}, self._platform.world_size, f"node {node}, {job.nodes}")
        msg = f"{slurm_job}, which ran {name}, ended as {job.name} ({job.reason}) before its ranks could report anything"
        error = LaunchError(msg)
        if logs:
            error.add_note(f"its tasks wrote:\n{logs}")
        else:
            where = f"{self._folder.root} is on a file system that all nodes share"
            error.add_note(f"its tasks wrote nothing: check that {where}, or set PARAWRAP_LAUNCH_DIR to another folder")
        raise error

    def _raise_lost(self, hosts: Sequence[str]) -> NoReturn:
        """Raise the error for a lost node. `hosts` has the hostnames of the nodes, as far as they are known.

        Raises:
            RankDiedError: For the first rank of the lost node.
        """
        down = [node for node, host in enumerate(hosts) if queue.is_down(host)]
        node = down[0] if down else 0
        rank = node * self._platform.ranks_per_node
        died = Died(time.time(), 0, None, lost_with=f"its node, in Slurm job {self._number}")
        host = hosts[node] if node < len(hosts) else "unknown host"
        raise error_of(rank, {rank: died}, self._platform.world_size, f"node {node}, {host}")


class _Tail:
    """Reads a file while it grows. The file is opened for each read, because network file systems then show what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._begun = b""

    def new_bytes(self) -> bytes:
        """Return the bytes since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        return data

    def new_lines(self) -> list[bytes]:
        """Return the complete lines since the last call."""
        *lines, self._begun = (self._begun + self.new_bytes()).split(b"\n")
        return lines

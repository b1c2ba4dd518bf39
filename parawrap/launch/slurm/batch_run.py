"""The submitting process's view of a batch job: it follows the starts of the job, and reads how the ranks ended.

    files of the tasks ──► output, and outcomes of ranks ─┐
    output of srun ──────► deaths of ranks                ├──► the ending of a start ──► requeue, or the end
    scontrol ────────────► the state of the job ──────────┘

The job itself needs none of this: it runs to its end when this process has died.
"""

from __future__ import annotations

import contextlib
import logging
import math
import pickle
import re
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._job import Job
from parawrap.launch.attempts import may_restart, summary_of_attempt
from parawrap.launch.launch import Launch, start
from parawrap.launch.slurm import commands
from parawrap.launch.slurm.batch_job import submit
from parawrap.launch.slurm.launch_folder import Folder
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Ending,
    Outcome,
    Raised,
    Requeued,
    Returned,
    counts_as_echo,
    first_failure,
)
from parawrap.processes.output import Transcript
from parawrap.processes.settings import Settings

_LOOK_S, _LONGEST_LOOK_S = 0.05, 0.5  # pause between two reads of the folder; it grows while the job writes nothing
_POLL_S, _LONGEST_POLL_S = 1.0, 15.0  # pause between two calls of scontrol; it grows with time, as most failures come early
_END_POLL_S = 0.1  # once ranks have ended
_JOBS_PER_POLL = 20  # with more jobs, each is polled less often
_LATE_S = 5.0  # a file written at the job's end may appear this much later on a network file system
_LEAVING_S = 60.0  # for the tasks to exit; Slurm kills them after KillWait, usually 30 seconds
_STACKS_S, _QUIET_S = 5.0, 0.3
_LOG_END = 2000  # characters: about thirty lines, enough for a traceback

# What srun says of tasks that end by themselves, before it ends all others.
_ENDS_ALL = "_step_signal: Terminating"
_DEATH = re.compile(r"srun: (?:error: \S+:|StepId=\S+) tasks? ([\d,-]+): (?!running)(.+)")

_log = logging.getLogger("parawrap.launch")
_followed: set[BatchRun] = set()


def launch_batch(jobs: Sequence[Job], max_parallel: int | None = None) -> list[Launch[Any]]:
    """Submit calls as one batch job: several calls are a job array. Return one launch per call.

    Args:
        jobs: The calls, at least one, on equal platforms.
        max_parallel: The number of calls that may run at a time. None sets no limit.

    Raises:
        LaunchError: If Slurm refuses the job. The failed attempt leaves nothing behind.
    """
    platform = jobs[0].platform
    if platform.hang_timeout_s is not None:
        _log.warning("hang_timeout_s=%g has no effect on Slurm, which controls the ranks", platform.hang_timeout_s)
    folders = Folder.new(platform.name, len(jobs))
    try:
        runs = [BatchRun(job, folder) for job, folder in zip(jobs, folders, strict=True)]
        launches: list[Launch[Any]] = [Launch(job, run) for job, run in zip(jobs, runs, strict=True)]
        plan = pickle.dumps((jobs[0].sent_platform, replace(Settings.here(), environ=None)))
        numbers = submit(platform, folders, plan, max_parallel)
    except BaseException:
        for folder in folders:
            folder.remove()
        raise
    try:
        for launch, run, number in zip(launches, runs, numbers, strict=True):
            run.note_number(number)
            start(launch)
    except BaseException:
        commands.cancel_job(numbers[0].partition("_")[0])
        raise
    return launches


class BatchRun:
    """The ranks of one launch in a batch job. Implements `Run`.

    Args:
        job: The launch.
        folder: Its folder, which is removed at its end.

    Attributes:
        has_begun: True if the ranks of this start have met.
    """

    def __init__(self, job: Job, folder: Folder) -> None:
        self._job = job
        self._platform = job.platform
        self._folder = folder
        self._is_cancelled = False
        self._history: list[str] = []
        self.has_begun = False
        folder.call.write_bytes(job.pack().to_bytes())

    def note_number(self, number: str) -> None:
        """Store the number of the submitted job, before `supervise`."""
        self._number = number
        ranks = range(self._platform.world_size)
        self._files = [self._folder.task_files(number, rank) for rank in ranks]
        self._srun_log = self._folder.submitit / f"job-{number}.log"

    # -- any thread

    def cancel(self) -> None:
        self._is_cancelled = True

    def preempt(self) -> None:
        state = commands.job_state(self._number)
        with contextlib.suppress(OSError):  # the launch ends, and removes its folder
            if not state.waits and self._folder.has_begun(state.starts):  # a task that still starts would die of the signal
                commands.signal_job(self._number, "USR2")

    def state_of(self, rank: int) -> str:
        """Return "running": the tasks do not report the states of single ranks."""
        return "running"

    def stacks(self) -> dict[int, str]:
        if not self.has_begun:
            return {}
        files = [self._folder.stacks_of(rank) for rank in range(self._platform.world_size)]
        before = sizes = _sizes(files)
        commands.signal_job(self._number, "USR1")
        until = changed = time.monotonic()
        until += _STACKS_S
        while (now := time.monotonic()) < until and (sizes == before or now < changed + _QUIET_S):
            time.sleep(_LOOK_S)
            if (latest := _sizes(files)) != sizes:
                sizes, changed = latest, time.monotonic()
        return {rank: _text_of(file, start) for rank, (file, start) in enumerate(zip(files, before, strict=True))}

    # -- the thread of the launch

    def supervise(self, transcripts: Sequence[Transcript]) -> Ending:
        _followed.add(self)
        output = [
            (transcript, stream, _Tail(Path(path)))
            for transcript, files in zip(transcripts, self._files, strict=True)
            for stream, path in ((1, files.stdout), (2, files.stderr))
        ]
        start = 0
        try:
            while True:
                following = _Start(self, start, output)
                ending = following.follow()
                if ending is None:  # the job was requeued
                    start = following.next_start
                    continue
                self.has_begun = False
                ending = self._complete(ending, transcripts)
                if self._is_cancelled or not may_restart(ending, self._platform, self._folder.failures(start)):
                    return ending
                self._folder.mark_failed(start)
                if reason := commands.requeue_job(self._number):
                    return replace(ending, history=[*ending.history, f"Slurm refused to requeue the job: {reason}"])
                self._note(start, summary_of_attempt(ending, is_preempted=False))
        finally:
            _followed.discard(self)
            if not commands.job_state(self._number).is_over:
                commands.cancel_job(self._number)
            self._folder.remove()

    def _note(self, start: int, summary: str) -> None:
        self._history.append(f"attempt {start} {summary}")
        _log.warning("%s: %s; its ranks start again", self._job.name, self._history[-1])

    def _complete(self, ending: Ending, transcripts: Sequence[Transcript]) -> Ending:
        """Add the tracebacks of ranks to their transcripts, and the last output of those that died to their outcomes."""
        outcomes = dict(ending.outcomes)
        for rank, outcome in outcomes.items():
            if isinstance(outcome, Raised):
                transcripts[rank].record(outcome.traceback)
            elif isinstance(outcome, Died) and not outcome.last_words:
                outcomes[rank] = replace(outcome, last_words=transcripts[rank].last_words())
        return replace(ending, outcomes=outcomes, history=[*self._history, *ending.history])


class _Start:
    """One start of the job.

    Attributes:
        next_start: The number of the start that follows, once `follow` has returned None.
    """

    def __init__(self, run: BatchRun, start: int, output: Sequence[tuple[Transcript, int, _Tail]]) -> None:
        self._run = run
        self._start = start
        self._output = output
        self._platform = run._platform
        self._number = run._number
        self._srun_begun = len(_read(run._srun_log))  # a later start appends
        self._outcomes: dict[int, Outcome] = {}
        self._nodes = ""
        self._began_at = self._changed_at = self._polled_at = time.monotonic()
        self._ranks_began_at: float | None = None
        self._ended_at: float | None = None  # when the first sign of the end was seen
        self._over_at: float | None = None  # when Slurm said so
        self._timed_out = ""
        self._stacks: dict[int, str] = {}
        self.next_start = start

    def follow(self) -> Ending | None:
        """Wait for the end of this start. Return None if Slurm has requeued the job before."""
        while True:
            self._take_output()
            self._take_outcomes()
            self._check_limits()
            if self._ended_at is None and self._has_ended():
                self._ended_at = time.monotonic()
            if time.monotonic() >= self._polled_at + self._poll_pause_s():
                state = commands.job_state(self._number)
                self._polled_at = time.monotonic()  # scontrol may take long
                self._nodes = self._nodes or state.nodes  # a job that loses a node no longer lists it
                if state.starts > self._start:
                    return self._go_on(state.starts)
                if self._is_over(state):
                    self._take_output()
                    return self._ending(state)
            time.sleep(min(_LOOK_S + (time.monotonic() - self._changed_at) / 20, _LONGEST_LOOK_S))

    def _take_output(self) -> None:
        """Add the new output of the tasks to the transcripts."""
        names = {path.name for path in self._run._folder.submitit.iterdir()}
        for transcript, stream, tail in self._output:
            if tail.path.name in names and (data := tail.new_bytes()):
                transcript.write(stream, data)
                self._changed_at = time.monotonic()

    def _take_outcomes(self) -> None:
        """Read the files in which tasks have written how their ranks ended.

        Raises:
            LaunchError: If a task could not run this package.
        """
        for rank, files in enumerate(self._run._files):
            if rank in self._outcomes or not (data := _read(Path(files.result_pickle))):
                continue
            word, value = pickle.loads(data)
            if word != "success":
                self._nodes = self._nodes or commands.job_state(self._number).nodes
                error = LaunchError(f"{self._places()[rank]} cannot run parawrap: {value.strip().rpartition(chr(10))[2]}")
                error.add_note(f"the Python there is the one of this process, and must find torch and parawrap:\n{value}")
                raise error
            start, outcome = value
            if start == self._start:  # not one of an earlier start
                self._outcomes[rank] = outcome

    def _check_limits(self) -> None:
        run, limit = self._run, self._platform.timeout_min
        if not run.has_begun and run._folder.has_begun(self._start):
            run.has_begun = True
            self._ranks_began_at = time.monotonic()
            self._polled_at = -math.inf  # to know the nodes
        began = self._ranks_began_at
        if limit is not None and began is not None and self._ended_at is None and time.monotonic() > began + 60 * limit:
            self._timed_out = f"not done after timeout_min={limit:g} minutes"
            self._stacks = run.stacks()
            commands.cancel_job(self._number)
            self._ended_at = time.monotonic()
        if run._is_cancelled and self._ended_at is None:
            commands.cancel_job(self._number)
            self._ended_at = time.monotonic()

    def _has_ended(self) -> bool:
        """True if the outcomes of ranks, or the words of srun, mean that the tasks of this start end."""
        outcomes = self._outcomes.values()
        fails = any(not isinstance(each, (Returned, Requeued)) and not counts_as_echo(each) for each in outcomes)
        return fails or len(outcomes) == self._platform.world_size or bool(self._deaths())

    def _is_over(self, state: commands.JobState) -> bool:
        """True if the job has ended, and its files have arrived. End a job that does not end by itself."""
        now = time.monotonic()
        if not state.is_over:
            is_late = self._ended_at is not None and now > self._ended_at + _LEAVING_S
            if is_late:
                commands.cancel_job(self._number)
            return is_late and state.name == "UNKNOWN"  # without an answer of Slurm, nothing more can be done
        self._over_at = self._over_at or now
        self._take_outcomes()
        return self._ended_at is not None or self._has_ended() or now >= self._over_at + _LATE_S

    def _poll_pause_s(self) -> float:
        """Return the pause between two polls. It grows with time and with the number of jobs, and is short near the end."""
        if self._ended_at is not None:
            return _END_POLL_S
        pause_s = min(max(_POLL_S, (time.monotonic() - self._began_at) / 5), _LONGEST_POLL_S)
        return pause_s * max(1.0, len(_followed) / _JOBS_PER_POLL)

    def _deaths(self) -> dict[int, str]:
        """Return what srun says of the ranks that ended first, without a report."""
        said = _read(self._run._srun_log)[self._srun_begun :].decode(errors="replace").partition(_ENDS_ALL)[0]
        return {
            rank: how.strip()
            for ranks, how in _DEATH.findall(said)
            for rank in _numbers_in(ranks)
            if not isinstance(self._outcomes.get(rank), (Returned, Raised, Died, Requeued))
        }

    def _go_on(self, starts: int) -> Ending | None:
        """Follow the next start, unless this one has ended by a loss that the platform does not allow."""
        run = self._run
        run.has_begun = False
        self.next_start = starts
        if run._is_cancelled:
            commands.cancel_job(self._number)
            return Ending({}, cancelled=True)
        failures = run._folder.failures(starts)
        if failures > run._folder.failures(self._start):
            if failures > self._platform.max_restarts:
                commands.cancel_job(self._number)
                return self._lost()
            if len(run._history) < failures:
                run._note(self._start, "lost a node")
        return None

    # -- from the files and the state of a job to an ending

    def _ending(self, state: commands.JobState) -> Ending:
        """Return how the ranks ended.

        Raises:
            LaunchError: If something else than the ranks has ended the job.
        """
        outcomes = dict(self._outcomes)
        places = self._places()
        if self._run._is_cancelled:
            return Ending({}, cancelled=True)
        if self._timed_out:
            return Ending(outcomes, stacks=self._stacks, timed_out=self._timed_out)
        is_known = any(isinstance(each, (Raised, Died)) and not counts_as_echo(each) for each in outcomes.values())
        is_done = [type(each) for each in outcomes.values()] == [Returned] * self._platform.world_size
        if not is_known and not is_done:
            if state.name == "NODE_FAIL":
                return self._lost()
            self._raise_for(state)
            for rank, how in self._deaths().items():
                is_ended = rank in outcomes  # by SIGTERM, which did not come from Slurm
                outcomes[rank] = Died(math.inf, 0, -signal.SIGTERM) if is_ended else _death(how)
            if state.name == "COMPLETED" and self._ranks_began_at is not None:  # srun does not name tasks that exit with 0
                for rank in set(range(self._platform.world_size)) - set(outcomes):
                    outcomes[rank] = Died(math.inf, 0, 0)
            is_known = first_failure(outcomes) is not None
        history = []
        if state.name == "OUT_OF_MEMORY":
            history = [
                f"Slurm reports that job {self._number} ran out of memory; it had reserved {self._platform.ram} GB per node"
            ]
        if not is_known and any(isinstance(each, Requeued) for each in outcomes.values()):
            msg = f"Slurm did not requeue job {self._number}: the cluster needs JobRequeue=1, and the job no no-requeue"
            raise LaunchError(msg)
        if not is_known and not is_done:
            raise self._unexplained(state)
        for rank in range(self._platform.world_size):
            outcomes.setdefault(rank, Ended(time.time()))
        return Ending(outcomes, places=places, history=history)

    def _places(self) -> dict[int, str]:
        """Return the node and host of each rank."""
        hosts = commands.hosts_of(self._nodes) or ["unknown host"] * self._platform.n_nodes
        of_ranks = [rank // self._platform.ranks_per_node for rank in range(self._platform.world_size)]
        return {rank: f"node {node}, {hosts[node]}" for rank, node in enumerate(of_ranks)}

    def _raise_for(self, state: commands.JobState) -> None:
        """Raise the error of a final state that explains the end of the ranks."""
        name, job = self._run._job.name, f"Slurm job {self._number}"
        # Slurm forgets an array element that is cancelled before it starts.
        if state.name == "CANCELLED" or (state.name == "FORGOTTEN" and self._ranks_began_at is None):
            msg = f"the launch of {name} was cancelled by another process: {job} was removed from the queue"
            raise LaunchCancelledError(msg)
        if state.name in ("TIMEOUT", "DEADLINE"):
            stacks = {rank: _text_of(self._run._folder.stacks_of(rank)) for rank in range(self._platform.world_size)}
            said = "\n".join(f"rank {rank}:\n{text}" for rank, text in stacks.items() if text)
            msg = (
                f"{name} reached the time limit of {job}, {state.time_limit}{'. Stacks:' if said else ''}\n{said}".rstrip()
            )
            raise LaunchTimeoutError(msg, stacks=stacks)
        if state.name == "OUT_OF_MEMORY" and not self._deaths():
            msg = f"{name} used more memory than {job} had reserved, {self._platform.ram} GB per node"
            raise LaunchError(msg)

    def _unexplained(self, state: commands.JobState) -> LaunchError:
        msg = (
            f"Slurm job {self._number}, which ran {self._run._job.name}, ended as {state.name} ({state.reason}) before its "
            "ranks had returned"
        )
        error = LaunchError(msg)
        files = [self._run._srun_log, *(Path(path) for each in self._run._files for path in (each.stdout, each.stderr))]
        ends = [(path.name, _text_of(path).strip()[-_LOG_END:]) for path in files]
        error.add_note("\n".join(f"{name} ends with:\n{end}" for name, end in ends if end))
        root = self._run._folder.root
        error.add_note(f"all nodes must share the file system of {root}. PARAWRAP_LAUNCH_DIR names another folder")
        return error

    def _lost(self) -> Ending:
        """Return the ending of a job that has lost a node, whose first rank is the one that died."""
        hosts = commands.hosts_of(self._nodes)
        node = next((node for node, host in enumerate(hosts) if commands.is_down(host)), 0)
        rank = node * self._platform.ranks_per_node
        died = Died(0.0, 0, None, lost_with=f"its node, in Slurm job {self._number}")
        return Ending({rank: died}, places=self._places())


def _death(how: str) -> Died:
    """Return the death that srun reports as "exited", "Exited with exit code 7", or with the description of a signal."""
    code = None
    if exited := re.match(r"(?i)exited(?: with exit code (\d+))?", how):
        code = int(exited[1] or 0)
    else:
        for number in signal.valid_signals():
            if how.startswith(signal.strsignal(number) or "?"):
                code = -number
    return Died(math.inf, 0, code, lost_with="" if code is not None else f"its task: {how}")


def _numbers_in(text: str) -> Iterable[int]:
    """Return the numbers in a list such as ``0-2,5``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _text_of(path: Path, start: int = 0) -> str:
    return _read(path)[start:].decode(errors="replace")


def _sizes(files: Sequence[Path]) -> list[int]:
    return [len(_read(file)) for file in files]


class _Tail:
    """Reads a file while it grows. The file is opened for each read, because network file systems then show what is new."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def new_bytes(self) -> bytes:
        """Return the bytes since the last call."""
        with self.path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        self._position += len(data)
        return data

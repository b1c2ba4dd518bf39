"""The submitting process's view of a batch job.

It follows the starts of the job, and reads how the ranks ended.

    files of the tasks ──► output, and outcomes of ranks ─┐
    output of srun ──────► deaths of ranks                ├──► the ending of a start
    scontrol ────────────► the state of the job ──────────┘       ──► requeue, or the end

The job does not depend on this process: if it dies, the job runs to its end.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._job import Job
from parawrap.launch.attempts import may_restart, note_attempt, summary_of_attempt
from parawrap.launch.run import Run, RunOutput
from parawrap.launch.slurm import commands
from parawrap.launch.slurm.batch_job import submit
from parawrap.launch.slurm.job_start import JobStart, read_file, read_text, unreported_death
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
from parawrap.processes.settings import Settings

if TYPE_CHECKING:
    from submitit.core.utils import JobPaths

# Pause between two reads of the folder, on a file system that many nodes share
_FOLDER_POLL_S = 0.3
# Pause between two calls of scontrol. It grows with time, as most failures come early
_POLL_S, _LONGEST_POLL_S = 1.0, 15.0
_JOBS_PER_PAUSE = 20  # with more jobs, pauses are longer: one controller answers for all
# A file written at the job's end may appear this much later on a network file system
_FILE_DELAY_S = 5.0
# Until the tasks have exited. Slurm kills them after KillWait, usually 30 seconds
_TASK_EXIT_S = 60.0
# Rank 0 looks for a request once per second, and the other ranks look once per second whether rank
# 0 has passed one on. The rest is for a file system that shows new files late
_STACKS_S = 5.0
_NO_ANSWER = (
    f"no answer within {_STACKS_S:g} seconds: the rank, or rank 0, which passes the request on, is "
    "stopped, or runs code that holds the GIL"
)

_log = logging.getLogger("parawrap.launch")
# The runs that poll scontrol. The thread of each adds and removes it, in one atomic step each, and
# reads only the length
_followed: set[BatchRun] = set()


def start_batch(jobs: Sequence[Job], max_parallel: int | None = None) -> list[BatchRun]:
    """Submit calls as one batch job: several calls are a job array. Return one launch per call.

    Args:
        jobs: The calls, at least one, on equal platforms.
        max_parallel: The number of calls that may run at a time. None sets no limit.

    Raises:
        LaunchError: If Slurm refuses the job. The failed attempt leaves nothing behind.
    """
    platform = jobs[0].platform
    if platform.hang_timeout_s is not None:
        _log.warning(
            "hang_timeout_s=%g has no effect on Slurm, which controls the ranks",
            platform.hang_timeout_s,
        )
    folders = Folder.new(platform.name, len(jobs))
    try:
        runs = [BatchRun(job, folder) for job, folder in zip(jobs, folders, strict=True)]
        plan = pickle.dumps((platform.as_sent(), Settings.for_other_machines()))
        numbers = submit(platform, folders, plan, max_parallel)
    except BaseException:
        for folder in folders:
            folder.remove()
        raise
    try:
        for run, number in zip(runs, numbers, strict=True):
            run.number = number
            run.start()
    except BaseException:
        # The elements of an array are 7_0, 7_1, ...: 7 cancels all. Runs that have started remove
        # their folders
        whole_job, *_ = numbers[0].split("_")
        commands.cancel_job(whole_job)
        raise
    return runs


class BatchRun(Run):
    """The ranks of one launch in a batch job.

    Args:
        job: The call of the launch.
        folder: The folder of the launch. The run owns it, and removes it at the end.

    Attributes:
        number: Slurm's number of the submitted job. `start_batch` sets it before the run starts.
    """

    def __init__(self, job: Job, folder: Folder) -> None:
        # First: a call that cannot be sent leaves no log folder behind
        folder.call.write_bytes(job.pack().block.to_bytes())
        super().__init__(job, RunOutput.of(job.platform, job.name, job.number))
        self._platform = job.platform
        self._folder = folder
        self._is_cancelled = False
        self._history: list[str] = []
        self._requests = itertools.count(1)  # numbers of requests for stacks
        self.number = ""
        # `_supervise` sets these, because their paths have the number of the job
        self._start: JobStart  # the start that this run follows
        self._files: list[JobPaths]  # by rank
        self._taken: Counter[Path] = Counter()  # bytes of each file that the transcripts have

    # -- any thread

    def cancel(self) -> None:
        self._is_cancelled = True

    def preempt(self) -> None:
        start = commands.job_state(self.number).requeues
        with contextlib.suppress(OSError):  # the launch has ended, and has removed its folder
            # The signal would kill a task that has not set its handler yet
            if self._folder.has("begun", start):
                commands.signal_job(self.number, "USR2")

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that has not ended.

        The text of a rank that does not answer within some seconds says so.
        """
        if not self._has_begun:
            return {}
        until = time.monotonic() + _STACKS_S
        number = next(self._requests)
        start = self._start  # read once: the thread of the run may follow another one meanwhile
        # That thread adds outcomes. A set of the keys is made in one atomic step
        running = missing = {*range(self._platform.world_size)} - {*start.outcomes}
        answers: dict[int, str] = {}
        with contextlib.suppress(OSError):  # the launch has ended, and has removed its folder
            request = self._folder.request_stacks(start.number, number)
            while missing and time.monotonic() < until:
                time.sleep(_FOLDER_POLL_S)
                answers |= self._folder.answers(number, missing)
                missing = running - {*answers} - {*start.outcomes}
            # After Ctrl-C it stays until the folder is removed: ranks answer it once
            request.unlink()
        answers |= dict.fromkeys(missing, _NO_ANSWER)
        return dict(sorted(answers.items()))

    # -- the thread of the run

    def _supervise(self) -> Ending:
        from submitit.core.utils import JobPaths

        ranks = range(self._platform.world_size)
        self._files = [JobPaths(self._folder.submitit, self.number, rank) for rank in ranks]
        self._begin(0)
        _followed.add(self)
        try:
            return self._follow()
        finally:
            _followed.discard(self)
            self._end_job()
            self._folder.remove()

    def _begin(self, number: int) -> None:
        """Follow the start with this number."""
        # The flag first: while it is set, other threads request the stacks of `_start`
        self._has_begun = False
        self._start = JobStart(number, self._platform, self._folder, self.number)

    def _follow(self) -> Ending:
        """Wait for the end of the job, and return how its last start ended."""
        submitted_at = polled_at = time.monotonic()
        while True:
            # Read the files of the tasks
            self._take_output()
            self._take_outcomes()
            start = self._start
            if not self._has_begun and self._folder.has("begun", start.number):
                self._has_begun = True
                start.began_at = time.monotonic()
                # Poll at once, to know the nodes: a job that ends does not list all of them
                polled_at = -math.inf
            if not start.is_ending and start.shows_end():
                start.ended_at = time.monotonic()
            ending = self._interruption()
            if ending is not None:
                return ending

            # Read the state of the job, if it is time
            poll_at = polled_at + _poll_pause(time.monotonic() - submitted_at)
            if start.is_ending or time.monotonic() >= poll_at:
                ending = self._act_on_state(commands.job_state(self.number))
                if ending is not None:
                    return ending
                polled_at = time.monotonic()  # now, because scontrol may take long
            time.sleep(_FOLDER_POLL_S)

    def _take_output(self) -> None:
        """Add the new output of the tasks to the transcripts."""
        # One listing is cheaper than an attempt to open each file. Most may not exist yet
        names = os.listdir(self._folder.submitit)  # noqa: PTH208 (names only)
        for transcript, files in zip(self.output.transcripts, self._files, strict=True):
            for stream, path in ((1, files.stdout), (2, files.stderr)):
                if path.name not in names:
                    continue
                data = read_file(path, start=self._taken[path])
                if data:
                    self._taken[path] += len(data)
                    transcript.write(stream, data)

    def _take_outcomes(self) -> None:
        """Read the files of tasks that have reported how their ranks ended.

        Raises:
            LaunchError: If a task could not run this package.
        """
        outcomes = self._start.outcomes
        for rank, files in enumerate(self._files):
            if rank in outcomes:
                continue
            report = read_file(files.result_pickle)
            if not report:
                continue
            word, value = pickle.loads(report)
            if word != "success":  # submitit reports an error, and its traceback as the value
                # The error names the host of the rank
                self._start.note_hosts(commands.job_state(self.number))
                places = self._start.places()
                raise _error_of_task(places[rank], value)
            start_number, outcome = value
            # Otherwise the file is of an earlier start, and the task has not removed it yet
            if start_number == self._start.number:
                outcomes[rank] = outcome

    def _interruption(self) -> Ending | None:
        """Return the ending of a launch that was cancelled, or has reached its limit; else None."""
        if self._is_cancelled:
            return Ending.of_cancelled()
        limit_min = self._platform.timeout_min
        if limit_min is None:
            return None
        # Infinite until the ranks have met: time in the queue does not count
        limit_at = self._start.began_at + 60 * limit_min
        # If ranks end already, they report the reason
        if time.monotonic() < limit_at or self._start.is_ending:
            return None
        return Ending(
            {},
            timed_out=f"not done after timeout_min={limit_min:g} minutes",
            stacks=self.stacks(),
        )

    def _act_on_state(self, state: commands.JobState) -> Ending | None:
        """Follow the next start, or requeue a job that has failed, or return how the job ended.

        Return None while the job runs, and if it starts again.

        Raises:
            LaunchError: If something else than the ranks has ended the job.
        """
        start = self._start
        start.note_hosts(state)
        if state.requeues > start.number:
            return self._follow_next(state.requeues)
        # Without an answer of the controller, the state is unknown. This process must not withhold
        # the results of tasks that have ended
        exit_limit = start.ended_at + _TASK_EXIT_S
        is_silent = state.name == "UNKNOWN" and time.monotonic() > exit_limit
        if not (state.is_over or is_silent):
            return None

        # The job is over: read the files that its tasks wrote before their exit
        self._take_outcomes()
        if not start.shows_end():
            time.sleep(_FILE_DELAY_S)
            self._take_outcomes()
        self._take_output()

        # Requeue the job after a failure, or return how it ended
        failures = self._failures_before(start.number)
        try:
            ending = self._complete(self._final_outcomes(state))
        except LaunchError as error:
            # With NODE_FAIL, `_outcome_of_lost_node` has raised it: the number of the lost node is
            # unknown, so it can blame no rank. The job may start again all the same
            if state.name != "NODE_FAIL" or failures >= self._platform.max_restarts:
                raise
            refusal = self._requeue("lost a node")
            if refusal is None:
                return None
            error.add_note(refusal)
            raise
        if not may_restart(ending, self._platform, failures):
            return ending
        refusal = self._requeue(summary_of_attempt(ending, is_preempted=False))
        if refusal is None:
            return None
        return replace(ending, history=[*ending.history, refusal])

    def _requeue(self, summary: str) -> str | None:
        """Requeue the job after a failed start, and follow its next start.

        Return a note for the error if Slurm refuses; None otherwise.
        """
        self._folder.mark("failed", self._start.number)  # first: tasks of the next start count it
        reason = commands.requeue_job(self.number)
        if reason is not None:
            return f"Slurm refused to requeue the job: {reason}"
        note_attempt(self.job, self._history, self._start.number, summary)
        self._begin(self._start.number + 1)
        return None

    def _follow_next(self, number: int) -> Ending | None:
        """Follow a later start of a job that something else than this process has requeued.

        Return how the launch ended instead, if the last start failed, as after the loss of a node,
        and `max_restarts` allows no more. A user's requeue or a preemption is not a failure.

        Raises:
            LaunchError: If nothing says why Slurm started the job again.
        """
        start = self._start
        earlier = self._failures_before(start.number)
        # Slurm counts the new start before slurmstepd has logged why it ended the last one. Until
        # then, the last one counts as a failure
        until = time.monotonic() + _FILE_DELAY_S
        while True:
            failures = self._failures_before(number)
            is_explained = failures <= earlier or start.has_lost_node()
            if is_explained or time.monotonic() > until:
                break
            time.sleep(_FOLDER_POLL_S)
        if failures > earlier:
            if failures > self._platform.max_restarts:
                return self._complete(self._outcome_of_lost_node())
            summary = "lost a node" if start.has_lost_node() else "was ended by Slurm"
            note_attempt(self.job, self._history, start.number, summary)
        self._begin(number)
        return None

    def _failures_before(self, start: int) -> int:
        return self._folder.failures(start, self.number)

    def _end_job(self) -> None:
        """End the job if it has not ended, and take its last output."""
        if not commands.job_state(self.number).is_over:
            commands.cancel_job(self.number)
            # The tasks write to the folder, which is removed next
            until = time.monotonic() + _TASK_EXIT_S
            while not commands.job_state(self.number).is_over and time.monotonic() < until:
                time.sleep(_FOLDER_POLL_S)
        self._take_output()

    # -- from the files and the state of a job to an ending

    def _final_outcomes(self, state: commands.JobState) -> dict[int, Outcome]:
        """Return how the ranks ended.

        Raises:
            LaunchError: If something else than the ranks has ended the job.
        """
        outcomes = dict(self._start.outcomes)
        size = self._platform.world_size
        n_returned = sum(isinstance(each, Returned) for each in outcomes.values())
        failures = [each for each in outcomes.values() if isinstance(each, (Raised, Died))]
        is_cause_known = not all(counts_as_echo(each) for each in failures)
        # The reports of the ranks explain the end better than the state of the job
        if is_cause_known or n_returned == size:
            return outcomes
        if state.name == "NODE_FAIL":
            return self._outcome_of_lost_node()
        self._raise_for(state)
        # Deaths of ranks without a report, or with a report of a SIGTERM
        outcomes |= self._start.deaths()
        if state.name == "COMPLETED" and self._has_begun:  # otherwise no rank may have started
            for rank in range(size):  # srun does not name tasks that exit with 0
                outcomes.setdefault(rank, unreported_death(0))
        if first_failure(outcomes) is None:
            raise self._error_of_end(state)
        return outcomes

    def _outcome_of_lost_node(self) -> dict[int, Outcome]:
        """Return the outcome of the first rank on the node that the job has lost.

        Raises:
            LaunchError: If no node is known to be lost. No rank is blamed then.
        """
        start, number, name = self._start, self.number, self.job.name
        node = start.number_of_lost_node()
        if node is not None:
            died = unreported_death(None, lost_with=f"its node, in Slurm job {number}")
            return {node * self._platform.ranks_per_node: died}
        state = commands.job_state(number)
        if state.name == "NODE_FAIL" or start.log_names_lost_node():  # its number is unknown
            hosts = ", ".join(start.hosts) or "its nodes"
            msg = (
                f"Slurm job {number}, which ran {name}, has lost a node, and Slurm does not say "
                f"which one of {hosts}: see the log of slurmctld"
            )
        else:
            msg = (
                f"Slurm started job {number}, which ran {name}, again (start {state.requeues}), "
                "and nothing reports a lost node, a preemption, or 'scontrol requeue': see the log "
                "of slurmctld"
            )
        error = LaunchError(
            f"{msg}. max_restarts={self._platform.max_restarts} allows no more starts"
        )
        for note in self._history:
            error.add_note(note)
        raise error

    def _complete(self, outcomes: dict[int, Outcome]) -> Ending:
        """Return the ending of a start, from the outcomes of some ranks. The others were ended.

        The transcripts get the tracebacks of ranks. Each death gets the last output of its rank.
        """
        for rank, transcript in enumerate(self.output.transcripts):
            outcome = outcomes.setdefault(rank, Ended(time.time()))
            if isinstance(outcome, Raised):
                transcript.record(outcome.traceback)
            elif isinstance(outcome, Died) and not outcome.last_words:
                outcomes[rank] = replace(outcome, last_words=transcript.last_words())
        return Ending(outcomes, places=self._start.places(), history=[*self._history])

    def _raise_for(self, state: commands.JobState) -> None:
        """Raise an error if the final state alone explains why the ranks have ended."""
        name, job = self.job.name, f"Slurm job {self.number}"
        # Slurm forgets an array element that is cancelled before it starts
        never_started = state.name == "FORGOTTEN" and not self._has_begun
        if state.name == "CANCELLED" or never_started:
            msg = (
                f"the launch of {name} was cancelled by another process: {job} was removed from "
                "the queue"
            )
            raise LaunchCancelledError(msg)
        if state.name in ("TIMEOUT", "DEADLINE"):
            ranks = range(self._platform.world_size)
            stacks = {rank: read_text(self._folder.stacks_of(rank)) for rank in ranks}
            shown = "".join(f"\nrank {rank}:\n{text}" for rank, text in stacks.items() if text)
            msg = f"{name} reached the time limit of {job}, {state.fields['TimeLimit']}"
            if shown:
                msg += f". Stacks:{shown.rstrip()}"
            raise LaunchTimeoutError(msg, stacks=stacks)
        # Only without a death: srun reports a rank that was killed for its memory as a death
        if state.name == "OUT_OF_MEMORY" and not self._start.deaths():
            msg = (
                f"{name} used more memory than {job} had reserved, {self._platform.ram} GB per node"
            )
            raise LaunchError(msg)

    def _error_of_end(self, state: commands.JobState) -> LaunchError:
        """Return the error of a job that ended without an outcome that explains it."""
        if any(isinstance(each, Requeued) for each in self._start.outcomes.values()):
            msg = (
                f"Slurm did not requeue job {self.number}: the cluster needs JobRequeue=1, and "
                "the job no no-requeue"
            )
            return LaunchError(msg)
        msg = (
            f"Slurm job {self.number}, which ran {self.job.name}, ended as {state.name} "
            f"({state.fields.get('Reason')}) before its ranks had returned"
        )
        error = LaunchError(msg)
        lines = ["the last output of srun and of the tasks:", read_text(self._start.log)]
        lines += [each.last_words() for each in self.output.transcripts]
        error.add_note("\n".join(filter(None, lines)))
        error.add_note(
            f"all nodes must share the file system of {self._folder.root}. PARAWRAP_LAUNCH_DIR "
            "names another folder"
        )
        return error


def _poll_pause(age_s: float) -> float:
    """Return the pause between two calls of scontrol, from the age of the job."""
    pause_s = min(max(_POLL_S, age_s / 5), _LONGEST_POLL_S)
    return pause_s * max(1.0, len(_followed) / _JOBS_PER_PAUSE)


def _error_of_task(place: str, traceback: str) -> LaunchError:
    """Return the error of a task that ended before it could run this package."""
    *_, reason = traceback.strip().rpartition("\n")
    error = LaunchError(f"{place} cannot run parawrap: {reason}")
    error.add_note(
        "the Python there is the one of this process, and must find torch and "
        f"parawrap:\n{traceback}"
    )
    return error

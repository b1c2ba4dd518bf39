"""The submitting process's view of a batch job.

It follows the starts of the job, and reads how the ranks ended.

    files of the tasks ──► output, and outcomes of ranks ─┐
    output of srun ──────► deaths of ranks                ├──► the ending of a start
    scontrol ────────────► the state of the job ──────────┘       ──► requeue, or the end

The job itself needs none of this: it runs to its end when this process has died.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import os
import pickle
import re
import signal
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from parawrap.errors import LaunchCancelledError, LaunchError, LaunchTimeoutError
from parawrap.launch._job import Job
from parawrap.launch.attempts import may_restart, summary_of_attempt
from parawrap.launch.run import Run, RunOutput
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
from parawrap.processes.settings import Settings

# Pause between two reads of the folder, on a file system that many nodes share
_FOLDER_POLL_S = 0.3
# Pause between two calls of scontrol. It grows with time, as most failures come early.
_POLL_S, _LONGEST_POLL_S = 1.0, 15.0
_JOBS_PER_POLL = 20  # with more jobs, each is polled less often
# A file written at the job's end may appear this much later on a network file system
_FILE_DELAY_S = 5.0
_TASK_EXIT_S = 60.0  # for the tasks to exit; Slurm kills them after KillWait, usually 30 seconds
# Rank 0 looks for requests once per second, and the other ranks once per second for its word. The
# rest is for a file system that shows new files late.
_STACKS_S = 5.0
_NO_ANSWER = (
    f"no answer within {_STACKS_S:g} seconds: the rank is stopped, or runs code that holds the "
    "GIL. So may rank 0, which passes the request on"
)

# What srun says of tasks that end by themselves, before it ends all others.
_ENDS_ALL = "_step_signal: Terminating"
_DEATH = re.compile(r"srun: (?:error: \S+:|StepId=\S+) tasks? ([\d,-]+): (?!running)(.+)")
# The words of srun and of slurmstepd, if their own node is still there. Only srun names the node.
_LOST_NODES = re.compile(r"srun: error: Node failure on (\S+)")
_LOST_A_NODE = re.compile(r"srun: error: Node failure on|DUE TO NODE FAILURE")

_log = logging.getLogger("parawrap.launch")
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
        commands.cancel_job(numbers[0].partition("_")[0])
        raise
    return runs


class BatchRun(Run):
    """The ranks of one launch in a batch job.

    Args:
        job: The launch.
        folder: Its folder, which is removed at its end.

    Attributes:
        number: The number of the submitted job, set before the start of the run.
    """

    def __init__(self, job: Job, folder: Folder) -> None:
        super().__init__(job, RunOutput.of(job.platform, job.name, job.number))
        self._platform = job.platform
        self._folder = folder
        self._is_cancelled = False
        self._history: list[str] = []
        self._requests = itertools.count(1)  # of stacks; the tasks count from 1
        self.number = ""
        folder.call.write_bytes(job.pack().block.to_bytes())

    # -- any thread

    def cancel(self) -> None:
        self._is_cancelled = True

    def preempt(self) -> None:
        start = commands.job_state(self.number).starts
        with contextlib.suppress(OSError):  # the launch ends, and removes its folder
            if self._folder.has("begun", start):  # a task that still starts would die of the signal
                commands.signal_job(self.number, "USR2")

    def stacks(self) -> dict[int, str]:
        """Return the stacks of every rank that has not ended.

        The text of a rank that does not answer within some seconds says so.
        """
        if not self._has_begun:
            return {}
        until = time.monotonic() + _STACKS_S
        number = next(self._requests)
        outcomes = self._outcomes  # of this start: `_begin` makes a new dictionary
        # The thread of the launch adds to it. A set of its keys is made in one step.
        running = {*range(self._platform.world_size)} - {*outcomes}
        answers: dict[int, str] = {}
        with contextlib.suppress(OSError):  # the launch ends, and removes its folder
            request = self._folder.request_stacks(self._start, number)
            while (missing := running - {*answers} - {*outcomes}) and time.monotonic() < until:
                time.sleep(_FOLDER_POLL_S)
                answers |= self._folder.answers(number, missing)
            request.unlink()
        running -= {*outcomes} - {*answers}
        return {rank: answers.get(rank, _NO_ANSWER) for rank in sorted(running)}

    # -- the thread of the launch

    def _supervise(self) -> Ending:
        import submitit.core.utils

        ranks = range(self._platform.world_size)
        self._transcripts = self.output.transcripts
        self._files = [
            submitit.core.utils.JobPaths(self._folder.submitit, self.number, rank) for rank in ranks
        ]
        self._taken: Counter[Path] = Counter()  # bytes of output
        self._srun_log = self._folder.log(self.number)
        self._begin(0)
        _followed.add(self)
        try:
            return self._follow()
        finally:
            _followed.discard(self)
            self._end_job()
            self._folder.remove()

    def _begin(self, start: int) -> None:
        """Follow another start of the job."""
        self._start = start
        self._srun_begun = len(_read(self._srun_log))  # a later start appends
        self._outcomes: dict[int, Outcome] = {}
        self._hosts: list[str] = []  # of all nodes, in order; empty until Slurm has listed all
        self._has_begun = False
        self._began_at = math.inf  # when the ranks met
        self._ended_at = math.inf  # when the first sign of the end was seen

    def _follow(self) -> Ending:
        """Wait for the end of the job."""
        submitted_at = polled_at = time.monotonic()
        while True:
            self._take_output()
            self._take_outcomes()
            if not self._has_begun and self._folder.has("begun", self._start):
                self._has_begun = True
                self._began_at = time.monotonic()
                polled_at = -math.inf  # to know the nodes
            if self._ended_at == math.inf and self._has_ended():
                self._ended_at = time.monotonic()
            if (ending := self._interruption()) is not None:
                return ending
            pause_s = min(max(_POLL_S, (time.monotonic() - submitted_at) / 5), _LONGEST_POLL_S)
            pause_s *= max(1.0, len(_followed) / _JOBS_PER_POLL)
            if self._ended_at < math.inf or time.monotonic() >= polled_at + pause_s:
                ending = self._judge(commands.job_state(self.number))
                if ending is not None:
                    return ending
                polled_at = time.monotonic()  # scontrol may take long
            time.sleep(_FOLDER_POLL_S)

    def _take_output(self) -> None:
        """Add the new output of the tasks to the transcripts."""
        names = os.listdir(self._folder.submitit)  # noqa: PTH208 (names only)
        for transcript, files in zip(self._transcripts, self._files, strict=True):
            for stream, path in ((1, files.stdout), (2, files.stderr)):
                if path.name in names and (data := _read(path, self._taken[path])):
                    self._taken[path] += len(data)
                    transcript.write(stream, data)

    def _take_outcomes(self) -> None:
        """Read the files in which tasks have written how their ranks ended.

        Raises:
            LaunchError: If a task could not run this package.
        """
        for rank, files in enumerate(self._files):
            if rank in self._outcomes or not (data := _read(files.result_pickle)):
                continue
            word, value = pickle.loads(data)
            if word != "success":
                self._see_hosts(commands.job_state(self.number))
                error = LaunchError(
                    f"{self._places()[rank]} cannot run parawrap: "
                    f"{value.strip().rpartition(chr(10))[2]}"
                )
                error.add_note(
                    "the Python there is the one of this process, and must find torch and "
                    f"parawrap:\n{value}"
                )
                raise error
            start, outcome = value
            if start == self._start:  # not one of an earlier start
                self._outcomes[rank] = outcome

    def _has_ended(self) -> bool:
        """True if the tasks of this start end.

        The outcomes of ranks, or the words of srun, say so.
        """
        outcomes = self._outcomes.values()
        fails = any(
            not isinstance(each, (Returned, Requeued)) and not counts_as_echo(each)
            for each in outcomes
        )
        return fails or len(outcomes) == self._platform.world_size or bool(self._deaths())

    def _deaths(self) -> dict[int, str]:
        """Return what srun says of the ranks that ended first, without a report."""
        said = _text_of(self._srun_log, self._srun_begun).partition(_ENDS_ALL)[0]
        return {
            rank: how.strip()
            for ranks, how in _DEATH.findall(said)
            for rank in _numbers_in(ranks)
            if not isinstance(self._outcomes.get(rank), (Returned, Raised, Died, Requeued))
        }

    def _interruption(self) -> Ending | None:
        """Return the ending of a launch that was cancelled, or that has reached its own limit."""
        limit = self._platform.timeout_min
        if self._is_cancelled:
            return Ending({}, cancelled=True)
        if limit is None or time.monotonic() < self._began_at + 60 * limit:
            return None
        if self._ended_at < math.inf:  # the ranks end anyway, and how they do says more
            return None
        return Ending(
            {}, timed_out=f"not done after timeout_min={limit:g} minutes", stacks=self.stacks()
        )

    def _judge(self, state: commands.JobState) -> Ending | None:
        """Return the ending of the launch. Return None while the job runs, and if it starts again.

        Raises:
            LaunchError: If something else than the ranks has ended the job.
        """
        self._see_hosts(state)
        if state.starts > self._start:
            return self._go_on(state.starts)
        has_no_answer = state.name == "UNKNOWN" and time.monotonic() > self._ended_at + _TASK_EXIT_S
        if not (state.is_over or has_no_answer):
            return None
        self._take_outcomes()
        if not self._has_ended():
            time.sleep(_FILE_DELAY_S)
            self._take_outcomes()
        self._take_output()
        failures = self._failures(self._start)
        try:
            ending = self._complete(self._final_outcomes(state))
        except LaunchError as error:
            # The node that is lost may be unknown. The job may start again all the same.
            if state.name == "NODE_FAIL" and failures < self._platform.max_restarts:
                if reason := self._requeue("lost a node"):
                    error.add_note(reason)
                else:
                    return None
            raise
        if not may_restart(ending, self._platform, failures):
            return ending
        if reason := self._requeue(summary_of_attempt(ending, is_preempted=False)):
            return replace(ending, history=[*ending.history, reason])
        return None

    def _requeue(self, summary: str) -> str | None:
        """Requeue the job after a failed start, and follow its next start.

        Return a note for the error if Slurm refuses.
        """
        self._folder.mark("failed", self._start)  # first: the tasks of the next start count it
        if reason := commands.requeue_job(self.number):
            return f"Slurm refused to requeue the job: {reason}"
        self._note(summary)
        self._begin(self._start + 1)
        return None

    def _see_hosts(self, state: commands.JobState) -> None:
        """Note the hosts of this start.

        A job that ends, or has lost a node, does not list all its nodes.
        """
        if not self._hosts:
            hosts = commands.hosts_of(state.fields.get("NodeList", ""))
            if len(hosts) == self._platform.n_nodes:
                self._hosts = hosts

    def _go_on(self, starts: int) -> Ending | None:
        """Follow the next start, unless this one has ended by a loss that the platform forbids.

        Raises:
            LaunchError: If nothing says why Slurm started the job again.
        """
        earlier = self._failures(self._start)
        # Slurm counts the start before slurmstepd has written why it ended the last one.
        until = time.monotonic() + _FILE_DELAY_S
        while (failures := self._failures(starts)) > earlier and not self._has_lost_node():
            if time.monotonic() > until:
                break
            time.sleep(_FOLDER_POLL_S)
        if failures > earlier:
            if failures > self._platform.max_restarts:
                return self._complete(self._lost())
            self._note("lost a node" if self._has_lost_node() else "was ended by Slurm")
        self._begin(starts)
        return None

    def _failures(self, start: int) -> int:
        return self._folder.failures(start, self.number)

    def _note(self, summary: str) -> None:
        self._history.append(f"attempt {self._start} {summary}")
        _log.warning("%s: %s; its ranks start again", self.job.name, self._history[-1])

    def _end_job(self) -> None:
        """End the job if it has not ended, and take its last output."""
        if not commands.job_state(self.number).is_over:
            commands.cancel_job(self.number)
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
        outcomes, size = dict(self._outcomes), self._platform.world_size
        is_done = [type(each) for each in outcomes.values()] == [Returned] * size
        if is_done or any(
            isinstance(each, (Raised, Died)) and not counts_as_echo(each)
            for each in outcomes.values()
        ):
            return outcomes
        if state.name == "NODE_FAIL":
            return self._lost()
        self._raise_for(state)
        for rank, how in self._deaths().items():
            is_ended = rank in outcomes  # by SIGTERM, which did not come from Slurm
            outcomes[rank] = Died(math.inf, 0, -signal.SIGTERM) if is_ended else _death(how)
        if state.name == "COMPLETED" and self._has_begun:
            for rank in range(size):  # srun does not name tasks that exit with 0
                outcomes.setdefault(rank, Died(math.inf, 0, 0))
        if first_failure(outcomes) is None:
            raise self._error_of_end(state)
        return outcomes

    def _lost(self) -> dict[int, Outcome]:
        """Return the outcome of the first rank on the node that the job has lost.

        Raises:
            LaunchError: If no node is known to be lost. No rank is blamed then.
        """
        job = f"Slurm job {self.number}"
        if (node := self._lost_node()) is not None:
            died = Died(0.0, 0, None, lost_with=f"its node, in {job}")
            return {node * self._platform.ranks_per_node: died}
        state = commands.job_state(self.number)
        if state.name == "NODE_FAIL" or _LOST_A_NODE.search(self._words()):
            msg = (
                f"{job}, which ran {self.job.name}, has lost a node, and Slurm does not say which "
                f"one of {', '.join(self._hosts) or 'its nodes'}: see the log of slurmctld"
            )
        else:
            msg = (
                f"Slurm started job {self.number}, which ran {self.job.name}, again "
                f"(start {state.starts}), and nothing reports a lost node, a preemption, or "
                "'scontrol requeue': see the log of slurmctld"
            )
        error = LaunchError(
            f"{msg}. max_restarts={self._platform.max_restarts} allows no more starts"
        )
        for note in self._history:
            error.add_note(note)
        raise error

    def _has_lost_node(self) -> bool:
        is_said = _LOST_A_NODE.search(self._words()) is not None
        return is_said or self._lost_node() is not None

    def _lost_node(self) -> int | None:
        """Return the number of the first node that is known to be lost.

        A restart alone is not enough: an operator or a plugin may have requeued the job.
        """
        if self._platform.n_nodes == 1 and _LOST_A_NODE.search(self._words()):
            return 0
        named = {
            host.partition(".")[0]
            for nodes in _LOST_NODES.findall(self._words())
            for host in commands.hosts_of(nodes)
        }
        is_lost = (
            host.partition(".")[0] in named or commands.is_down(host) for host in self._hosts
        )
        return next((node for node, lost in enumerate(is_lost) if lost), None)

    def _words(self) -> str:
        """Return what srun and slurmstepd said of this start."""
        return self._folder.words_of_starts(self.number).get(self._start, "")

    def _complete(self, outcomes: dict[int, Outcome]) -> Ending:
        """Complete the transcripts by tracebacks of ranks, and deaths by their last output."""
        for rank in range(self._platform.world_size):
            outcome = outcomes.setdefault(rank, Ended(time.time()))
            if isinstance(outcome, Raised):
                self._transcripts[rank].record(outcome.traceback)
            elif isinstance(outcome, Died) and not outcome.last_words:
                outcomes[rank] = replace(outcome, last_words=self._transcripts[rank].last_words())
        return Ending(outcomes, places=self._places(), history=[*self._history])

    def _places(self) -> dict[int, str]:
        """Return the node and host of each rank."""
        hosts = self._hosts or ["unknown host"] * self._platform.n_nodes
        places = {}
        for rank in range(self._platform.world_size):
            node = rank // self._platform.ranks_per_node
            places[rank] = f"node {node}, {hosts[node]}"
        return places

    def _raise_for(self, state: commands.JobState) -> None:
        """Raise the error of a final state that explains the end of the ranks."""
        name, job = self.job.name, f"Slurm job {self.number}"
        # Slurm forgets an array element that is cancelled before it starts.
        if state.name == "CANCELLED" or (state.name == "FORGOTTEN" and not self._has_begun):
            msg = (
                f"the launch of {name} was cancelled by another process: {job} was removed from "
                "the queue"
            )
            raise LaunchCancelledError(msg)
        if state.name in ("TIMEOUT", "DEADLINE"):
            files = [self._folder.stacks_of(rank) for rank in range(self._platform.world_size)]
            stacks = {rank: _text_of(file) for rank, file in enumerate(files)}
            said = "".join(f"\nrank {rank}:\n{text}" for rank, text in stacks.items() if text)
            msg = (
                f"{name} reached the time limit of {job}, "
                f"{state.fields['TimeLimit']}{said and '. Stacks:'}{said}"
            )
            raise LaunchTimeoutError(msg.rstrip(), stacks=stacks)
        if state.name == "OUT_OF_MEMORY" and not self._deaths():
            msg = (
                f"{name} used more memory than {job} had reserved, {self._platform.ram} GB per node"
            )
            raise LaunchError(msg)

    def _error_of_end(self, state: commands.JobState) -> LaunchError:
        """Return the error of a job whose end no outcome explains."""
        if any(isinstance(each, Requeued) for each in self._outcomes.values()):
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
        said = [_text_of(self._srun_log), *(each.last_words() for each in self._transcripts)]
        error.add_note(
            "\n".join(["the last output of srun and of the tasks:", *filter(None, said)])
        )
        root = self._folder.root
        error.add_note(
            f"all nodes must share the file system of {root}. PARAWRAP_LAUNCH_DIR names another "
            "folder"
        )
        return error


def _death(how: str) -> Died:
    """Return the death that srun reports.

    Its words are "exited", "Exited with exit code 7", or the description of a signal.
    """
    exited = re.match(r"(?i)exited(?: with exit code (\d+))?", how)
    codes = [
        -number
        for number in signal.valid_signals()
        if how.startswith(signal.strsignal(number) or "?")
    ]
    code = int(exited[1] or 0) if exited else next(iter(codes), None)
    return Died(math.inf, 0, code, lost_with="" if code is not None else f"its task: {how}")


def _numbers_in(text: str) -> Iterable[int]:
    """Return the numbers in a list such as ``0-2,5``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def _read(path: Path, start: int = 0) -> bytes:
    """Return a file from this position on, or nothing before it exists.

    It is opened for each read, because network file systems then show what is new.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""


def _text_of(path: Path, start: int = 0) -> str:
    return _read(path, start).decode(errors="replace")

"""One start of a batch job: how its ranks have ended so far, and how Slurm describes them.

    files of the tasks ──► outcomes of ranks
    log of srun        ──► deaths of ranks, lost nodes
    scontrol, sinfo    ──► hosts, nodes that are down

A requeued job starts again. `BatchRun` then follows another `JobStart`.

Deaths come from the log, which has no times: `at` is infinite, so deaths come after all failures
that ranks have reported themselves. Process ids of other machines mean nothing here: `pid` is 0.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable
from pathlib import Path

from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.slurm import commands
from parawrap.launch.slurm.launch_folder import Folder
from parawrap.processes.outcomes import (
    Died,
    Ended,
    Outcome,
    Requeued,
    Returned,
    counts_as_echo,
)

# The line of srun before it ends all other tasks, because one has failed
_ENDS_ALL = "_step_signal: Terminating"
# The line of srun about tasks that have ended. Such lines also list tasks that still run
_DEATH = re.compile(r"srun: (?:error: \S+:|StepId=\S+) tasks? ([\d,-]+): (?!running)(.+)")
# The lines of srun and of slurmstepd, if their own node is still there. Only srun names the node
_LOST_NODES = re.compile(r"srun: error: Node failure on (\S+)")
_LOST_A_NODE = re.compile(r"srun: error: Node failure on|DUE TO NODE FAILURE")


class JobStart:
    """One start of a job, for the thread of the launch.

    Other threads copy the keys of `outcomes`, which is one step. Only the thread of the launch adds
    to them, and it removes none.

    All starts append to one log, `log`. `deaths` reads the bytes that were added since this object
    was made. The methods about lost nodes read the part from the line that begins this start to the
    line that begins the next one.

    Attributes:
        number: The number of earlier starts.
        outcomes: How ranks ended, as their tasks report it.
        log: The log of the batch script, srun, and slurmstepd.
        hosts: The hosts of all nodes, in order. Empty until Slurm has listed all.
        began_at: When the ranks met, by the monotonic clock. Infinite before.
        ended_at: When this process saw the first sign of the end. Infinite before.
    """

    def __init__(self, number: int, platform: PlatformFields, folder: Folder, job: str) -> None:
        self.number = number
        self.outcomes: dict[int, Outcome] = {}
        self.log = folder.log(job)
        self.hosts: list[str] = []
        self.began_at = math.inf
        self.ended_at = math.inf
        self._platform = platform
        self._folder = folder
        self._job = job
        self._log_begin = len(read_file(self.log))

    @property
    def is_ending(self) -> bool:
        """True once a sign of the end was seen."""
        return self.ended_at < math.inf

    def shows_end(self) -> bool:
        """True if the outcomes of ranks, or the log of srun, show that all tasks end."""
        outcomes = self.outcomes.values()
        if len(outcomes) == self._platform.world_size:
            return True
        for outcome in outcomes:
            # The task of an echo waits before it exits: srun must first report the rank with the
            # cause
            waits_for_others = isinstance(outcome, (Returned, Requeued)) or counts_as_echo(outcome)
            if not waits_for_others:
                return True
        return bool(self.deaths())

    def deaths(self) -> dict[int, Died]:
        """Return the deaths of the ranks that ended first, and did not report how."""
        # The tasks that the log lists after that line were ended by srun
        log, *_ = read_text(self.log, self._log_begin).partition(_ENDS_ALL)
        deaths: dict[int, Died] = {}
        for ranks, words in _DEATH.findall(log):
            for rank in _numbers_in(ranks):
                reported = self.outcomes.get(rank)
                if reported is None:
                    deaths[rank] = _read_death(words.strip())
                elif isinstance(reported, Ended):
                    # The rank reported a SIGTERM. It did not come from Slurm, as srun had not yet
                    # ended tasks
                    deaths[rank] = unreported_death(-signal.SIGTERM)
        return deaths

    # -- nodes

    def note_hosts(self, state: commands.JobState) -> None:
        """Note the hosts from the state of the job, unless they are known.

        A job that ends, or has lost a node, does not list all its nodes.
        """
        if self.hosts:
            return
        hosts = commands.hosts_of(state.fields.get("NodeList", ""))
        if len(hosts) == self._platform.n_nodes:
            self.hosts = hosts

    def places(self) -> dict[int, str]:
        """Return the node and host of each rank."""
        hosts = self.hosts or ["unknown host"] * self._platform.n_nodes
        places = {}
        for rank in range(self._platform.world_size):
            node = rank // self._platform.ranks_per_node
            places[rank] = f"node {node}, {hosts[node]}"
        return places

    def log_names_lost_node(self) -> bool:
        """True if srun or slurmstepd says that the job has lost a node."""
        return _LOST_A_NODE.search(self._log_of_start()) is not None

    def has_lost_node(self) -> bool:
        """True if a node is lost, also if its number is unknown."""
        return self.log_names_lost_node() or self.number_of_lost_node() is not None

    def number_of_lost_node(self) -> int | None:
        """Return the number of the first node that is known to be lost; None without one.

        A restart alone shows no lost node: an operator or a plugin may have requeued the job.
        """
        if self._platform.n_nodes == 1 and self.log_names_lost_node():
            return 0
        named: set[str] = set()
        for nodes in _LOST_NODES.findall(self._log_of_start()):
            named.update(commands.short_name(host) for host in commands.hosts_of(nodes))
        for node, host in enumerate(self.hosts):
            if commands.short_name(host) in named or commands.is_down(host):
                return node
        return None

    def _log_of_start(self) -> str:
        """Return the part of the log that belongs to this start."""
        return self._folder.logs_of_starts(self._job).get(self.number, "")


def _read_death(words: str) -> Died:
    """Return the death that srun reports.

    Its words are "exited", "Exited with exit code 7", or the description of a signal.
    """
    exited = re.match(r"(?i)exited(?: with exit code (\d+))?", words)
    if exited:
        return unreported_death(int(exited[1] or 0))
    description = words.removesuffix(" (core dumped)")
    for number in signal.valid_signals():
        if signal.strsignal(number) == description:
            return unreported_death(-number)
    return unreported_death(None, lost_with=f"its task: {words}")


def _numbers_in(text: str) -> Iterable[int]:
    """Return the numbers in a list such as ``0-2,5``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def unreported_death(code: int | None, lost_with: str = "") -> Died:
    """Return a death that no rank has reported: its time and its process are not known here."""
    # An infinite time: a failure with a known time counts as the first one
    return Died(at=math.inf, pid=0, code=code, lost_with=lost_with)


def read_file(path: Path, start: int = 0) -> bytes:
    """Return the bytes of a file from this position on, and none before the file exists.

    The file is opened for each read, because network file systems then show its new bytes.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""


def read_text(path: Path, start: int = 0) -> str:
    """Return the text of a file from this position on, and none before the file exists."""
    return read_file(path, start).decode(errors="replace")

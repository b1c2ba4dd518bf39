"""One start of a batch job: how its ranks have ended so far, and what Slurm says of them.

    files of the tasks ──► outcomes of ranks
    log of srun        ──► deaths of ranks, lost nodes
    scontrol, sinfo    ──► hosts, nodes that are down

A requeued job starts again. `BatchRun` then follows another `JobStart`.

Deaths come from the log, which says when no rank died: `at` is infinite, after all failures that
ranks have reported themselves. Process ids of other machines mean nothing here: `pid` is 0.
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
# The line of srun about tasks that have ended. It also lists tasks that still run
_DEATH = re.compile(r"srun: (?:error: \S+:|StepId=\S+) tasks? ([\d,-]+): (?!running)(.+)")
# The words of srun and of slurmstepd, if their own node is still there. Only srun names the node
_LOST_NODES = re.compile(r"srun: error: Node failure on (\S+)")
_LOST_A_NODE = re.compile(r"srun: error: Node failure on|DUE TO NODE FAILURE")


class JobStart:
    """One start of a job, for the thread of the launch.

    Other threads copy the keys of `outcomes`, which is one step. Only the thread of the launch adds
    to them, and it removes none.

    srun and slurmstepd write to one log, to which all starts append. `deaths` reads it from the
    place where it ended when this object was made. The methods about lost nodes read what stands
    between the lines with which this start and the next one begin.

    Attributes:
        number: The number of earlier starts.
        outcomes: How ranks ended, as their tasks report it.
        log: The log of the batch script and srun, to which all starts append.
        hosts: The hosts of all nodes, in order. Empty until Slurm has listed all.
        began_at: When the ranks met, by the monotonic clock. Infinite before.
        ended_at: When the first sign of the end was seen. Infinite before.
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
        """True if the outcomes of ranks, or the words of srun, say that all tasks end."""
        outcomes = self.outcomes.values()
        if len(outcomes) == self._platform.world_size:
            return True
        for outcome in outcomes:
            # A rank with an echo stays for a while: srun must first report the rank with the cause
            waits_for_others = isinstance(outcome, (Returned, Requeued)) or counts_as_echo(outcome)
            if not waits_for_others:
                return True
        return bool(self.deaths())

    def deaths(self) -> dict[int, Died]:
        """Return the deaths of the ranks that ended first, and did not report how."""
        # srun ends the tasks that its log lists after that line
        log, *_ = read_text(self.log, self._log_begin).partition(_ENDS_ALL)
        deaths: dict[int, Died] = {}
        for ranks, how in _DEATH.findall(log):
            for rank in _numbers_in(ranks):
                reported = self.outcomes.get(rank)
                if reported is None:
                    deaths[rank] = _death(how.strip())
                elif isinstance(reported, Ended):
                    # The rank reported a SIGTERM, which did not come from Slurm
                    deaths[rank] = Died(at=math.inf, pid=0, code=-signal.SIGTERM)
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
        """Return the number of the first node that is known to be lost.

        A restart alone shows no lost node: an operator or a plugin may have requeued the job.
        """
        if self._platform.n_nodes == 1 and self.log_names_lost_node():
            return 0
        named: set[str] = set()
        for nodes in _LOST_NODES.findall(self._log_of_start()):
            named.update(map(_short_name, commands.hosts_of(nodes)))
        for node, host in enumerate(self.hosts):
            if _short_name(host) in named or commands.is_down(host):
                return node
        return None

    def _log_of_start(self) -> str:
        """Return what srun and slurmstepd wrote of this start."""
        return self._folder.logs_of_starts(self._job).get(self.number, "")


def _short_name(host: str) -> str:
    """Return a hostname without its domain, so that both spellings of a host compare equal."""
    return host.partition(".")[0]


def _death(how: str) -> Died:
    """Return the death that srun reports.

    Its words are "exited", "Exited with exit code 7", or the description of a signal.
    """
    exited = re.match(r"(?i)exited(?: with exit code (\d+))?", how)
    if exited:
        return Died(at=math.inf, pid=0, code=int(exited[1] or 0))
    for number in signal.valid_signals():
        description = signal.strsignal(number)
        # srun may add "(core dumped)"
        if description and how.startswith(description):
            return Died(at=math.inf, pid=0, code=-number)
    return Died(at=math.inf, pid=0, code=None, lost_with=f"its task: {how}")


def _numbers_in(text: str) -> Iterable[int]:
    """Return the numbers in a list such as ``0-2,5``."""
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        yield from range(int(first), int(last or first) + 1)


def read_file(path: Path, start: int = 0) -> bytes:
    """Return a file from this position on, or nothing before it exists.

    It is opened for each read, because network file systems then show what is new.
    """
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read()
    except FileNotFoundError:
        return b""


def read_text(path: Path, start: int = 0) -> str:
    """Return the text of a file from this position on, or nothing before it exists."""
    return read_file(path, start).decode(errors="replace")

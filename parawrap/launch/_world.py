"""The place of a rank in its world.

In a world of torchrun, srun, or mpirun, environment variables have it.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parawrap.launch.inheritance import is_inherited

_PORTS = range(20000, 32768)  # below the ephemeral ports of Linux


@dataclass(frozen=True)
class RankPlace:
    """A rank's numbers in its world. `ranks_per_node` is 0 if it is unknown."""

    global_rank: int
    local_rank: int
    node: int
    world_size: int
    ranks_per_node: int
    restart: int = 0

    @classmethod
    def of(cls, rank: int, ranks_per_node: int, n_nodes: int, restart: int = 0) -> RankPlace:
        """Return the place of a rank on equal nodes with consecutive ranks."""
        node, local_rank = divmod(rank, ranks_per_node)
        return cls(rank, local_rank, node, n_nodes * ranks_per_node, ranks_per_node, restart)

    @property
    def is_on_one_machine(self) -> bool:
        """True if all ranks run on one machine."""
        return self.ranks_per_node == self.world_size


@dataclass(frozen=True, kw_only=True)
class World(RankPlace):
    """One process's place in a world that another launcher started.

    Attributes:
        name: The name of that launcher, for messages.
        variable: The variable that has the number of ranks, for messages.
        master_addr: The host of the store. Without MASTER_ADDR, it is 127.0.0.1 if all ranks run on
            one machine, and None if they may run on several.
        master_port: The port of the store. None without MASTER_PORT and without a variable that
            identifies the job.
        hosts_store: True if this rank must open the store. The agent, torchrun's own process on a
            node, may have one already.
        has_launcher: False for a world of one rank that only RANK and WORLD_SIZE show. Pods and
            notebooks have these variables too.
    """

    name: str
    variable: str
    master_addr: str | None
    master_port: int | None
    hosts_store: bool
    has_launcher: bool


class _LauncherVariables(NamedTuple):
    """The environment variables of one launcher. Each field but the first is named for its value.

    Without a variable for the node, ranks count as filling one node after the other. The variables
    of `job` identify the world among those of the same host.
    """

    name: str
    global_rank: str
    world_size: str
    local_rank: str
    local_size: str
    node: str | None
    job: tuple[str, ...]


# A step is the tasks of one srun within a job. srun sets SLURM_STEP_NUM_TASKS in every step. An
# sbatch script or a salloc shell is at most a step of one task. MPICH sets no variable that
# identifies a job.
_TABLES = (
    _LauncherVariables(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK",
        ("TORCHELASTIC_RUN_ID",),
    ),
    _LauncherVariables(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", None, ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _LauncherVariables(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _LauncherVariables(
        "mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", None, (),
    ),
)  # fmt: skip


def find_world(environ: Mapping[str, str] = os.environ) -> World | None:
    """Return this process's place in its world. Return None if no launcher started it.

    A program that a rank of parawrap has started is in no world.

    >>> environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    >>> find_world(environ).global_rank
    1
    """
    if is_inherited(environ):
        return None
    for table in _TABLES:
        rank, world_size = environ.get(table.global_rank, ""), environ.get(table.world_size, "")
        if not (rank.isdecimal() and world_size.isdecimal()):
            continue
        # With one rank, srun or mpirun may have started the script or the shell that launches
        if table.name == "torchrun" or int(world_size) > 1:
            return _read_world(table, environ)
    return None


def _read_world(table: _LauncherVariables, environ: Mapping[str, str]) -> World:
    rank, world_size = int(environ[table.global_rank]), int(environ[table.world_size])
    # The launcher may have left the variable out: then the node counts as the first
    known_node = None if table.node is None else _number(environ, table.node, 0)
    per_node: int | None = 1
    if world_size > 1:
        per_node = _ranks_on(known_node or 0, environ.get(table.local_size, ""))
    node = known_node
    if node is None:
        # Ranks fill one node after the other. With an unknown number per node, all are on the first
        node = rank // (per_node or world_size)
    master_addr = environ.get("MASTER_ADDR") or _first_host(environ)
    if not master_addr and per_node == world_size:
        master_addr = "127.0.0.1"
    restarts_of_job = _number(environ, "SLURM_RESTART_COUNT", 0)
    return World(
        name=table.name,
        variable=f"{table.world_size}={world_size}",
        global_rank=rank,
        local_rank=_number(environ, table.local_rank, rank),
        node=node,
        world_size=world_size,
        ranks_per_node=per_node or 0,
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", restarts_of_job),
        master_addr=master_addr,
        master_port=_number(environ, "MASTER_PORT", 0) or _common_port(table, environ),
        hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        has_launcher=world_size > 1 or "TORCHELASTIC_RUN_ID" in environ,
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "")
    return int(value) if value.isdecimal() else default


def _ranks_on(node: int, counts: str) -> int | None:
    """Return the number of ranks on a node, from the text of a launcher; None if it has no number.

    ``2(x3),1`` in Slurm means two on each of three nodes and one on the fourth.
    """
    by_node: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        by_node += [int(count)] * int(times or 1)
    if node < len(by_node):
        return by_node[node]
    # Other launchers give one number, which holds for all nodes
    return by_node[0] if by_node else None


def _first_host(environ: Mapping[str, str]) -> str | None:
    """Return the first host in the list of Slurm; None if there is no list.

    ``rack[0-1]node[07-09,12],other`` begins with rack0node07.
    """
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    # The text before the first comma that is not within brackets
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", hosts)
    if first is None:
        return None
    # Each pair of brackets becomes the first number in it
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group())


def _common_port(table: _LauncherVariables, environ: Mapping[str, str]) -> int | None:
    """Derive a port from the job's identifier, so that all ranks choose the same one.

    Return None if nothing identifies the job.
    """
    job = "/".join(environ.get(name, "") for name in table.job)
    if not job.strip("/"):
        return None
    # Not `hash`, which differs between processes
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]

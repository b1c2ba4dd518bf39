"""The world that torchrun, srun or mpirun put this process in, read from the environment.

Each of them is a table of variables. This file knows the tables; it refuses to know what is done with a world.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["World", "surrounding_world"]

_PORTS = range(20000, 60000)


class World(NamedTuple):
    """One process's place in a world that something else started.

    Attributes:
        name: what started it, for messages.
        hosts_store: whether rank 0 of this world has to open the store itself (torchrun's agent has opened one already).
    """

    name: str
    global_rank: int
    local_rank: int
    node: int
    world_size: int
    ranks_per_node: int
    restart: int
    master_addr: str
    master_port: int
    hosts_store: bool


class _Table(NamedTuple):
    name: str
    global_rank: str
    world_size: str
    local_rank: str
    local_size: str
    node: str
    job: tuple[str, ...]


# srun sets SLURM_STEP_NUM_TASKS in every step; an sbatch script, or a shell from salloc, is a step of one task or of none.
_TABLES = (
    _Table("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", ("TORCHELASTIC_RUN_ID",)),
    _Table(
        "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    _Table(
        "srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ),
    _Table("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_NODE", ("PMI_FD", "PMI_PORT")),
)  # fmt: skip


def surrounding_world(environ: Mapping[str, str] = os.environ) -> World | None:
    """The world of this process; None where it was started alone.

    >>> surrounding_world({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}).global_rank
    1
    """
    for table in _TABLES:
        if not (environ.get(table.global_rank, "").isdecimal() and environ.get(table.world_size, "").isdecimal()):
            continue
        if table.name == "torchrun" or int(environ[table.world_size]) > 1:
            return _world(table, environ)
    return None


def _world(table: _Table, environ: Mapping[str, str]) -> World:
    rank = int(environ[table.global_rank])
    return World(
        name=table.name,
        global_rank=rank,
        local_rank=_number(environ, table.local_rank, rank),
        node=_number(environ, table.node, 0),
        world_size=int(environ[table.world_size]),
        ranks_per_node=_number(environ, table.local_size, int(environ[table.world_size])),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT", _number(environ, "SLURM_RESTART_COUNT", 0)),
        master_addr=environ.get("MASTER_ADDR") or _first_host(environ) or "127.0.0.1",
        master_port=_number(environ, "MASTER_PORT", _agreed_port(table, environ)),
        hosts_store=rank == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
    )


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = environ.get(name, "").split("(")[0]  # Slurm writes 2(x3) for two tasks on each of three nodes
    return int(value) if value.isdecimal() else default


def _first_host(environ: Mapping[str, str]) -> str | None:
    """The first of Slurm's hosts: ``node[07-09,12],other`` is node07 before all others."""
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not hosts:
        return None
    prefix, bracket, rest = hosts.partition("[")
    if not bracket or "," in prefix:
        return prefix.split(",")[0]
    numbers, _, suffix = rest.partition("]")
    return prefix + numbers.split(",")[0].split("-")[0] + suffix.split(",")[0]


def _agreed_port(table: _Table, environ: Mapping[str, str]) -> int:
    """A port that every rank of one job computes alike: nobody tells them one."""
    job = "/".join(environ.get(name, "") for name in table.job)
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]

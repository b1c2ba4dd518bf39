"""The world of another launcher: its ranks read their places from the launcher's variables."""

from __future__ import annotations

import pytest

from parawrap.launch._world import find_world

# The variables of each launcher in rank 3 of 4, with two nodes of two ranks each.
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
    "ROLE_RANK": "3", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
ALLOCATION = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SRUN = ALLOCATION | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_RESTART_COUNT": "1",
}  # fmt: skip
BATCH_SCRIPT = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SALLOC_SHELL = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "node07",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node07-998@1",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
    "PMI_FD": "9",
}


def worlds_of(environ):
    """Return the worlds of all four ranks of a job, each read from the rank's own numbers."""
    worlds = []
    for rank in range(4):
        own = {"RANK": rank, "OMPI_COMM_WORLD_RANK": rank, "SLURM_PROCID": rank, "PMI_RANK": rank}
        own |= {
            "LOCAL_RANK": rank % 2,
            "OMPI_COMM_WORLD_LOCAL_RANK": rank % 2,
            "SLURM_LOCALID": rank % 2,
        }
        own |= {
            "MPI_LOCALRANKID": rank,
            "OMPI_COMM_WORLD_NODE_RANK": rank % 2,
            "PMI_FD": 6 + 3 * rank,
        }
        own |= {"GROUP_RANK": rank // 2, "SLURM_NODEID": rank // 2}
        worlds.append(
            find_world(
                environ | {name: str(value) for name, value in own.items() if name in environ}
            )
        )
    return worlds


def masters_of(environ):
    """Return the master addresses and ports that the ranks read."""
    return {(world.master_addr, world.master_port) for world in worlds_of(environ)}


@pytest.mark.parametrize(
    ("environ", "name", "restart", "per_node"),
    [
        (TORCHRUN, "torchrun", 2, 2),
        (SRUN, "srun", 1, 2),
        (OPEN_MPI, "mpirun", 0, 2),
        (MPICH, "mpiexec", 0, 4),
    ],
    ids=["torchrun", "srun", "mpirun", "mpiexec"],
)
def test_each_rank_reads_its_place(environ, name, restart, per_node):
    """Torchrun counts restarts, Slurm counts requeues, and MPI launchers count nothing."""
    worlds = worlds_of(environ)
    assert {
        (world.name, world.world_size, world.ranks_per_node, world.restart) for world in worlds
    } == {(name, 4, per_node, restart)}
    places = [(rank, rank % per_node, rank // per_node) for rank in range(4)]
    assert [(world.global_rank, world.local_rank, world.node) for world in worlds] == places


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "first", "WORLD_SIZE": "2"},
        BATCH_SCRIPT,
        SALLOC_SHELL,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_one_process_is_no_world(environ):
    """Incomplete variables, an sbatch script, an salloc shell, and single-rank srun or mpirun jobs
    are not worlds.
    """
    assert find_world(environ) is None


def test_innermost_launcher_counts():
    assert {world.name for world in worlds_of(SRUN | TORCHRUN)} == {"torchrun"}


def test_unknown_host_is_no_guess():
    """Ranks of one machine meet there; ranks in a Slurm allocation on the first
    node of their step.
    """
    assert {found for found, _ in masters_of(OPEN_MPI)} == {None}
    assert {found for found, _ in masters_of(OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})} == {
        "127.0.0.1"
    }
    assert {found for found, _ in masters_of(BATCH_SCRIPT | OPEN_MPI)} == {"node07"}
    assert masters_of(MPICH) == {("127.0.0.1", None)}  # MPICH's ranks share no identifier


def test_first_host_of_node_list():
    forms = {
        "a,b,node[1-2]": "a",
        "gpu-a[1-2]-ib,other": "gpu-a1-ib",
        "rack[2,4]node[08-09]-ib,x[1-2]": "rack2node08-ib",
    }
    for nodes, first in forms.items():
        assert {found for found, _ in masters_of(SRUN | {"SLURM_STEP_NODELIST": nodes})} == {first}


def test_each_job_has_its_own_port():
    """Each job has its own port, and all ranks of a job read the same one.

    MASTER_ADDR and MASTER_PORT override the computed address.
    """
    for environ, variable in (
        (SRUN, "SLURM_JOB_ID"),
        (SRUN, "SLURM_STEP_ID"),
        (OPEN_MPI, "PMIX_NAMESPACE"),
    ):
        masters = [masters_of(environ | {variable: str(number)}) for number in range(20)]
        assert [len(each) for each in masters] == [1] * 20
        assert len(set.union(*masters)) == 20
        assert masters_of(environ | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}) == {
            ("head", 1234)
        }


def test_slurm_counts_are_read():
    """2(x3) means two tasks on each of three nodes. Unequal nodes are not taken for one machine."""
    for per_node, size, ranks in ("4", 4, [4]), ("1(x4)", 4, [1]), ("2(x2),1", 5, [1, 2]):
        world = find_world(
            SRUN | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_STEP_NUM_TASKS": str(size)}
        )
        assert world.ranks_per_node in ranks

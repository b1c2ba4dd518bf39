"""The world of another launcher: its ranks read it from variables, and agree on a session in its store."""

from __future__ import annotations

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from parawrap import LaunchError, LaunchTimeoutError, Platform, wrapper
from parawrap.launch._world import World, surrounding_world
from parawrap.launch.rank._exchange_outcomes import agree_on_session
from parawrap.launch.rank._signed_values import SignedStore, Signer

# The variables of each launcher in rank 3 of 4, with two nodes of two ranks each.
TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "ROLE_RANK": "3",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
ALLOCATION = {
    "SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[07-08]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip
SRUN = ALLOCATION | {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "node[07-08]", "SLURM_RESTART_COUNT": "1",
}  # fmt: skip
BATCH_SCRIPT = ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SALLOC_SHELL = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_STEP_NODELIST": "node07",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "PMIX_NAMESPACE": "prterun-node07-998@1",
}  # fmt: skip
MPICH = {
    "PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9",
}  # fmt: skip
MPICH_ON_TWO_NODES = MPICH | {"MPI_LOCALNRANKS": "2"}


def ranks_of(environ: dict[str, str]) -> list[World]:
    """Return the worlds of all four ranks of a job, each read from the rank's own numbers."""
    worlds = []
    for rank in range(4):
        own = {"RANK": rank, "OMPI_COMM_WORLD_RANK": rank, "SLURM_PROCID": rank, "PMI_RANK": rank}
        own |= {"LOCAL_RANK": rank % 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank % 2, "SLURM_LOCALID": rank % 2}
        own |= {"MPI_LOCALRANKID": rank, "OMPI_COMM_WORLD_NODE_RANK": rank % 2, "PMI_FD": 6 + 3 * rank}
        own |= {"GROUP_RANK": rank // 2, "SLURM_NODEID": rank // 2}
        world = surrounding_world(environ | {name: str(value) for name, value in own.items() if name in environ})
        assert world is not None
        worlds.append(world)
    return worlds


@pytest.mark.parametrize(
    ("environ", "name"), [(TORCHRUN, "torchrun"), (SRUN, "srun"), (OPEN_MPI, "mpirun"), (MPICH, "mpiexec")]
)
def test_each_launcher_is_recognised(environ, name):
    """The world has the name of its launcher."""
    assert [world.name for world in ranks_of(environ)] == [name] * 4


@pytest.mark.parametrize("environ", [TORCHRUN, SRUN, OPEN_MPI], ids=["torchrun", "srun", "mpirun"])
def test_every_rank_reads_its_place(environ):
    """Each of four ranks on two nodes reads its global rank, local rank, and node."""
    worlds = ranks_of(environ)
    assert [(world.global_rank, world.local_rank, world.node) for world in worlds] == [
        (0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)
    ]  # fmt: skip
    assert {(world.world_size, world.ranks_per_node) for world in worlds} == {(4, 2)}


def test_every_rank_of_mpich_on_one_machine_reads_its_place():
    """On one node, the local rank equals the global rank."""
    worlds = ranks_of(MPICH)
    assert [(world.global_rank, world.local_rank, world.node) for world in worlds] == [(i, i, 0) for i in range(4)]
    assert {(world.world_size, world.ranks_per_node) for world in worlds} == {(4, 4)}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "first", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        ALLOCATION,
        BATCH_SCRIPT,
        SALLOC_SHELL,
        SRUN | {"SLURM_STEP_NUM_TASKS": "1"},
        OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        MPICH | {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_a_single_process_has_no_world(environ):
    """Incomplete variables, an sbatch script, an salloc shell, and single-rank srun or mpirun jobs are not worlds."""
    assert surrounding_world(environ) is None


def test_a_torchrun_of_one_is_a_world():
    """A torchrun job with one rank is a world, because the user chose torchrun."""
    world = surrounding_world({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert world is not None
    assert (world.world_size, world.ranks_per_node) == (1, 1)


def test_torchrun_within_a_slurm_step_is_torchrun():
    """The innermost launcher determines the world."""
    assert [world.name for world in ranks_of(SRUN | TORCHRUN)] == ["torchrun"] * 4


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH_ON_TWO_NODES, MPICH | {"MPI_LOCALNRANKS": ""}])
def test_an_unknown_host_is_not_guessed(environ):
    """If the ranks may run on several machines and no variable names the first one, the master address is unknown."""
    assert {world.master_addr for world in ranks_of(environ)} == {None}


def test_ranks_of_one_machine_meet_there():
    """If all ranks run on one machine, they need no variables to meet."""
    one_machine = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert {world.master_addr for world in ranks_of(one_machine) + ranks_of(MPICH)} == {"127.0.0.1"}


def test_mpich_on_several_machines_needs_a_port():
    """MPICH's ranks on several machines share no identifier to derive a port from, unless MASTER_PORT names one."""
    assert {world.master_port for world in ranks_of(MPICH_ON_TWO_NODES)} == {None}
    named = MPICH_ON_TWO_NODES | {"MASTER_PORT": "1234"}
    assert {world.master_port for world in ranks_of(named)} == {1234}


def test_a_launch_names_the_missing_variables(monkeypatch):
    """LaunchError names MASTER_ADDR and MASTER_PORT before any rank waits for another one."""
    for name, value in MPICH_ON_TWO_NODES.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LaunchError, match=r"mpiexec started 4 ranks, .* set MASTER_ADDR .* MASTER_PORT"):
        wrapper(Platform(device="cpu"))(int)()


def test_mpirun_uses_the_first_node_of_its_slurm_allocation():
    """Open MPI sets no host variable, so the master address comes from Slurm."""
    assert {world.master_addr for world in ranks_of(BATCH_SCRIPT | OPEN_MPI)} == {"node07"}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node07", "node07"),
        ("node07,node08", "node07"),
        ("node[07-09,12],x", "node07"),
        ("node[12,07-09]", "node12"),
        ("a,node[07-09]", "a"),
        ("a,b,node[1-2]", "a"),
        ("gpu-a[1-2]-ib,other", "gpu-a1-ib"),
        ("gpu-a[3]", "gpu-a3"),
        ("node[007-010]", "node007"),
        ("login.cluster.org,node[1-2]", "login.cluster.org"),
        ("rack[0-1]node[1-3]", "rack0node1"),
        ("rack[2,4]node[08-09]-ib,x[1-2]", "rack2node08-ib"),
    ],
)
def test_the_first_host_of_a_slurm_node_list_is_the_master(nodes, first):
    """The first host is read from each of Slurm's short forms of host lists."""
    assert {world.master_addr for world in ranks_of(SRUN | {"SLURM_STEP_NODELIST": nodes})} == {first}


def test_the_hosts_of_the_step_win_over_those_of_the_job():
    """A step can run on only some nodes of its job."""
    assert ranks_of(SRUN | {"SLURM_JOB_NODELIST": "head,node[07-08]"})[0].master_addr == "node07"


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI, MPICH], ids=["srun", "mpirun", "mpiexec"])
def test_master_addr_and_master_port_are_used(environ):
    """MASTER_ADDR and MASTER_PORT override the computed address."""
    worlds = ranks_of(environ | {"MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert {(world.master_addr, world.master_port) for world in worlds} == {("head", 1234)}


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI, MPICH], ids=["srun", "mpirun", "mpiexec"])
def test_all_ranks_of_a_job_agree_on_a_port(environ):
    """Each rank computes the same port above 1024, because the launcher sets none."""
    (port,) = {world.master_port for world in ranks_of(environ)}
    assert 1024 < port < 65536


@pytest.mark.parametrize(
    ("environ", "variable", "others"),
    [
        (SRUN, "SLURM_JOB_ID", range(4712, 4732)),
        (SRUN, "SLURM_STEP_ID", range(1, 21)),
        (OPEN_MPI, "PMIX_NAMESPACE", [f"prterun-node07-{pid}@1" for pid in range(20)]),
    ],
)
def test_different_jobs_get_different_ports(environ, variable, others):
    """Two jobs, or two steps of one job, on one node use different ports."""
    ports = {ranks_of(environ | {variable: str(other)})[0].master_port for other in others}
    assert len(ports) == 20


@pytest.mark.parametrize(
    ("per_node", "world_size", "ranks_per_node"), [("2(x2)", "4", 2), ("4", "4", 4), ("1(x4)", "4", 1)]
)
def test_slurms_counts_per_node_are_understood(per_node, world_size, ranks_per_node):
    """Slurm's short form is parsed: 2(x3) means two tasks on each of three nodes."""
    world = surrounding_world(SRUN | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_STEP_NUM_TASKS": world_size})
    assert world is not None
    assert world.ranks_per_node == ranks_per_node


@pytest.mark.parametrize(("per_node", "world_size"), [("3,1", "4"), ("1,3", "4"), ("2(x2),1", "5")])
def test_unequal_nodes_are_not_taken_for_one_machine(per_node, world_size):
    """With unequal nodes, ranks_per_node is below world_size, so the world does not use loopback only."""
    world = surrounding_world(SRUN | {"SLURM_STEP_TASKS_PER_NODE": per_node, "SLURM_STEP_NUM_TASKS": world_size})
    assert world is not None
    assert world.ranks_per_node < world.world_size


@pytest.mark.parametrize(("environ", "restart"), [(TORCHRUN, 2), (SRUN, 1), (OPEN_MPI, 0), (MPICH, 0)])
def test_restart_is_read_from_the_launcher(environ, restart):
    """Torchrun counts restarts, Slurm counts requeues, and MPI launchers count nothing."""
    assert {world.restart for world in ranks_of(environ)} == {restart}


@pytest.mark.parametrize(
    ("environ", "hosts"),
    [
        (TORCHRUN, [False] * 4),
        ({name: value for name, value in TORCHRUN.items() if name != "TORCHELASTIC_USE_AGENT_STORE"}, [True] + [False] * 3),
        (SRUN, [True] + [False] * 3),
        (OPEN_MPI, [True] + [False] * 3),
    ],
)
def test_rank_0_hosts_the_store_unless_an_agent_does(environ, hosts):
    """If torchrun's agent hosts a store, no rank does; otherwise rank 0 does."""
    assert [world.hosts_store for world in ranks_of(environ)] == hosts


def test_the_current_environment_is_read(monkeypatch):
    """Variables that change after the import are read."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    world = surrounding_world()
    assert world is not None
    assert world.global_rank == 1


def test_a_session_depends_on_a_fresh_number_of_each_rank():
    """All ranks of a world agree on its session, the next world has another one, and the store is left empty."""
    store, signer = dist.HashStore(), Signer(b"secret")
    worlds = ranks_of(SRUN)
    with ThreadPoolExecutor(4) as pool:
        first, second = (
            set(pool.map(lambda world: agree_on_session(store, world, signer, 30.0), worlds)) for _ in range(2)
        )
    assert len(first | second) == 2
    assert store.num_keys() == 0


def test_the_list_of_an_earlier_world_is_refused():
    """A rank that does not find its own number in the signed list raises LaunchError."""
    store, signer = dist.HashStore(), Signer(b"secret")
    numbers = {rank: bytes(16) for rank in range(4)}
    SignedStore(store, "parawrap/1/session", signer).set("all", pickle.dumps(numbers))
    with pytest.raises(LaunchError, match=r"the value of rank 3 .* is not signed"):
        agree_on_session(store, ranks_of(SRUN)[3], signer, 30.0)


def test_a_rank_that_does_not_arrive_is_named():
    """LaunchTimeoutError names the first missing rank after timeout_min."""
    with pytest.raises(LaunchTimeoutError, match="rank 1 of 4 did not begin the call"):
        agree_on_session(dist.HashStore(), ranks_of(SRUN)[0], Signer(b"secret"), 0.05)

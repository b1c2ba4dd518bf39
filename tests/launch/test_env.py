"""The env launcher: a decorated function joins the world of torchrun, srun, or mpirun.

The ranks of such a world run this file as their script, which runs the scenarios in order. A scenario checks itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from parawrap import LaunchError, Platform, RankResults, Wrapper, current_rank, functional, wrapper
from parawrap.errors import LaunchTimeoutError, PlatformError, RankDiedError, UnsendableError
from parawrap.launch._world import surrounding_world
from tests.helpers import worlds
from tests.helpers.processes import notes_of
from tests.helpers.waiting import eventually

HERE = Path(__file__).resolve()
SCENARIOS = {}


def torchrun(folder, *names, script=HERE, **options):
    """Run the scenarios of a script in a torchrun world of two ranks, and return torchrun's exit code."""
    return worlds.torchrun(folder, *names, script=script, **options)


def on_cpu(function, **fields):
    """Decorate a function with a platform of CPU ranks."""
    return wrapper(Platform(**{"device": "cpu", "timeout_min": 2} | fields))(function)


def error_of(call):
    """Return the exception of a call."""
    try:
        result = call()
    except BaseException as error:
        return error
    raise AssertionError(f"returned {result}")


def scenario(function):
    """Register a scenario. It runs in both ranks, with the number of the rank."""
    SCENARIOS[function.__name__] = function
    return function


class MyError(Exception):
    """An exception that pickle cannot rebuild: ``__init__`` has a required keyword argument."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def total():
    rank = current_rank()
    value = torch.tensor(10 + rank.global_rank)
    dist.all_reduce(value)
    return rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart, str(rank.device), value.item()


def group_size():
    group = current_rank().group
    return (None if group is None else group.size()), dist.is_initialized()


# --- joining ---


@scenario
def joining(rank):
    """The function runs in the existing processes, which get all results at every call and are no ranks afterwards."""
    function = on_cpu(lambda: (os.getpid(), total()))
    first, second = function(), function()
    assert first == second
    assert type(first) is RankResults
    assert first[rank][0] == os.getpid()
    assert [place for _, place in first] == [(each, each, 0, 2, 0, "cpu", 21) for each in range(2)]
    assert not dist.is_initialized()
    assert type(error_of(current_rank)) is LaunchError
    assert Wrapper(Platform(device="cpu")).start(lambda *place: place[1], ()) == (0, 1)


@scenario
def counts(rank):
    """A platform without a number of ranks takes the world's. Another number is refused with both numbers."""
    for fields in {"n_cpus": 2, "launcher": "env"}, {}:
        assert on_cpu(lambda: current_rank().platform.world_size, **fields)() == (2, 2)
    for count, fields in (3, {"n_cpus": 3}), (4, {"n_cpus": 2, "n_nodes": 2}):
        error = error_of(on_cpu(total, **fields))
        assert type(error) is PlatformError
        assert f"specifies {count} ranks, but " in str(error)


@scenario
def seeds(rank):
    """All ranks start from the seed of rank 0's script, at every call. The script's generators keep their state."""
    torch.manual_seed(9)
    nine = torch.rand(1).item()
    torch.manual_seed(5 + rank)
    state = torch.get_rng_state()
    first, second = (on_cpu(lambda: torch.rand(1).item())() for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert first == second == (torch.rand(1).item(),) * 2
    assert on_cpu(lambda: torch.rand(1).item(), seed=9)() == (nine, nine)


@scenario
def groups(rank):
    """`ipc_groups` makes the same groups as under other launchers."""
    sizes = {
        None: ((None, False),) * 2,
        "all": ((2, True),) * 2,
        "each": ((1, True),) * 2,
        "one": ((None, True), (1, True)),
    }
    for choice, size in (None, None), ([], "all"), ([[0, 1]], "all"), ([[0], [1]], "each"), ([[1]], "one"):
        assert on_cpu(group_size, n_cpus=2, ipc_groups=choice)() == sizes[size]
    assert on_cpu(group_size, ipc_groups=[[0], [1]])() == sizes["each"]


@scenario
def ways_to_call(rank):
    """`submit` returns a finished launch, `dry_run` shows the world, and only rank 0 calls `upon_finish`."""
    calls = []
    function = on_cpu(total, upon_finish=lambda: calls.append("finished"))
    launch = function.submit()
    assert (launch.state, launch.done(), len(launch.results()), launch.stacks()) == ("finished", True, 2, {})
    assert calls == ["finished"] * (rank == 0)
    preview = function.dry_run()
    assert (preview.launcher, len(preview.ranks)) == ("env", 2)
    assert function.inline()[0][-1] == 10


@scenario
def local_ranks(rank):
    """With launcher="local", each process of the world starts its own ranks, which form a separate world."""
    results = on_cpu(lambda: (os.getpid(), total()), n_cpus=2, launcher="local", spawn_method="fork", verbose=False)()
    assert [(place[0], place[-1]) for _, place in results] == [(0, 21), (1, 21)]
    assert len({os.getpid(), *(pid for pid, _ in results)}) == 3


@scenario
def recursion(rank):
    assert "a rank cannot launch ranks" in str(error_of(on_cpu(lambda: on_cpu(total)())))


@scenario
def an_existing_group(rank):
    """The user's group is used and kept; outside a decorated function, `functional` uses it too."""
    dist.init_process_group("gloo")
    existing = dist.group.WORLD
    assert on_cpu(lambda: (current_rank().group is dist.group.WORLD, total()[-1]))() == ((True, 21),) * 2
    assert on_cpu(lambda: current_rank().group, ipc_groups=None)() == (None, None)
    assert on_cpu(lambda: current_rank().group.size(), n_cpus=2, ipc_groups=[[1], [0]])() == (1, 1)
    assert dist.group.WORLD is existing
    value = torch.tensor(1)
    dist.all_reduce(value)
    assert value.item() == 2
    assert list(functional.get_dataset_sampler(range(5), pad=False)) == [[0, 1, 2], [3, 4]][rank]
    assert type(functional.to(torch.nn.Linear(1, 1))).__name__ == "DistributedDataParallel"
    dist.destroy_process_group()


# --- meeting and leaving ---


@scenario
def a_late_rank(rank):
    """Rank 0 returns at once, and rank 1 connects later than a rank lingers. Rank 0 does not leave before."""
    mark = Path(sys.argv[1], "rank-0-has-left")
    join, leave = dist.init_process_group, dist.destroy_process_group

    def late(*args, **options):
        join(*args, **options)
        if rank == 1:
            time.sleep(2)
            assert not mark.exists()

    def marked(*args):
        if rank == 0:
            mark.touch()
        leave(*args)

    with mock.patch.object(dist, "init_process_group", late), mock.patch.object(dist, "destroy_process_group", marked):
        assert on_cpu(lambda: current_rank().global_rank)() == (0, 1)


@scenario
def a_failed_meeting(rank):
    """Both ranks fail to join: rank 1 after torch has counted its group, and rank 0 before. The next call works."""
    place = (distributed_c10d, "_new_process_group_helper") if rank == 1 else (dist, "init_process_group")
    with mock.patch.object(*place, wraps=getattr(*place), side_effect=[RuntimeError("no route"), mock.DEFAULT]):
        assert str(error_of(on_cpu(total))) == "no route"
    assert on_cpu(total)()[1][-1] == 21


@scenario
def an_empty_store(rank):
    """After calls that returned large results or failed, the world's store has no key of parawrap's."""

    def large(size):
        return torch.full((size,), 7, dtype=torch.uint8)

    def fail():
        if current_rank().global_rank == 1:
            raise KeyError("late")

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    for size in 3 << 20, 20 << 20:
        assert [(len(each), each.sum().item()) for each in on_cpu(large)(size)] == [(size, 7 * size)] * 2
    error = error_of(on_cpu(fail, ipc_groups=None))  # also in the rank that has returned
    assert (type(error), str(error)) == (KeyError, "'late'")
    meet("called", rank)
    eventually(
        lambda: not [key for key in store.list_keys() if "parawrap" in key and "groups" not in key], "an empty store"
    )
    meet("looked", rank)


def meet(name, rank):
    """Wait until the other rank has called this too."""
    Path(sys.argv[1], f"{rank}-{name}").touch()
    eventually(Path(sys.argv[1], f"{1 - rank}-{name}").exists, "the other rank")


# --- errors ---


@scenario
def errors(rank):
    """Every process raises the error of one rank, although the other one waits in a collective. The next call works."""

    def fail(failing, code):
        if current_rank().global_rank == failing:
            raise MyError(code, detail="why")
        dist.barrier()

    for failing in range(2):
        error = error_of(lambda failing=failing: on_cpu(fail)(failing, 5))
        assert (type(error).__name__, str(error)) == ("MyError", "code 5")
        assert f"rank {failing} of 2" in notes_of(error)
        assert rank == failing or "raise MyError(code" in notes_of(error)
    launch = on_cpu(fail).submit(1, 5)
    assert (launch.state, type(error_of(launch.results)).__name__) == ("failed", "MyError")
    assert on_cpu(lambda: "after")() == ("after", "after")


@scenario
def unsendable_results(rank):
    error = error_of(on_cpu(lambda: threading.Lock() if current_rank().global_rank == 1 else None))
    assert type(error) is UnsendableError
    assert str(error).startswith("the result cannot be sent to another process: lock")


@scenario
def leaving(rank):
    """If a rank calls `sys.exit`, every process raises RankDiedError."""
    error = error_of(on_cpu(lambda: current_rank().global_rank == 1 and sys.exit(3), ipc_groups=None))
    assert type(error) is RankDiedError
    assert "sys.exit(3)" in str(error)


@scenario
def a_slow_rank(rank):
    """A process that waits for another rank longer than timeout_min raises LaunchTimeoutError."""
    gate = Path(sys.argv[1], "gate")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(gate)

    def wait():
        if current_rank().global_rank == 1:
            gate.read_text()  # blocks until the other rank opens the pipe after its timeout

    function = on_cpu(wait, ipc_groups=None, timeout_min=0.005)
    if rank == 1:
        with contextlib.suppress(LaunchTimeoutError):
            function()
        return
    error = error_of(function)
    gate.write_text("")
    assert type(error) is LaunchTimeoutError
    assert "rank 1 of 2" in str(error)


def being_killed_twice(rank):
    """Die in the first start and in the second start; torchrun restarts the processes once."""

    def die_at(restart):
        own = current_rank()
        if own.restart == restart and own.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return own.restart

    Path(sys.argv[1], f"{rank}-{surrounding_world().restart}.pid").write_text(str(os.getpid()))
    assert on_cpu(total)()[1][-1] == 21
    Path(sys.argv[1], f"{rank}.survived").write_text(repr(on_cpu(die_at)(0)))
    on_cpu(die_at)(1)


# --- tests ---


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The failures of both ranks of a torchrun world, by scenario."""
    folder = tmp_path_factory.mktemp("world")
    assert torchrun(folder) == 0
    return failures_in(folder)


def failures_in(folder):
    """Return the traceback of each scenario in each of two ranks; None if it passed."""
    found = [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]
    return {name: [failures[name] for failures in found] for name in found[0]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_torchrun(name, world):
    assert world[name] == [None, None], "\n".join(map(str, world[name]))


def slurm_variables(rank):
    return {
        "SLURM_JOB_ID": 1_000_000 + os.getpid(), "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": 1,
    }  # fmt: skip


def mpi_variables(rank):
    """Return the variables of Open MPI. The node rank counts the processes of a node over all jobs."""
    return {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_NODE_RANK": rank, "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
    }  # fmt: skip


@pytest.mark.parametrize("variables", [slurm_variables, mpi_variables], ids=["srun", "mpirun"])
def test_worlds_of_srun_and_mpirun(variables, tmp_path):
    """Processes with the variables of srun or mpirun form a world with the same contract."""
    names = ["joining", "groups", "errors"]
    assert worlds.run_with_variables(map(variables, range(2)), tmp_path, *names, script=HERE) == [0, 0]
    assert failures_in(tmp_path) == {name: [None, None] for name in names}


def test_a_world_restarts_after_a_death(tmp_path):
    """After a restart by torchrun, calls work and ranks read restart 1. After the second death, no rank survives."""
    assert torchrun(tmp_path, "being_killed_twice", options=["--max-restarts", "1"]) != 0
    assert [(tmp_path / f"{rank}.survived").read_text() for rank in range(2)] == ["RankResults(1, 1)"] * 2
    pids = [int(path.read_text()) for path in tmp_path.glob("*-*.pid")]
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))


def test_env_raises_outside_a_world(monkeypatch):
    for name in set(os.environ) - set(worlds.environment()):
        monkeypatch.delenv(name)
    ran = []
    function = wrapper(Platform(device="cpu", launcher="env"))(ran.append)
    for refused in (function, function.submit, function.dry_run):
        with pytest.raises(LaunchError, match=r"launcher='env' needs a process that torchrun, srun, or mpirun started"):
            refused(1)
    assert not ran


def main(folder, *names):
    """Run scenarios in a rank and write their failures."""
    names, rank = names or SCENARIOS, surrounding_world().global_rank
    failures = dict.fromkeys(names, "an earlier scenario failed")
    try:
        for name in names:
            failures[name] = globals()[name](rank)
    except BaseException:
        failures[name] = traceback.format_exc()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])

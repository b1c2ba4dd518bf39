"""The env launcher: a decorated function joins the world of torchrun, srun, or mpirun.

The ranks of torchrun run this file as their script, which runs the scenarios in order. A scenario
checks itself. Before, each of these ranks forks a rank of every other world: a new interpreter
would import torch, which takes longer than the scenarios.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from parawrap import (
    LaunchError,
    Platform,
    RankResults,
    UnsendableError,
    Wrapper,
    current_rank,
    functional,
    wrapper,
)
from parawrap.errors import PlatformError, RankDiedError
from parawrap.launch._world import find_world
from parawrap.processes.torch_groups import free_port
from tests.helpers import worlds
from tests.helpers.processes import notes_of, ranks

HERE = Path(__file__).resolve()
SCENARIOS = {}


def on_cpu(function, **fields):
    """Decorate a function with a platform of CPU ranks."""
    return wrapper(Platform(**{"device": "cpu"} | fields))(function)


def error_of(call):
    try:
        result = call()
    except BaseException as error:
        return error
    raise AssertionError(f"returned {result}")


def scenario(function):
    """Register a scenario. It runs in both ranks, with the number of the rank."""
    SCENARIOS[function.__name__] = function
    return function


def total():
    value = torch.tensor(10 + current_rank().global_rank)
    dist.all_reduce(value)
    return value.item()


def group_size():
    group = current_rank().group
    return (None if group is None else group.size()), dist.is_initialized()


@scenario
def joining(rank):
    """The function runs in the existing processes, which get all results at every call and are not
    ranks afterwards.
    """
    function = on_cpu(
        lambda: (os.getpid(), current_rank().global_rank, current_rank().local_rank, total())
    )
    before = dict(os.environ)
    first, second = function(), function()
    assert dict(os.environ) == before
    assert first == second
    assert type(first) is RankResults
    assert first[rank][0] == os.getpid()
    assert [place for _, *place in first] == [[0, 0, 21], [1, 1, 21]]
    assert not dist.is_initialized()
    assert type(error_of(current_rank)) is LaunchError
    assert Wrapper(Platform(device="cpu")).start(lambda *place: place[1], ()) == (0, 1)
    assert f"tcp {find_world().master_addr}:{find_world().master_port}" in function.dry_run()


@scenario
def counts(rank):
    """A platform without a number of ranks takes the world's.

    Another number is refused with both numbers.
    """
    for fields in {"n_cpus": 2, "launcher": "env"}, {}:
        assert on_cpu(lambda: current_rank().platform.world_size, **fields)() == (2, 2)
    for count, fields in (3, {"n_cpus": 3}), (4, {"n_cpus": 2, "n_nodes": 2}):
        error = error_of(on_cpu(total, **fields))
        assert type(error) is PlatformError
        assert f"specifies {count} ranks, but " in str(error)
        assert "leave n_nodes, n_cpus, and n_gpus out of the platform" in str(error)


@scenario
def groups(rank):
    nothing, alone, both = (None, False), (1, True), (2, True)
    for groups, sizes in (
        (None, (nothing, nothing)),
        ([], (both, both)),
        ([[1]], ((None, True), alone)),
    ):
        assert on_cpu(group_size, n_cpus=2, ipc_groups=groups)() == sizes
    assert on_cpu(group_size, ipc_groups=[[0], [1]])() == (alone, alone)


class Wrapped(torch.nn.Module):
    """Stands for DistributedDataParallel, which imports the compiler: that takes seconds."""

    def __init__(self, module, **_):
        super().__init__()


@scenario
def an_existing_group(rank):
    """The user's group is used and kept; outside a decorated function, the helpers of `functional`
    use it too.
    """
    dist.init_process_group("gloo")
    existing = dist.group.WORLD
    assert (
        on_cpu(lambda: (current_rank().group is dist.group.WORLD, total()))() == ((True, 21),) * 2
    )
    assert on_cpu(lambda: current_rank().group, ipc_groups=None)() == (None, None)
    assert on_cpu(lambda: current_rank().group.size(), ipc_groups=[[0], [1]])() == (1, 1)
    assert dist.group.WORLD is existing
    assert list(functional.get_dataset_sampler(range(5), pad=False)) == [[0, 1, 2], [3, 4]][rank]
    generator = torch.Generator().manual_seed(rank)
    loader = functional.shard_loader(
        DataLoader(torch.arange(5.0), 2, shuffle=True, generator=generator)
    )
    assert functional.gather_rows(torch.cat(list(loader)), loader).tolist() == [0, 1, 2, 3, 4]
    evaluated = functional.shard_loader(DataLoader(torch.arange(1.0)), pad=False)
    mine = list(evaluated)
    assert functional.gather_rows(
        torch.cat(mine) if mine else torch.empty(0), evaluated
    ).tolist() == [0]
    assert functional.reduce_metrics(float(rank), weight=len(mine)) == 0
    with patch("parawrap.functional._seeds_and_modules.DistributedDataParallel", Wrapped):
        assert type(functional.to(torch.nn.Linear(1, 1), device="cpu")) is Wrapped
    dist.destroy_process_group()


@scenario
def different_calls(rank):
    """Ranks in different calls get an error with both functions, and exchange no values."""
    error = error_of(on_cpu(group_size if rank else total))
    assert type(error) is LaunchError
    assert "rank 0 calls total as its call" in str(error)
    assert "rank 1 group_size as its call" in str(error)
    assert on_cpu(total)() == (21, 21)


# Ranks do not end here, so no launcher has to notice it
@scenario
@patch("parawrap.launch.torchrun._LAUNCHER_NOTICE_S", 0.1)
def errors(rank):
    """A rank raises its own error.

    The other one, in a collective or with its result, raises too. The next call works.
    """

    def fail(failing, waits):
        if current_rank().global_rank == failing:
            raise KeyError("odd")
        if waits:
            dist.barrier()

    for failing, waits in (0, True), (1, True), (1, False):
        launch = on_cpu(fail).submit(failing, waits)
        error = error_of(launch.results)
        assert launch.state == "failed"
        if rank == failing:
            assert repr(error) == "KeyError('odd')"
            assert f"raised in rank {failing} of 2" in notes_of(error)
        elif waits:
            assert (
                "a connection to another rank broke: the output of that rank has the reason"
                in notes_of(error)
            )
        else:
            assert type(error) is LaunchError
            assert "its function raised an exception, or its process ended" in str(error)
    error = error_of(on_cpu(lambda: sys.exit(3) if current_rank().global_rank else None))
    assert rank == 0 or (type(error), error.rank, error.exit_code) == (RankDiedError, 1, 3)
    error = error_of(on_cpu(lambda: [threading.Lock()] if current_rank().global_rank else None))
    assert type(error) is (LaunchError, UnsendableError)[rank]
    assert on_cpu(lambda: "after")() == ("after", "after")


@scenario
def a_preemption(rank):
    """After a signal to one rank, all ranks save at the same step, though they loop alone.

    Nothing is left behind.
    """

    def own_handler(*_):
        raise AssertionError

    saved = []

    def train():
        own = current_rank()
        if own.restart:
            return os.getpid(), own.restart, saved
        while not own.should_checkpoint():
            saved[:] = [saved[0] + 1 if saved else 1]
            if own.global_rank == 1 and saved == [2]:
                os.kill(os.getpid(), signal.SIGUSR2)
        try:
            own.requeue()
        finally:
            saved.append("left")

    signal.signal(signal.SIGUSR2, own_handler)
    results = on_cpu(train, grace_s=60)()
    assert signal.getsignal(signal.SIGUSR2) is own_handler
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not [
        thread.name for thread in threading.enumerate() if thread.name.startswith("parawrap")
    ]
    assert results[rank] == (os.getpid(), 1, saved)
    assert saved[0] >= 2
    assert [each[1:] for each in results] == [(1, [saved[0], "left"])] * 2


@scenario
def a_return_before_a_signal(rank):
    """The other rank saves, and all ranks start again."""

    def train():
        own = current_rank()
        if own.restart == 0 and own.global_rank == 1:
            os.kill(os.getpid(), signal.SIGUSR2)
            while not own.should_checkpoint():
                time.sleep(0.01)
            own.requeue()
        return "again"

    assert on_cpu(train, grace_s=60)() == ("again", "again")


def being_killed(rank):
    """Die in the first start; torchrun restarts the processes."""

    def die_once():
        own = current_rank()
        if own.restart == 0 and own.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return own.restart

    Path(sys.argv[1], f"{rank}.survived").write_text(repr(on_cpu(die_once)()))


def slurm_variables(rank, job):
    return {
        "SLURM_JOB_ID": job, "SLURM_STEP_ID": 0, "SLURM_PROCID": rank,
        "SLURM_STEP_NUM_TASKS": 2, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_NODEID": 0,
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": 1,
    }  # fmt: skip


def mpi_variables(rank, job):
    """Return the variables of Open MPI.

    The node rank counts the processes of a node over all jobs.
    """
    return {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_NODE_RANK": rank,
        "PMIX_NAMESPACE": f"prterun-{job}@1",
    }  # fmt: skip


def variables_of_two_nodes(rank, job):
    """Return the variables of Open MPI, which does not say where the ranks of two nodes meet."""
    alone = {"OMPI_COMM_WORLD_LOCAL_RANK": 0, "OMPI_COMM_WORLD_LOCAL_SIZE": 1}
    return mpi_variables(rank, job) | alone


def variables_with_an_address(rank, job):
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ["PARAWRAP_TEST_PORT"]}
    return variables_of_two_nodes(rank, job) | address


OTHER_WORLDS = {
    # the variables of a rank, and its scenarios
    "srun": (slurm_variables, ["joining", "groups"]),
    "mpirun": (mpi_variables, ["joining", "errors"]),
    "address": (variables_with_an_address, ["counts", "groups"]),
}


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """The failures of both ranks of each world, by scenario."""
    folder = tmp_path_factory.mktemp("worlds")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAWRAP_TEST_PORT", str(free_port()))
        assert worlds.torchrun(folder, script=HERE) == 0
    return {name: failures_in(folder, name) for name in ("torchrun", *OTHER_WORLDS)}


def failures_in(folder, world):
    """Return the traceback of each scenario in each rank; None if it passed."""
    found = [pickle.loads((folder / f"{world}-{rank}.pickle").read_bytes()) for rank in range(2)]
    return {name: [of_rank[name] for of_rank in found] for name in found[0]}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_world_of_torchrun(name, failures):
    found = failures["torchrun"][name]
    assert found == [None, None], "\n".join(map(str, found))


@pytest.mark.parametrize("world", ["srun", "mpirun"])
def test_worlds_of_srun_and_mpirun(world, failures):
    _, names = OTHER_WORLDS[world]
    assert failures[world] == {name: [None, None] for name in names}


def test_a_world_without_an_address(monkeypatch, failures):
    """Open MPI does not say where the ranks of two nodes meet. The variables of the message do."""
    for name in set(os.environ) - set(worlds.environment()):
        monkeypatch.delenv(name)
    for name, value in variables_of_two_nodes(0, os.getpid()).items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(
        LaunchError,
        match="set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there",
    ):
        on_cpu(total)()
    assert failures["address"] == {name: [None, None] for name in ("counts", "groups")}


def torchrun_variables(rank):
    return {
        "RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": 0,
    }  # fmt: skip


def test_local_ranks(monkeypatch):
    """With launcher="local", a process of the world starts its own ranks, which form a separate
    world and may stay. This process has the variables of such a process.
    """
    for name, value in torchrun_variables(1).items():
        monkeypatch.setenv(name, str(value))
    platform = ranks(launcher="local")
    results = wrapper(platform)(lambda: (total(), os.getpid()))()
    assert [value for value, _ in results] == [21, 21]
    assert len({os.getpid(), *(pid for _, pid in results)}) == 3
    error = error_of(Platform(device="cpu").open)
    assert type(error) is PlatformError
    for cure in (
        "Call the function directly",
        "decorate it with @wrapper(Platform(...))",
        "give launcher='local' to start",
    ):
        assert cure in str(error)
    with platform.open() as opened:
        assert opened(total) == (21, 21)


@pytest.mark.long
def test_world_restarts_after_death(tmp_path):
    assert (
        worlds.torchrun(tmp_path, "being_killed", script=HERE, options=["--max-restarts", "1"]) == 0
    )
    assert [(tmp_path / f"{rank}.survived").read_text() for rank in range(2)] == [
        "RankResults(1, 1)"
    ] * 2


def run_scenarios(folder, world, names):
    rank = find_world().global_rank
    failures = dict.fromkeys(names, "an earlier scenario failed")
    try:
        for name in names:
            failures[name] = globals()[name](rank)
    except BaseException:
        failures[name] = traceback.format_exc()
    Path(folder, f"{world}-{rank}.pickle").write_bytes(pickle.dumps(failures))


def run_in_world(folder, world):
    """Run the scenarios of another world as the rank that has the number of this process."""
    variables, names = OTHER_WORLDS[world]
    # The process of torchrun is the parent of all ranks, so all of them take it as the job
    environ = worlds.environment(**variables(int(os.environ["RANK"]), os.getppid()))
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=run_scenarios, args=(folder, world, names))
    with patch.dict(os.environ, environ, clear=True):
        process.start()
    return process


def main(folder, *names):
    if not names:
        started = [run_in_world(folder, world) for world in OTHER_WORLDS]
        run_scenarios(folder, "torchrun", SCENARIOS)
        for process in started:
            process.join()
        assert [process.exitcode for process in started] == [0] * len(OTHER_WORLDS)
    else:
        run_scenarios(folder, "torchrun", names)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The env launcher: a decorated function joins the world that torchrun, srun or mpirun put its process in.

This file is also what runs in such a world: started as a script, it plays every scenario below, in order, and writes how
each of them ended for the tests to read.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from parawrap import (
    LaunchError,
    Platform,
    RankResults,
    Wrapper,
    current_rank,
    functional,
    wrapper,
)
from parawrap.launch._world import surrounding_world

HERE = Path(__file__).resolve()
PATIENCE_S = 80
CPU = Platform(device="cpu", timeout_min=0.1)

SCENARIOS = {}
APART = {}


class MyError(Exception):
    """Cannot be pickled as it is: its arguments are not what it keeps."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def scenario(function):
    """Have it played, after those above it, in both ranks of one world that torchrun starts."""
    SCENARIOS[function.__name__] = function
    return function


def apart(function):
    """Have it played in a world of its own."""
    APART[function.__name__] = function
    return function


def play(folder, names):
    """In a rank: play, and write how each scenario ended."""
    endings = {}
    for name in names or SCENARIOS:
        try:
            endings[name] = ("returned", (SCENARIOS | APART)[name]())
        except BaseException as error:  # whatever it is, the tests are to see it
            endings[name] = ("raised", type(error).__name__, str(error), list(getattr(error, "__notes__", ())))
        new = folder / f"{surrounding_world().global_rank}.new"
        new.write_bytes(pickle.dumps(endings))
        new.rename(new.with_suffix(".pickle"))


def endings_in(folder):
    """What each rank wrote."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def environment(**added):
    """This process's variables without those of any world, and these."""
    worlds = ("SLURM", "OMPI", "PMI", "PMIX", "MPI_", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(worlds)}
    return kept | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in added.items()}


TORCHRUN = "from torch.distributed.run import main; main()"


def torchrun(folder, *names, script=HERE, options=(), **added):
    """Play the scenarios of a script in a world that torchrun starts; its exit code."""
    launcher = folder / "torchrun.py"
    launcher.write_text(TORCHRUN)
    args = ["--standalone", "--nproc-per-node", "2", *options, script, folder, *names]
    return finished([started(launcher, args, folder, environment(**added))])[0]


def started_with(variables, folder, *names):
    """Play scenarios in processes that are told of their world by variables alone; their exit codes."""
    return finished([started(HERE, [folder, *names], folder, environment(**each)) for each in variables])


def started(*place):
    """A script that runs. The scenarios themselves, which run as a script too, find no tests to import."""
    from tests.launch.processes import scripts

    path, args, folder, environ = place
    return scripts.start(path, args, folder, environ=environ)


def finished(processes):
    """The exit codes; whoever takes too long is killed, with all that it started."""
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for late in [process for process in processes if process.poll() is None]:
        for each in [*psutil.Process(late.pid).children(recursive=True), late]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    return [process.wait() for process in processes]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """How every scenario ended in each of the two ranks of a world of torchrun's."""
    folder = tmp_path_factory.mktemp("world")
    assert torchrun(folder) == 0
    return endings_in(folder)


def returned(world, name):
    """What a scenario returned in each rank."""
    endings = [rank[name] for rank in world]
    assert [ending[0] for ending in endings] == ["returned", "returned"], endings
    return [ending[1] for ending in endings]


def outcome_of(call):
    """What a call returned, or the type, message and notes of what it raised."""
    try:
        return call()
    except BaseException as error:
        return type(error).__name__, str(error), list(getattr(error, "__notes__", ()))


# --- joining ---


def total():
    rank = current_rank()
    value = torch.tensor(10 + rank.global_rank)
    dist.all_reduce(value)
    return rank.global_rank, rank.local_rank, rank.node, rank.world_size, rank.restart, str(rank.device), value.item()


@scenario
def joining():
    function = wrapper(CPU)(lambda: (os.getpid(), total()))
    first, second = function(), function()
    return os.getpid(), first, second, type(first) is RankResults, dist.is_initialized(), outcome_of(current_rank)[0]


def test_a_decorated_function_joins_the_world_of_torchrun(world):
    """It runs in the processes that are there, as their ranks, and every process gets the results of all, each time."""
    answers = returned(world, "joining")
    pids = [pid for pid, *_ in answers]
    expected = tuple((pids[rank], (rank, rank, 0, 2, 0, "cpu", 21)) for rank in range(2))
    for _, first, second, *_ in answers:
        assert first == second == expected


def test_nothing_is_left_in_the_process_after_the_call(world):
    """After the call the process is no rank, and in no process group, as before it."""
    for _, _, _, is_results, is_initialized, no_rank in returned(world, "joining"):
        assert (is_results, is_initialized, no_rank) == (True, False, "LaunchError")


@scenario
def a_platform_that_fits():
    function = wrapper(Platform(device="cpu", n_cpus=2, launcher="env"))(lambda: current_rank().platform.world_size)
    return function(), wrapper(CPU)(lambda: current_rank().platform.world_size)()


def test_counts_are_those_of_the_world(world):
    """A platform that asks for as many ranks as there are, and one that leaves the count out, both get the world."""
    assert returned(world, "a_platform_that_fits") == [((2, 2), (2, 2))] * 2


@scenario
def a_platform_that_does_not_fit():
    platforms = [Platform(device="cpu", n_cpus=3), Platform(device="cpu", n_cpus=2, n_nodes=2)]
    return [outcome_of(wrapper(platform)(total)) for platform in platforms], wrapper(CPU)(lambda: "after")()


def test_another_number_of_ranks_is_refused(world):
    """A platform that asks for more or fewer ranks than there are is refused in every rank, with both numbers."""
    for refused, after in returned(world, "a_platform_that_does_not_fit"):
        assert after == ("after", "after")
        for count, (kind, message, _) in zip((3, 4), refused, strict=True):
            assert kind == "PlatformError"
            assert f"asks for {count} ranks and torchrun started 2" in message


def group_size():
    group = current_rank().group
    return (None if group is None else group.size()), dist.is_initialized()


@scenario
def groups():
    choices = [None, [], [[0, 1]], [[0], [1]], [[1]]]
    return [wrapper(Platform(device="cpu", n_cpus=2, ipc_groups=choice))(group_size)() for choice in choices]


def test_groups_are_those_of_the_platform(world):
    """No group, one, and lists make the groups that they make everywhere."""
    none, one, listed, single, partial = zip(*returned(world, "groups"), strict=True)
    assert set(none) == {((None, False), (None, False))}
    assert set(one) == set(listed) == {((2, True), (2, True))}
    assert set(single) == {((1, True), (1, True))}
    assert set(partial) == {((None, True), (1, True))}


@scenario
def groups_of_a_world_that_is_left_open():
    return wrapper(Platform(device="cpu", ipc_groups=[[0], [1]]))(group_size)()


def test_groups_may_name_the_ranks_of_the_world(world):
    """Where the platform leaves the count to the world, groups name that world's ranks."""
    assert returned(world, "groups_of_a_world_that_is_left_open") == [((1, True), (1, True))] * 2


@scenario
def a_task():
    return Wrapper(CPU).start(lambda *place: (*place[:2], place[2].size(), place[3]), ("example",))


def test_a_task_joins_the_world(world):
    """Wrapper.start runs its task in the ranks that are there."""
    assert returned(world, "a_task") == [((0, 0, 2, ("example",)), (1, 1, 2, ("example",)))] * 2


@scenario
def ways_to_call():
    calls = []
    function = wrapper(Platform(device="cpu", upon_finish=lambda: calls.append("finished")))(total)
    launch = function.submit()
    shown = launch.state, launch.done(), len(launch.results()), launch.stacks(), outcome_of(lambda: launch.logs(2))[0]
    preview = function.dry_run()
    told = preview.launcher, len(preview.ranks), "torchrun" in str(preview)
    return shown, [*calls], told, function.inline()[0][-1]


def test_every_way_to_call_works_in_a_world(world):
    """Submit gives a launch that is done, upon_finish is called, dry_run tells of the world, inline stays alone."""
    for shown, calls, preview, alone in returned(world, "ways_to_call"):
        assert (shown, calls) == (("finished", True, 2, {}, "IndexError"), ["finished"])
        assert preview == ("env", 2, True)
        assert alone == 10


@scenario
def helpers():
    def train():
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float(current_rank().global_rank))
        functional.average_params_grads(model)
        rows = list(functional.get_dataset_sampler(range(5), pad=False))
        return model.weight.grad.item(), rows, type(functional.to(model)).__name__

    return wrapper(CPU)(train)()


def test_helpers_know_the_world(world):
    """Within the call functional averages, shares and wraps over the ranks of the world."""
    expected = ((0.5, [0, 1, 2], "DistributedDataParallel"), (0.5, [3, 4], "DistributedDataParallel"))
    assert returned(world, "helpers") == [expected] * 2


@scenario
def starting_others():
    platform = Platform(device="cpu", n_cpus=2, launcher="local", spawn_method="fork", verbose=False)
    return os.getpid(), wrapper(platform)(lambda: (os.getpid(), total()[0], total()[-1]))()


def test_the_local_launcher_may_be_asked_for(world):
    """With launcher="local" each process of the world starts ranks of its own, which meet each other only."""
    pids = set()
    for parent, results in returned(world, "starting_others"):
        assert [place for _, *place in results] == [[0, 21], [1, 21]]
        pids |= {parent, *(pid for pid, *_ in results)}
    assert len(pids) == 6


@scenario
def recursion():
    return outcome_of(wrapper(CPU)(lambda: wrapper(CPU)(total)()))


def test_a_rank_of_a_world_launches_nothing(world):
    """A decorated function that is called within one is refused, as everywhere."""
    for kind, message, _ in returned(world, "recursion"):
        assert kind == "LaunchError"
        assert "a rank starts no ranks" in message


# --- a process group that is there already ---


@scenario
def a_group_that_is_there():
    dist.init_process_group("gloo")
    there = dist.group.WORLD
    try:
        same = wrapper(CPU)(lambda: (current_rank().group is dist.group.WORLD, total()[-1]))()
        kept = dist.is_initialized() and dist.group.WORLD is there
        value = torch.tensor(1)
        dist.all_reduce(value)
        none = wrapper(Platform(device="cpu", ipc_groups=None))(lambda: current_rank().group)()
        listed = wrapper(Platform(device="cpu", n_cpus=2, ipc_groups=[[1], [0]]))(lambda: current_rank().group.size())()
        sampler = functional.get_dataset_sampler(range(5), pad=False)
        outside = type(functional.to(torch.nn.Linear(1, 1))).__name__, None if sampler is None else list(sampler)
        return same, kept, value.item(), outside, none, listed
    finally:
        dist.destroy_process_group()


def test_a_process_group_that_is_there_is_used_and_left_alone(world):
    """The function's group is the user's own, which still works after the call."""
    for same, kept, value, *_ in returned(world, "a_group_that_is_there"):
        assert same == ((True, 21), (True, 21))
        assert (kept, value) == (True, 2)


def test_groups_are_made_beside_a_process_group_that_is_there(world):
    """None and lists of ranks mean what they mean where no group is there."""
    for *_, none, listed in returned(world, "a_group_that_is_there"):
        assert none == (None, None)
        assert listed == (1, 1)


def test_helpers_know_a_process_group_of_the_users_own(world):
    """Outside of any decorated function, helpers agree on the world: the ranks that train together share the rows too."""
    outside = [answer[3] for answer in returned(world, "a_group_that_is_there")]
    assert outside == [("DistributedDataParallel", [0, 1, 2]), ("DistributedDataParallel", [3, 4])]


# --- results ---


@scenario
def tensors():
    results = wrapper(CPU)(
        lambda: {"rank": current_rank().global_rank, "x": torch.full((3,), current_rank().global_rank)}
    )()
    return [(each["rank"], each["x"].tolist()) for each in results]


def test_every_rank_gets_the_tensors_of_all(world):
    """Tensors within results arrive in every process."""
    assert returned(world, "tensors") == [[(0, [0, 0, 0]), (1, [1, 1, 1])]] * 2


@scenario
def nothing_to_send():
    def lock_of(rank):
        return threading.Lock() if current_rank().global_rank == rank else None

    return outcome_of(lambda: wrapper(CPU)(lock_of)(1)), wrapper(CPU)(lambda: "after")()


def test_a_result_that_cannot_be_sent_is_told_to_all(world):
    """Every process raises the error that names the result, and the next call works."""
    for (kind, message, _), after in returned(world, "nothing_to_send"):
        assert (kind, after) == ("UnsendableError", ("after", "after"))
        assert message.startswith("the result cannot be sent to another process: lock")


# --- errors ---


@scenario
def failing():
    def fail(failing_rank, code):
        if current_rank().global_rank == failing_rank:
            raise MyError(code, detail="why")
        dist.barrier()

    blocked = [outcome_of(lambda rank=rank: wrapper(CPU)(fail)(rank, rank)) for rank in range(2)]
    launch = wrapper(CPU)(fail).submit(1, 5)
    return blocked, (launch.state, outcome_of(launch.results)[0]), wrapper(CPU)(lambda: "after")()


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_an_error_of_one_rank_is_raised_in_all(world, failing_rank):
    """Every process raises it with its own type, while the others wait in a collective; notes name the rank."""
    for rank, (blocked, *_) in enumerate(returned(world, "failing")):
        kind, message, notes = blocked[failing_rank]
        assert (kind, message) == ("MyError", f"code {failing_rank}")
        assert any(f"rank {failing_rank} of 2" in note for note in notes)
        if rank != failing_rank:
            assert any("raise MyError(code" in note for note in notes)


def test_a_failed_call_is_a_failed_launch_and_the_next_one_works(world):
    """A launch in a world tells that it failed, its results raise, and the processes go on together."""
    for _, launch, after in returned(world, "failing"):
        assert launch == ("failed", "MyError")
        assert after == ("after", "after")


@scenario
def failing_late():
    def fail():
        if current_rank().global_rank == 1:
            raise KeyError("late")
        return "early"

    return outcome_of(wrapper(Platform(device="cpu", ipc_groups=None, timeout_min=0.1))(fail))


def test_a_rank_that_has_returned_hears_of_the_error_too(world):
    """The call of a rank that returned raises what another one raised."""
    for kind, message, _ in returned(world, "failing_late"):
        assert (kind, message) == ("KeyError", "'late'")


@scenario
def leaving():
    def leave():
        if current_rank().global_rank == 1:
            sys.exit(3)

    platform = Platform(device="cpu", ipc_groups=None, timeout_min=0.05)
    return outcome_of(wrapper(platform)(leave)), wrapper(CPU)(lambda: "after")()


def test_leaving_by_sys_exit_is_the_error_that_it_is_everywhere(world):
    """A rank that calls sys.exit(3) is told to all as one that left without a result; no process waits for it."""
    for (kind, message, _), _ in returned(world, "leaving"):
        assert kind == "RankDiedError"
        assert "sys.exit(3)" in message


@scenario
def missing_the_deadline():
    gate = Path(sys.argv[1], "gate")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(gate)

    def wait():
        if current_rank().global_rank == 1:
            gate.read_text()  # until the other rank, whose time is up, opens it too

    ending = outcome_of(wrapper(Platform(device="cpu", ipc_groups=None, timeout_min=0.005))(wait))
    if os.environ["RANK"] == "0":
        gate.write_text("")
    return ending


def test_a_rank_that_takes_too_long_is_told(world):
    """The process that waits for another one longer than timeout_min says so."""
    kind, message, _ = returned(world, "missing_the_deadline")[0]
    assert kind == "LaunchTimeoutError"
    assert "rank 1 of 2" in message


@scenario
def large_results():
    sizes = [3 << 20, 9 << 20, 20 << 20]
    results = [wrapper(CPU)(lambda size: torch.full((size,), 7, dtype=torch.uint8))(size) for size in sizes]
    return [[(len(tensor), tensor.sum().item()) for tensor in each] for each in results]


def test_results_of_many_megabytes_reach_every_rank(world):
    """Results of 3, 9 and 20 MB per rank arrive whole."""
    sizes = [3 << 20, 9 << 20, 20 << 20]
    assert returned(world, "large_results") == [[[(size, 7 * size)] * 2 for size in sizes]] * 2


# --- the end of a world ---


@apart
def being_killed_twice():
    """Torchrun restarts the processes once."""

    def die_at(restart):
        rank = current_rank()
        if rank.restart == restart and rank.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        return rank.restart

    restart = surrounding_world().restart
    Path(sys.argv[1], f"{os.environ['RANK']}-{restart}.pid").write_text(str(os.getpid()))
    before = wrapper(CPU)(total)()[1][-1]
    survived = wrapper(Platform(device="cpu"))(die_at)(0)
    Path(sys.argv[1], f"{os.environ['RANK']}.survived").write_bytes(pickle.dumps((before, survived)))
    wrapper(Platform(device="cpu"))(die_at)(1)


def test_a_world_starts_anew_after_a_death_and_ends_with_the_last(tmp_path):
    """Restarted by torchrun, calls meet no leftovers and ranks know of it; then torchrun fails, and no rank waits."""
    assert torchrun(tmp_path, "being_killed_twice", options=["--max-restarts", "1"]) != 0
    told = [pickle.loads((tmp_path / f"{rank}.survived").read_bytes()) for rank in range(2)]
    assert told == [(21, (1, 1))] * 2
    pids = [int(path.read_text()) for path in tmp_path.glob("*-*.pid")]
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))


# --- worlds that are variables only ---


def slurm_variables(rank):
    return {
        "SLURM_JOB_ID": 1_000_000 + os.getpid(), "SLURM_STEP_ID": 0, "SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": 2,
        "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_NODES": 1,
    }  # fmt: skip


def mpi_variables(rank):
    """As Open MPI documents them: the node rank counts the processes of a node, over all jobs."""
    return {
        "OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_LOCAL_RANK": rank,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 2, "OMPI_COMM_WORLD_NODE_RANK": rank, "PMIX_NAMESPACE": f"prterun-{os.getpid()}@1",
    }  # fmt: skip


@pytest.mark.parametrize("variables", [slurm_variables, mpi_variables], ids=["srun", "mpirun"])
def test_a_decorated_function_joins_the_world_of_srun_and_mpirun(variables, tmp_path):
    """Processes that a cluster's variables make a world meet by themselves, get all results, and share errors."""
    names = ["joining", "groups", "failing"]
    assert started_with(map(variables, range(2)), tmp_path, *names) == [0, 0]
    world = endings_in(tmp_path)
    test_a_decorated_function_joins_the_world_of_torchrun(world)
    test_groups_are_those_of_the_platform(world)
    test_an_error_of_one_rank_is_raised_in_all(world, 1)


def test_a_process_alone_joins_nothing(monkeypatch):
    """launcher="env" in a process that nothing started as a rank is refused, with what to do, before anything runs."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    ran = []
    function = wrapper(Platform(device="cpu", launcher="env"))(ran.append)
    for refused in (function, function.submit, function.dry_run):
        with pytest.raises(LaunchError, match=r"in no world; start it by torchrun, srun or mpirun, or leave launcher out"):
            refused(1)
    assert not ran


if __name__ == "__main__":
    play(Path(sys.argv[1]), sys.argv[2:])

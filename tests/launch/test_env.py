"""The env launcher: a decorated function joins the world of torchrun, srun, or mpirun.

The ranks of such a world run this file as their script. As a script, it runs the scenarios in order and writes their
results for the tests.
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
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

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
PATIENCE_S = 110
CPU = Platform(device="cpu", timeout_min=0.5)

SCENARIOS = {}
ISOLATED_SCENARIOS = {}


class MyError(Exception):
    """An exception that pickle cannot rebuild: ``__init__`` has a required keyword argument."""

    def __init__(self, code, *, detail):
        super().__init__(f"code {code}")
        self.code, self.detail = code, detail


def scenario(function):
    """Register a scenario. All scenarios run in the order of this file, in both ranks of one torchrun world."""
    SCENARIOS[function.__name__] = function
    return function


def isolated_scenario(function):
    """Register a scenario that runs in a separate world."""
    ISOLATED_SCENARIOS[function.__name__] = function
    return function


def run_scenarios(folder, names):
    """Run scenarios in a rank and write their results and exceptions."""
    endings = {}
    for name in names or SCENARIOS:
        try:
            endings[name] = ("returned", (SCENARIOS | ISOLATED_SCENARIOS)[name]())
        except BaseException as error:  # the tests check it
            endings[name] = ("raised", type(error).__name__, str(error), list(getattr(error, "__notes__", ())))
        new = folder / f"{surrounding_world().global_rank}.new"
        new.write_bytes(pickle.dumps(endings))
        new.rename(new.with_suffix(".pickle"))


def endings_in(folder):
    """Read the results of each rank."""
    return [pickle.loads((folder / f"{rank}.pickle").read_bytes()) for rank in range(2)]


def environment(**added):
    """Return this process's variables, without any world's variables, plus `added`."""
    worlds = ("SLURM", "OMPI", "PMI", "PMIX", "MPI_", "TORCHELASTIC", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "GROUP_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(worlds)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | {name: str(value) for name, value in added.items()}


TORCHRUN = "from torch.distributed.run import main; main()"


def torchrun(folder, *names, script=HERE, options=(), **added):
    """Run the scenarios of a script in a torchrun world and return torchrun's exit code."""
    launcher = folder / "torchrun.py"
    launcher.write_text(TORCHRUN)
    args = ["--standalone", "--nproc-per-node", "2", *options, script, folder, *names]
    return exit_codes([start_script(launcher, args, folder, environment(**added))])[0]


def run_with_variables(variables, folder, *names):
    """Run scenarios in processes that find their world only in variables, and return the exit codes."""
    return exit_codes([start_script(HERE, [folder, *names], folder, environment(**each)) for each in variables])


def start_script(*request):
    """Start a script. The import is local because this file also runs as a script, which cannot import tests."""
    from tests.helpers.processes import scripts

    path, args, folder, environ = request
    return scripts.start(path, args, folder, environ=environ)


def exit_codes(processes):
    """Wait for processes and return their exit codes. Late ones and their children print their stacks, and are killed."""
    from tests.helpers.processes import kill_with_stacks

    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for late in [process for process in processes if process.poll() is None]:
        kill_with_stacks(late.pid)
    return [process.wait() for process in processes]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The results of every scenario in each of the two ranks of a torchrun world."""
    folder = tmp_path_factory.mktemp("world")
    assert torchrun(folder) == 0
    return endings_in(folder)


def returned(world, name):
    """Return the return value of a scenario in each rank."""
    endings = [rank[name] for rank in world]
    assert [ending[0] for ending in endings] == ["returned", "returned"], endings
    return [ending[1] for ending in endings]


def outcome_of(call):
    """Return the return value of a call, or the type, message, and notes of its exception."""
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
    """The function runs in the existing processes, and every process gets the results of all ranks at every call."""
    answers = returned(world, "joining")
    pids = [pid for pid, *_ in answers]
    expected = tuple((pids[rank], (rank, rank, 0, 2, 0, "cpu", 21)) for rank in range(2))
    for _, first, second, *_ in answers:
        assert first == second == expected


def test_nothing_is_left_in_the_process_after_the_call(world):
    """After the call, the process has no current rank and no process group."""
    for _, _, _, is_results, is_initialized, no_rank in returned(world, "joining"):
        assert (is_results, is_initialized, no_rank) == (True, False, "LaunchError")


@scenario
def a_platform_that_fits():
    function = wrapper(Platform(device="cpu", n_cpus=2, launcher="env"))(lambda: current_rank().platform.world_size)
    return function(), wrapper(CPU)(lambda: current_rank().platform.world_size)()


def test_counts_are_those_of_the_world(world):
    """A platform with the world's number of ranks and a platform without a number both use all ranks of the world."""
    assert returned(world, "a_platform_that_fits") == [((2, 2), (2, 2))] * 2


@scenario
def seeds():
    torch.manual_seed(5 + int(os.environ["RANK"]))
    expected = torch.rand(1).item()
    state = torch.get_rng_state()
    draw = wrapper(CPU)(lambda: torch.rand(1).item())
    of_another_seed = wrapper(Platform(device="cpu", seed=9))(lambda: torch.rand(1).item())()
    return expected, draw(), draw(), of_another_seed, torch.equal(torch.get_rng_state(), state)


def test_ranks_have_the_seed_of_the_first_process(world):
    """All ranks start from the seed of rank 0's script, at every call. The script's generators keep their state."""
    torch.manual_seed(9)
    nine = torch.rand(1).item()
    for _, first, second, of_another_seed, is_kept in (answers := returned(world, "seeds")):
        assert first == second == (answers[0][0],) * 2
        assert of_another_seed == (nine, nine)
        assert is_kept


@scenario
def a_platform_that_does_not_fit():
    platforms = [Platform(device="cpu", n_cpus=3), Platform(device="cpu", n_cpus=2, n_nodes=2)]
    return [outcome_of(wrapper(platform)(total)) for platform in platforms], wrapper(CPU)(lambda: "after")()


def test_another_number_of_ranks_is_refused(world):
    """If the platform's number of ranks differs, every rank raises PlatformError with both numbers."""
    for refused, after in returned(world, "a_platform_that_does_not_fit"):
        assert after == ("after", "after")
        for count, (kind, message, _) in zip((3, 4), refused, strict=True):
            assert kind == "PlatformError"
            assert f"specifies {count} ranks, but torchrun started 2" in message


def group_size():
    group = current_rank().group
    return (None if group is None else group.size()), dist.is_initialized()


@scenario
def groups():
    choices = [None, [], [[0, 1]], [[0], [1]], [[1]]]
    return [wrapper(Platform(device="cpu", n_cpus=2, ipc_groups=choice))(group_size)() for choice in choices]


def test_groups_are_those_of_the_platform(world):
    """`ipc_groups` makes the same groups as under other launchers."""
    none, one, listed, single, partial = zip(*returned(world, "groups"), strict=True)
    assert set(none) == {((None, False), (None, False))}
    assert set(one) == set(listed) == {((2, True), (2, True))}
    assert set(single) == {((1, True), (1, True))}
    assert set(partial) == {((None, True), (1, True))}


@scenario
def groups_without_a_count():
    return wrapper(Platform(device="cpu", ipc_groups=[[0], [1]]))(group_size)()


def test_groups_may_name_the_ranks_of_the_world(world):
    """If the platform has no number of ranks, groups can name any rank of the world."""
    assert returned(world, "groups_without_a_count") == [((1, True), (1, True))] * 2


@scenario
def a_task():
    return Wrapper(CPU).start(lambda *place: (*place[:2], place[2].size(), place[3]), ("example",))


def test_a_task_joins_the_world(world):
    """Wrapper.start runs its task in the existing ranks."""
    assert returned(world, "a_task") == [((0, 0, 2, ("example",)), (1, 1, 2, ("example",)))] * 2


@scenario
def ways_to_call():
    calls = []
    function = wrapper(Platform(device="cpu", upon_finish=lambda: calls.append("finished")))(total)
    launch = function.submit()
    shown = launch.state, launch.done(), len(launch.results()), launch.stacks(), outcome_of(lambda: launch.logs(2))[0]
    preview = function.dry_run()
    described = preview.launcher, len(preview.ranks), "torchrun" in str(preview)
    return shown, [*calls], described, function.inline()[0][-1]


def test_every_way_to_call_works_in_a_world(world):
    """`submit` returns a finished launch, `dry_run` shows the world, `inline` runs alone."""
    for shown, _, preview, alone in returned(world, "ways_to_call"):
        assert shown == ("finished", True, 2, {}, "IndexError")
        assert preview == ("env", 2, True)
        assert alone == 10


def test_upon_finish_is_called_once(world):
    """Only the process of rank 0 calls `upon_finish`."""
    assert [calls for _, calls, *_ in returned(world, "ways_to_call")] == [["finished"], []]


@scenario
def keys_in_the_store():
    def fail():
        if current_rank().global_rank == 1:
            raise KeyError("k")

    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    wrapper(CPU)(lambda: bytes(9 << 20))()
    outcome_of(lambda: wrapper(Platform(device="cpu", ipc_groups=None))(fail)())

    def left():
        return [key for key in store.list_keys() if "parawrap" in key and "groups" not in key]

    meet("called")
    deadline = time.monotonic() + 20
    while left() and time.monotonic() < deadline:  # the last rank deletes the keys, maybe after the other has returned
        time.sleep(0.01)
    found = left()
    meet("looked")
    return found


def meet(name):
    """Wait until the other rank has called this too."""
    mine, others = (Path(sys.argv[1], f"{rank}-{name}") for rank in (int(os.environ["RANK"]), 1 - int(os.environ["RANK"])))
    mine.touch()
    while not others.exists():
        time.sleep(0.01)


def test_a_call_leaves_nothing_in_the_store(world):
    """After a call that returned, and one that failed, the world's store has no key of parawrap's."""
    assert returned(world, "keys_in_the_store") == [[], []]


@scenario
def helpers():
    def train():
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.grad = torch.full((1, 1), float(current_rank().global_rank))
        functional.average_params_grads(model)
        rows = list(functional.get_dataset_sampler(range(5), pad=False))
        return model.weight.grad.item(), rows, type(functional.to(model)).__name__

    return wrapper(CPU)(train)()


def test_functional_helpers_use_the_world(world):
    """In a rank, `functional` averages gradients, divides rows, and wraps models over the ranks of the world."""
    expected = ((0.5, [0, 1, 2], "DistributedDataParallel"), (0.5, [3, 4], "DistributedDataParallel"))
    assert returned(world, "helpers") == [expected] * 2


@scenario
def starting_local_ranks():
    platform = Platform(device="cpu", n_cpus=2, launcher="local", spawn_method="fork", verbose=False)
    return os.getpid(), wrapper(platform)(lambda: (os.getpid(), total()[0], total()[-1]))()


def test_the_local_launcher_works_within_a_world(world):
    """With launcher="local", each process of the world starts its own ranks, which form a separate world."""
    pids = set()
    for parent, results in returned(world, "starting_local_ranks"):
        assert [place for _, *place in results] == [[0, 21], [1, 21]]
        pids |= {parent, *(pid for pid, *_ in results)}
    assert len(pids) == 6


@scenario
def recursion():
    return outcome_of(wrapper(CPU)(lambda: wrapper(CPU)(total)()))


def test_a_launch_within_a_rank_of_a_world_raises(world):
    """Calling a decorated function within a decorated function raises LaunchError."""
    for kind, message, _ in returned(world, "recursion"):
        assert kind == "LaunchError"
        assert "a rank cannot launch ranks" in message


@scenario
def a_rank_that_joins_late():
    """Rank 0 returns at once. Rank 1 takes longer than a rank lingers, and looks whether rank 0 has left the group."""
    mark = Path(sys.argv[1], "rank-0-has-left")
    join, leave = dist.init_process_group, dist.destroy_process_group

    def late(*args, **options):
        join(*args, **options)
        if os.environ["RANK"] == "1":
            time.sleep(2)
            assert not mark.exists()

    def marked(*args):
        if os.environ["RANK"] == "0":
            mark.touch()
        leave(*args)

    with mock.patch.object(dist, "init_process_group", late), mock.patch.object(dist, "destroy_process_group", marked):
        return wrapper(CPU)(lambda: current_rank().global_rank)()


def test_no_rank_leaves_before_all_have_joined(world):
    """On busy cores, a rank may connect seconds later than another one. It would lose a rank that had returned."""
    assert returned(world, "a_rank_that_joins_late") == [(0, 1)] * 2


@scenario
def a_failed_meeting():
    """Both ranks fail to join: rank 1 after torch has counted its group, and rank 0 before."""
    counted, uncounted = (distributed_c10d, "_new_process_group_helper"), (dist, "init_process_group")
    broken = counted if os.environ["RANK"] == "1" else uncounted
    with mock.patch.object(*broken, wraps=getattr(*broken), side_effect=[RuntimeError("no route"), mock.DEFAULT]):
        failed = outcome_of(wrapper(CPU)(total))
    return failed[:2], wrapper(CPU)(total)()[1][-1]


def test_a_call_after_a_failed_meeting_works(world):
    """Torch numbers groups, and counts one that could not be joined. All ranks still give the next one the same number."""
    assert returned(world, "a_failed_meeting") == [(("RuntimeError", "no route"), 21)] * 2


# --- an existing process group ---


@scenario
def an_existing_group():
    dist.init_process_group("gloo")
    existing = dist.group.WORLD
    try:
        same = wrapper(CPU)(lambda: (current_rank().group is dist.group.WORLD, total()[-1]))()
        kept = dist.is_initialized() and dist.group.WORLD is existing
        value = torch.tensor(1)
        dist.all_reduce(value)
        none = wrapper(Platform(device="cpu", ipc_groups=None))(lambda: current_rank().group)()
        listed = wrapper(Platform(device="cpu", n_cpus=2, ipc_groups=[[1], [0]]))(lambda: current_rank().group.size())()
        sampler = functional.get_dataset_sampler(range(5), pad=False)
        outside = type(functional.to(torch.nn.Linear(1, 1))).__name__, None if sampler is None else list(sampler)
        return same, kept, value.item(), outside, none, listed
    finally:
        dist.destroy_process_group()


def test_an_existing_process_group_is_used_and_kept(world):
    """The function uses the user's process group, which still works after the call."""
    for same, kept, value, *_ in returned(world, "an_existing_group"):
        assert same == ((True, 21), (True, 21))
        assert (kept, value) == (True, 2)


def test_ipc_groups_work_with_an_existing_process_group(world):
    """None and lists in `ipc_groups` have the same effect with and without an existing group."""
    for *_, none, listed in returned(world, "an_existing_group"):
        assert none == (None, None)
        assert listed == (1, 1)


def test_functional_helpers_use_an_existing_process_group(world):
    """Outside a decorated function, `functional` wraps models and divides rows over the user's process group."""
    outside = [answer[3] for answer in returned(world, "an_existing_group")]
    assert outside == [("DistributedDataParallel", [0, 1, 2]), ("DistributedDataParallel", [3, 4])]


# --- results ---


@scenario
def tensors():
    results = wrapper(CPU)(
        lambda: {"rank": current_rank().global_rank, "x": torch.full((3,), current_rank().global_rank)}
    )()
    return [(each["rank"], each["x"].tolist()) for each in results]


def test_every_rank_gets_the_tensors_of_all(world):
    """Every process gets the tensors of all ranks."""
    assert returned(world, "tensors") == [[(0, [0, 0, 0]), (1, [1, 1, 1])]] * 2


@scenario
def unsendable_result():
    def lock_of(rank):
        return threading.Lock() if current_rank().global_rank == rank else None

    return outcome_of(lambda: wrapper(CPU)(lock_of)(1)), wrapper(CPU)(lambda: "after")()


def test_an_unsendable_result_raises_in_every_process(world):
    """Every process raises UnsendableError with the address of the value, and the next call works."""
    for (kind, message, _), after in returned(world, "unsendable_result"):
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
    """Every process raises an error of the same type although other ranks wait in a collective; notes name the rank."""
    for rank, (blocked, *_) in enumerate(returned(world, "failing")):
        kind, message, notes = blocked[failing_rank]
        assert (kind, message) == ("MyError", f"code {failing_rank}")
        assert any(f"rank {failing_rank} of 2" in note for note in notes)
        if rank != failing_rank:
            assert any("raise MyError(code" in note for note in notes)


def test_a_failed_call_is_a_failed_launch_and_the_next_one_works(world):
    """The launch has state "failed", its results raise, and the next call works."""
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


def test_an_error_is_raised_in_ranks_that_have_returned(world):
    """If one rank returns and a later rank fails, both processes raise the error."""
    for kind, message, _ in returned(world, "failing_late"):
        assert (kind, message) == ("KeyError", "'late'")


@scenario
def leaving():
    def leave():
        if current_rank().global_rank == 1:
            sys.exit(3)

    platform = Platform(device="cpu", ipc_groups=None, timeout_min=0.05)
    return outcome_of(wrapper(platform)(leave)), wrapper(CPU)(lambda: "after")()


def test_sys_exit_raises_in_every_process(world):
    """If a rank calls `sys.exit(3)`, every process raises RankDiedError, and no process waits."""
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
            gate.read_text()  # blocks until the other rank opens the pipe after its timeout

    ending = outcome_of(wrapper(Platform(device="cpu", ipc_groups=None, timeout_min=0.005))(wait))
    if os.environ["RANK"] == "0":
        gate.write_text("")
    return ending


def test_a_slow_rank_raises_launch_timeout_error(world):
    """A process that waits for another rank longer than timeout_min raises LaunchTimeoutError."""
    kind, message, _ = returned(world, "missing_the_deadline")[0]
    assert kind == "LaunchTimeoutError"
    assert "rank 1 of 2" in message


@scenario
def large_results():
    sizes = [3 << 20, 9 << 20, 20 << 20]
    results = [wrapper(CPU)(lambda size: torch.full((size,), 7, dtype=torch.uint8))(size) for size in sizes]
    return [[(len(tensor), tensor.sum().item()) for tensor in each] for each in results]


def test_results_of_many_megabytes_reach_every_rank(world):
    """Results of 3, 9, and 20 MB per rank arrive complete."""
    sizes = [3 << 20, 9 << 20, 20 << 20]
    assert returned(world, "large_results") == [[[(size, 7 * size)] * 2 for size in sizes]] * 2


# --- the end of a world ---


@isolated_scenario
def being_killed_twice():
    """Die in the first start and in the second start; torchrun restarts the processes once."""

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


def test_a_world_restarts_after_a_death(tmp_path):
    """After a restart by torchrun, calls work and ranks read restart 1. After the second death, no rank survives."""
    assert torchrun(tmp_path, "being_killed_twice", options=["--max-restarts", "1"]) != 0
    survived = [pickle.loads((tmp_path / f"{rank}.survived").read_bytes()) for rank in range(2)]
    assert survived == [(21, (1, 1))] * 2
    pids = [int(path.read_text()) for path in tmp_path.glob("*-*.pid")]
    assert len(pids) == 4
    assert not any(map(psutil.pid_exists, pids))


# --- worlds of srun and mpirun, simulated by their variables ---


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
def test_a_decorated_function_joins_the_world_of_srun_and_mpirun(variables, tmp_path):
    """Processes with the variables of srun or mpirun form a world, get all results, and raise the same errors."""
    names = ["joining", "groups", "failing"]
    assert run_with_variables(map(variables, range(2)), tmp_path, *names) == [0, 0]
    world = endings_in(tmp_path)
    test_a_decorated_function_joins_the_world_of_torchrun(world)
    test_groups_are_those_of_the_platform(world)
    test_an_error_of_one_rank_is_raised_in_all(world, 1)


def test_the_env_launcher_raises_outside_a_world(monkeypatch):
    """launcher="env" in a process without a world raises LaunchError, and the function does not run."""
    for name in set(os.environ) - set(environment()):
        monkeypatch.delenv(name)
    ran = []
    function = wrapper(Platform(device="cpu", launcher="env"))(ran.append)
    for refused in (function, function.submit, function.dry_run):
        with pytest.raises(LaunchError, match=r"launcher='env' needs a process that torchrun, srun, or mpirun started"):
            refused(1)
    assert not ran


if __name__ == "__main__":
    run_scenarios(Path(sys.argv[1]), sys.argv[2:])

"""Launches on a Slurm cluster: job arrays, ends from outside, preemption, and lost nodes.

Most launches run at the same time, because each of them waits for a scheduler and for processes
that load torch.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.distributed as dist

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    Platform,
    RankDiedError,
    current_rank,
    wrapper,
)
from parawrap.launch import Job, Launch
from parawrap.launch.slurm.batch_run import start_batch
from tests.contract import scenarios
from tests.contract.table import check_cell
from tests.helpers.launches import assert_no_survivors, results_of, wait_for_reports
from tests.helpers.torchrun_world import ROOT
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slurm

SECRET = "a-secret-from-the-environment"

KILLED_SUBMITTER = """
import os, pathlib, signal, sys, time
from parawrap import Platform, wrapper
from tests.launch.slurm.test_slurm_launcher import wait_for_a_file

folder = pathlib.Path(sys.argv[1])
platform = Platform(device="slurm", verbose=False, ipc_groups=None)
wrapper(platform)(wait_for_a_file).submit(folder / "end")
while not (folder / "begun-0").exists():
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


# -- functions of ranks


def wait_for_a_file(path):
    scenarios.hold_lock(path.parent)
    scenarios.report(path.parent, "begun")
    eventually(path.exists, "the file")
    scenarios.report(path.parent, "ended")


def wait_for_each_other(folder):
    """Wait in C code for a message that never comes, and report the cleanup."""
    scenarios.hold_lock(folder)
    dist.barrier()
    try:
        scenarios.report(folder, "begun")
        dist.recv(torch.ones(1), src=1 - current_rank().global_rank)
    finally:
        scenarios.report(folder, "cleaned")


class Full:
    """A stream on a full disk."""

    def write(self, text):
        return len(text)

    def flush(self):
        raise OSError(28, "No space left on device")


def fail_with_a_full_disk():
    if current_rank().global_rank == 1:
        sys.stdout = Full()
        raise ValueError("the real error")
    dist.barrier()


def terminate_itself():
    if current_rank().global_rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def fail_when_preempted(folder):
    scenarios.report(folder, f"begun-{current_rank().restart}")
    while not current_rank().should_checkpoint():
        time.sleep(0.05)
    raise ValueError("the checkpoint cannot be saved")


def requeue_without_variables(folder):
    """Hide Slurm from libraries, as other code does."""
    for name in [each for each in os.environ if each.startswith("SLURM_") and each != "SLURM_CONF"]:
        del os.environ[name]
    scenarios.report(folder, f"begun-{current_rank().restart}")
    while current_rank().restart == 0:
        if current_rank().should_checkpoint():
            current_rank().requeue()
        time.sleep(0.05)
    return current_rank().restart


def wait_or_requeue(path):
    """Requeue on preemption, and return the restart once the test has created `path`."""
    rank = current_rank()
    path.with_name(f"{path.name}-begun-{rank.restart}").touch()
    while not path.exists():
        if rank.should_checkpoint():
            rank.requeue()
        time.sleep(0.05)
    return rank.restart


def count_until_preempted(folder):
    """Count steps with the other ranks.

    Save when preempted, and return the saved step in the next start.
    """
    saved, step = folder / "saved", 0
    while current_rank().restart == 0:
        if current_rank().should_checkpoint():
            scenarios.report(folder, "due", step)
            saved.write_text(str(step))
            current_rank().requeue()
        dist.barrier()
        step += 1
        scenarios.report(folder, "begun")
    return int(saved.read_text())


def meet_for_ever(folder):
    scenarios.report(folder, "begun")
    while True:
        dist.barrier()


def install_handlers(folder):
    """Handle both signals of users, wait for a preemption, and return the signals that came."""
    seen = []
    for number in signal.SIGUSR1, signal.SIGUSR2:
        signal.signal(number, lambda number, frame: seen.append(number))
    scenarios.report(folder, "begun")
    while not (current_rank().should_checkpoint() and seen):
        time.sleep(0.05)
    return seen


def write_late(folder):
    """Leave an exit handler in rank 0 that takes longer than grace_s."""
    if current_rank().global_rank == 0:
        atexit.register(lambda: (time.sleep(8), (folder / "uploaded").touch()))


def wait_while_exiting(folder):
    atexit.register(lambda: (scenarios.report(folder, "exiting"), time.sleep(600)))


def numbered(number):
    print("number", number)
    if number == 3:
        raise KeyError(number)
    return number, os.environ["SLURM_ARRAY_JOB_ID"]


# -- launches


def submit(function, *args, **fields):
    return wrapper(Platform(**{"device": "slurm", "n_nodes": 2, "verbose": False} | fields))(
        function
    ).submit(*args)


def submit_array(arguments, max_parallel=None, **fields):
    platform = Platform(device="slurm", verbose=False, ipc_groups=None, **fields)
    jobs = [Job(platform, wait_or_requeue, (each,)) for each in arguments]
    return [Launch(run) for run in start_batch(jobs, max_parallel)]


class Started:
    """Launches that run at the same time, by name, each with a folder."""

    def __init__(self, cluster, root):
        self.cluster, self._root = cluster, root
        self.launches, self.jobs, self._numbers = {}, {}, set()

    def folder(self, name):
        folder = self._root / name
        folder.mkdir(exist_ok=True)
        return folder

    def add(self, name, make):
        """Call `make`, which submits one Slurm job, and note the number of the job."""
        self.launches[name] = make()
        (self.jobs[name],) = self.note_jobs()

    def note_jobs(self):
        """Return the numbers of jobs in the queue that were not noted before."""
        numbers = {
            line.partition("_")[0]
            for line in self.cluster.run("squeue", "--noheader", "--format", "%i").split()
        }
        new = numbers - self._numbers
        self._numbers |= numbers
        return new

    def results(self, name):
        return results_of(self.launches[name], self.cluster.hasten)


@pytest.fixture(scope="module")
def launch_folder(slurm, tmp_path_factory):
    """The folder for files of launches. No launch leaves files in it, on any node."""
    folder = tmp_path_factory.mktemp("launches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
        yield folder
        slurm.settle()
        eventually(lambda: not list(folder.iterdir()), "the removal of all files")


@pytest.fixture(scope="module")
def started(slurm, launch_folder, tmp_path_factory):
    made = Started(slurm, tmp_path_factory.mktemp("started"))
    alone = {"ipc_groups": None}
    command = [sys.executable, "-c", KILLED_SUBMITTER, made.folder("left alone")]
    made.submitter = subprocess.Popen(command, cwd=ROOT)
    wait_for_reports(made.folder("left alone"), "begun", 1)
    made.add("left alone", lambda: None)  # notes the job of the submitter
    paths = [made.folder("array") / str(number) for number in range(5)]
    made.add("array", lambda: submit_array(paths, max_parallel=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_SECRET", SECRET)
        made.add(
            "cancelled", lambda: submit(scenarios.wait_for_ever, made.folder("cancelled"), **alone)
        )
        program = (
            "import socket, sys\nif socket.gethostname() == 'node1':\n    sys.modules['parawrap'] "
            "= None\n"
        )
        (made.folder("import") / "sitecustomize.py").write_text(program)
        patch.setenv("PYTHONPATH", str(made.folder("import")))
        made.add("import", lambda: submit(scenarios.take, 1))
    made.add("exit", lambda: submit(partial(os._exit, 0), **alone))
    made.add("full", lambda: submit(fail_with_a_full_disk))
    made.add("sigterm", lambda: submit(terminate_itself, **alone))
    made.add(
        "hidden",
        lambda: submit(requeue_without_variables, made.folder("hidden"), n_nodes=1, **alone),
    )
    made.add(
        "unsaved",
        lambda: submit(
            fail_when_preempted, made.folder("unsaved"), n_nodes=1, max_restarts=1, **alone
        ),
    )
    made.add("in C code", lambda: submit(wait_for_each_other, made.folder("in C code")))
    mapped = wrapper(Platform(device="slurm", verbose=False, **alone))(numbered).map
    with ThreadPoolExecutor() as pool:
        made.mapped = pool.submit(lambda: list(mapped([1, 3, 2])))
        yield made
    made.submitter.wait()


def test_an_array_runs_in_one_job(started):
    """Each item of `map` has its own result or error."""
    outcomes = started.mapped.result()
    assert [outcomes[0][0][0], repr(outcomes[1]), outcomes[2][0][0]] == [1, "KeyError(3)", 2]
    assert outcomes[0][0][1] == outcomes[2][0][1]


def test_elements_of_an_array_are_apart(started):
    """At most as many elements of an array run at the same time as allowed. Cancel, preempt, and
    scancel work on one; `preempt` of a pending one does nothing.
    """
    launches, folder, job = (
        started.launches["array"],
        started.folder("array"),
        started.jobs["array"],
    )

    def begun(number, restart=0):
        eventually(
            lambda: started.cluster.hasten() or (folder / f"{number}-begun-{restart}").exists(),
            "a start",
        )

    for number in range(3):
        begun(number)
    eventually(
        lambda: [each.state for each in launches] == ["running"] * 3 + ["pending"] * 2, "the states"
    )
    launches[4].preempt()
    started.cluster.run("scancel", f"{job}_3")
    launches[1].cancel()
    begun(4)
    eventually(lambda: launches[4].state == "running", "the state of the last element")
    for number in 0, 4:  # the last element also has the number of the whole array
        launches[number].preempt()
    for number in 0, 4:
        begun(number, restart=1)
    for number in range(5):
        (folder / str(number)).touch()
    assert [results_of(launches[number], started.cluster.hasten)[0] for number in (0, 2, 4)] == [
        1,
        0,
        1,
    ]
    with pytest.raises(LaunchCancelledError):
        launches[1].results()
    with pytest.raises(LaunchCancelledError, match=f"Slurm job {job}_3 was removed from the queue"):
        results_of(launches[3])
    assert not (folder / "3-begun-0").exists()


@pytest.mark.parametrize(
    ("situation", "fields"),
    [("no partition", {"partition": "nowhere"}), ("too many nodes", {"n_nodes": 9})],
)
def test_a_refused_job(situation, fields, launch_folder):
    """LaunchError has the message of Slurm, also for an array, and no files remain."""
    before = list(launch_folder.iterdir())
    with pytest.raises(LaunchError) as raised:
        submit(scenarios.take, 1, **{"n_nodes": 1} | fields)
    check_cell(situation, "slurm", raised.value)
    with pytest.raises(LaunchError, match=r"The job is an array of 3;"):
        submit_array(range(3), **fields)
    assert {*launch_folder.iterdir()} <= {*before}


def test_scancel_raises_cancelled_error(started, launch_folder):
    """The launch folder is private and has no secrets of the submitter, and `scancel` by another
    process ends the ranks.
    """
    wait_for_reports(started.folder("cancelled"), "begun", 2)
    for folder in launch_folder.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [
        path
        for path in launch_folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    ]
    assert len(files) > 3
    for path in files:
        assert not path.exists() or SECRET.encode() not in path.read_bytes()
    started.cluster.run("scancel", started.jobs["cancelled"])
    with pytest.raises(LaunchCancelledError) as raised:
        started.results("cancelled")
    check_cell("cancelled from outside", "slurm", raised.value)
    assert_no_survivors(started.folder("cancelled"), 2)


def test_a_node_without_parawrap(started):
    with pytest.raises(LaunchError) as raised:
        started.results("import")
    check_cell("node cannot import", "slurm", raised.value)
    assert raised.value.message.startswith(
        "node 1, node1 cannot run parawrap: ModuleNotFoundError: "
    )


def test_odd_ends_of_ranks(started):
    """An exit without an answer is a death, whatever its code, and so is a signal.

    A full disk hides no error.
    """
    with pytest.raises(RankDiedError, match="rank 0 of 2 exited with code 0"):
        started.results("exit")
    with pytest.raises(RankDiedError, match="rank 1 of 2 was killed by SIGTERM"):
        started.results("sigterm")
    with pytest.raises(ValueError, match="the real error"):
        started.results("full")


def test_preemptions_reach_odd_code(started):
    """A failure after a preemption counts as a failure, and ranks need no variables of Slurm."""
    launches = {name: started.launches[name] for name in ("hidden", "unsaved")}
    for start in 0, 1:
        for name, launch in launches.items():
            if (name, start) != ("hidden", 1):
                path = started.folder(name) / f"begun-{start}-0"
                eventually(lambda path=path: started.cluster.hasten() or path.exists(), "a start")
                eventually(
                    lambda launch=launch: launch.state == "running", "the state of the launch"
                )
                launch.preempt()
    assert list(started.results("hidden")) == [1]
    with pytest.raises(ValueError, match="cannot be saved") as raised:
        started.results("unsaved")
    assert (
        "attempt 0 failed: rank 0 raised ValueError: the checkpoint cannot be saved"
        in raised.value.__notes__
    )
    assert launches["unsaved"].logs(0).count("Traceback") == 2


def test_cancel_ends_waits_in_c_code(started):
    """The connections of ranks that wait for each other break, so that they clean up before Slurm
    kills them.
    """
    folder = started.folder("in C code")
    wait_for_reports(folder, "begun", 2)
    started.launches["in C code"].cancel()
    with pytest.raises(LaunchCancelledError):
        started.results("in C code")
    wait_for_reports(folder, "cleaned", 2)
    assert_no_survivors(folder, 2)


def test_a_job_outlives_its_submitter(started, launch_folder):
    """A job runs to its end after its submitter has ended, and its folder stays."""
    assert started.submitter.wait() == -signal.SIGKILL
    folder = started.folder("left alone")
    (folder / "end").touch()
    wait_for_reports(folder, "ended", 1)
    assert_no_survivors(folder, 1)
    number = started.jobs["left alone"]
    (left,) = {path.parents[1] for path in launch_folder.rglob(f"{number}_0_result.pkl")}
    shutil.rmtree(left)


# -- more launches, after most of the others have ended: slurmd 22.05 may crash if it starts too
# many at once


@pytest.fixture(scope="module")
def more(started):
    alone = {"ipc_groups": None, "n_nodes": 1}
    started.mapped.result()
    started.note_jobs()  # of `map`
    started.add(
        "handlers", lambda: submit(install_handlers, started.folder("handlers"), n_cpus=2, **alone)
    )
    started.add(
        "late", lambda: submit(write_late, started.folder("late"), grace_s=1, ipc_groups=None)
    )
    started.add(
        "requeued", lambda: submit(wait_or_requeue, started.folder("requeued") / "end", **alone)
    )
    started.add("exiting", lambda: submit(wait_while_exiting, started.folder("exiting"), **alone))
    return started


def test_signals_belong_to_the_function(more):
    """Stacks come without a signal. A handler of SIGUSR2 is called at a preemption."""
    launch, folder = more.launches["handlers"], more.folder("handlers")
    wait_for_reports(folder, "begun", 2)
    eventually(lambda: launch.state == "running", "the state of the launch")
    stacks = launch.stacks()
    assert [rank for rank in stacks if "in install_handlers" in stacks[rank]] == [0, 1]
    launch.preempt()
    assert list(more.results("handlers")) == [[signal.SIGUSR2]] * 2


def test_exit_handlers_may_take_long(more):
    """Ranks exit together: srun kills others grace_s after the first exit."""
    more.results("late")
    assert (more.folder("late") / "uploaded").exists()


def test_an_end_of_exit_handlers_is_logged(more):
    launch = more.launches["exiting"]
    wait_for_reports(more.folder("exiting"), "exiting", 1)
    launch.cancel()
    assert (
        "rank 0 returned, but SIGTERM ended it before its exit handlers had ended" in launch.logs(0)
    )


def test_an_operator_may_requeue(more):
    """A requeue by an operator is no failure: the function runs again with max_restarts=0."""
    launch, end = more.launches["requeued"], more.folder("requeued") / "end"
    for start in 0, 1:
        path = end.with_name(f"end-begun-{start}")
        eventually(lambda path=path: more.cluster.hasten() or path.exists(), "a start")
        if start == 0:
            more.cluster.run("scontrol", "requeue", more.jobs["requeued"])
    eventually(lambda: launch.state == "running", "the state of the second start")
    end.touch()
    assert list(more.results("requeued")) == [1]


# -- nodes that other jobs or no jobs can use


def test_an_urgent_job_preempts(started, tmp_path):
    """Slurm's signal makes all ranks save at the same step; the job is requeued, and continues from
    that step.
    """
    launch = submit(
        count_until_preempted, tmp_path, grace_s=20, slurm_additional_parameters={"exclusive": True}
    )
    wait_for_reports(tmp_path, "begun", 2)
    urgent = [
        "--partition",
        "urgent",
        "--exclusive",
        "--nodes",
        "2",
        "--output",
        "/dev/null",
        "--wrap",
        "true",
    ]
    started.cluster.run("sbatch", *urgent)
    results = results_of(launch, started.cluster.hasten)
    (due,) = {int(step) for step in wait_for_reports(tmp_path, "due", 2)}
    assert list(results) == [due] * 2


def test_a_lost_node_is_named(slurm, launch_folder, tmp_path):
    """Ranks that wait for the lost node in a collective fail too; RankDiedError names the node that
    Slurm lost.
    """
    launch = submit(meet_for_ever, tmp_path)
    wait_for_reports(tmp_path, "begun", 2)
    slurm.kill_node("node1")
    slurm.declare_down("node1")
    with pytest.raises(
        RankDiedError,
        match=r"rank 1 of 2 was lost with its node, in Slurm job \d+ \(node 1, node1\)",
    ) as raised:
        results_of(launch)
    check_cell("node lost", "slurm", raised.value)

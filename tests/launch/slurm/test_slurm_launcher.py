"""Launches on a Slurm cluster: job arrays, ends from outside, guards, preemption, and lost nodes.

Most launches run at the same time, because each of them waits for a scheduler and for processes that load torch.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchError, Platform, RankDiedError, current_rank, wrapper
from parawrap.launch import Job
from parawrap.launch.slurm._slurm_launcher import launcher
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
from parawrap.launch.slurm import _slurm_launcher
from tests.contract import scenarios

_slurm_launcher._LEASE_S = 8.0  # longer than the interval between signs of life
folder = pathlib.Path(sys.argv[1])
wrapper(Platform(device="slurm", verbose=False, ipc_groups=None))(scenarios.wait_for_ever).submit(folder)
while not (folder / "begun-0").exists():
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


# -- functions of ranks


def leave_a_process_behind(folder):
    """Leave a process in a new session, which holds a lock, and fail."""
    lock = scenarios.hold_lock(folder)
    command = ["bash", "-c", "setsid sleep 600 & disown"]
    subprocess.run(command, pass_fds=[lock.fileno()], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    dist.barrier()  # a failure ends the other rank
    raise KeyError


def clean_up_slowly(folder):
    """Rank 1 fails; rank 0 needs longer to clean up than Slurm waits here between SIGTERM and SIGKILL."""
    if current_rank().global_rank == 1:
        eventually((folder / "begun-0").exists, "the start of rank 0")
        raise KeyError
    try:
        scenarios.report(folder, "begun")
        time.sleep(600)
    finally:
        time.sleep(2.5)
        scenarios.report(folder, "cleaned")


def kill_guard(folder):
    """Rank 1 kills the task that guards it while rank 0 waits for it."""
    scenarios.report(folder, f"start{current_rank().restart}")
    dist.barrier()  # both have reported
    if current_rank().global_rank == 1:
        server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(server[1]), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()


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
    """Count steps with the other ranks. Save when preempted, and return the saved step in the next start."""
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


def numbered(number):
    print("number", number)
    if number == 3:
        raise KeyError(number)
    return number, os.environ["SLURM_ARRAY_JOB_ID"]


# -- launches


def submit(function, *args, **fields):
    return wrapper(Platform(**{"device": "slurm", "n_nodes": 2, "verbose": False} | fields))(function).submit(*args)


def submit_array(arguments, max_parallel=None, **fields):
    platform = Platform(device="slurm", verbose=False, ipc_groups=None, **fields)
    return launcher.launch_all([Job(platform, wait_or_requeue, (each,)) for each in arguments], max_parallel)


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
        numbers = {line.partition("_")[0] for line in self.cluster.run("squeue", "--noheader", "--format", "%i").split()}
        (self.jobs[name],) = numbers - self._numbers
        self._numbers |= numbers

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
    command = [sys.executable, "-c", KILLED_SUBMITTER, made.folder("lease")]
    made.submitter = subprocess.Popen(command, cwd=ROOT)
    wait_for_reports(made.folder("lease"), "begun", 1)
    made.add("cancelled", lambda: None)  # notes the job of the submitter
    paths = [made.folder("array") / str(number) for number in range(5)]
    made.add("array", lambda: submit_array(paths, max_parallel=3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("A_SECRET", SECRET)
        made.add("cancelled", lambda: submit(scenarios.wait_for_ever, made.folder("cancelled"), **alone))
        program = "import socket, sys\nif socket.gethostname() == 'node1':\n    sys.modules['parawrap'] = None\n"
        (made.folder("import") / "sitecustomize.py").write_text(program)
        patch.setenv("PYTHONPATH", str(made.folder("import")))
        made.add("import", lambda: submit(scenarios.take, 1))
    made.add("sigterm", lambda: submit(scenarios.wait_for_ever, made.folder("sigterm"), grace_s=1.0, **alone))
    made.add("guard", lambda: submit(kill_guard, made.folder("guard"), max_restarts=1))
    made.add("cleanup", lambda: submit(clean_up_slowly, made.folder("cleanup"), **alone))
    made.add("left", lambda: submit(leave_a_process_behind, made.folder("left")))
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
    """At most as many run as allowed. Cancel, preempt, and scancel work on one; `preempt` of a pending one does nothing."""
    launches, folder, job = started.launches["array"], started.folder("array"), started.jobs["array"]

    def begun(number, restart=0):
        eventually(lambda: started.cluster.hasten() or (folder / f"{number}-begun-{restart}").exists(), "a start")

    for number in range(3):
        begun(number)
    eventually(lambda: [each.state for each in launches] == ["running"] * 3 + ["pending"] * 2, "the states")
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
    assert [results_of(launches[number], started.cluster.hasten)[0] for number in (0, 2, 4)] == [1, 0, 1]
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
    """The launch folder is private and has no secrets of the submitter, and `scancel` by another process ends the ranks."""
    wait_for_reports(started.folder("cancelled"), "begun", 2)
    for folder in launch_folder.iterdir():
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = [path for path in launch_folder.rglob("*") if path.is_file() and not path.name.startswith(".")]
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
    assert f"node 1 (node1): {sys.executable} cannot import parawrap" in raised.value.message


def test_sigterm_ends_ranks(started):
    """Slurm sends SIGTERM to all tasks before it kills them, after the ranks have ended."""
    wait_for_reports(started.folder("sigterm"), "begun", 2)
    started.cluster.run("scancel", "--signal=TERM", started.jobs["sigterm"])
    with pytest.raises(RankDiedError, match="was killed by SIGTERM"):
        started.results("sigterm")


def test_the_death_of_a_guard(started):
    """RankDiedError names the rank of the killed task, after a restart by the batch script."""
    with pytest.raises(RankDiedError, match="rank 1 of 2 was lost with its task in Slurm job") as raised:
        started.results("guard")
    assert raised.value.rank == 1
    wait_for_reports(started.folder("guard"), "start1", 2)


def test_ranks_have_time_to_clean_up(started):
    """After a failure, the `finally` blocks of the other ranks have ``grace_s``, although Slurm would give them less."""
    with pytest.raises(KeyError):
        started.results("cleanup")
    wait_for_reports(started.folder("cleanup"), "cleaned", 1)


def test_no_process_is_left(started):
    """A process in another session ends with its rank."""
    with pytest.raises(KeyError):
        started.results("left")
    assert_no_survivors(started.folder("left"), 2)


def test_a_job_ends_with_its_submitter(started, launch_folder):
    """When the lease of a killed submitter expires, the rank cleans up. `launch_folder` checks the files."""
    assert started.submitter.wait() == -signal.SIGKILL
    wait_for_reports(started.folder("lease"), "cleaned", 1)
    assert_no_survivors(started.folder("lease"), 1)


# -- nodes that other jobs or no jobs can use


def test_an_urgent_job_preempts(started, tmp_path):
    """Slurm's signal makes all ranks save at the same step; the job is requeued, and continues from that step."""
    launch = submit(count_until_preempted, tmp_path, grace_s=20, slurm_additional_parameters={"exclusive": True})
    wait_for_reports(tmp_path, "begun", 2)
    urgent = ["--partition", "urgent", "--exclusive", "--nodes", "2", "--output", "/dev/null", "--wrap", "true"]
    started.cluster.run("sbatch", *urgent)
    results = results_of(launch, started.cluster.hasten)
    (due,) = {int(step) for step in wait_for_reports(tmp_path, "due", 2)}
    assert list(results) == [due] * 2


def test_a_lost_node_is_named(slurm, launch_folder, tmp_path):
    """Ranks that wait for the lost node in a collective fail too; RankDiedError names the node that Slurm lost."""
    launch = submit(meet_for_ever, tmp_path)
    wait_for_reports(tmp_path, "begun", 2)
    slurm.kill_node("node1")
    slurm.declare_down("node1")
    with pytest.raises(
        RankDiedError, match=r"rank 1 of 2 was lost with its node, in Slurm job \d+ \(node 1, node1\)"
    ) as raised:
        results_of(launch)
    check_cell("node lost", "slurm", raised.value)

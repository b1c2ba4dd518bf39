"""Requests that a cluster cannot satisfy, and jobs that end from outside."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    Platform,
    PlatformError,
    RankDiedError,
    wrapper,
)
from tests.contract import scenarios
from tests.contract.harness import ErrorRecord, SlurmLauncher, assert_no_survivors, wait_for_reports
from tests.contract.table import RECORDED
from tests.helpers.torchrun_world import ROOT
from tests.helpers.waiting import PATIENCE_S, eventually

pytestmark = pytest.mark.contract

SECRET = "a-secret-from-the-environment"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The launch folder; the fixture fails if a launch leaves files in it."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
    yield folder
    assert not folder.is_dir() or not list(folder.iterdir())


def refusal_of(situation, name, **fields):
    """Record and return the message of the LaunchError that `submit` raises."""
    with pytest.raises(LaunchError) as raised:
        wrapper(Platform(device=name, verbose=False, **fields))(scenarios.exit_3).submit()
    RECORDED.note(situation, name, ErrorRecord.of(raised.value))
    return raised.value.message


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "Ray")])
def test_a_missing_package_is_named_with_its_extra(name, package, folders, monkeypatch):
    """LaunchError contains the command that installs the package, and no launch starts."""
    for module in [each for each in sys.modules if each.partition(".")[0] == package.lower()]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package.lower(), None)
    error = refusal_of("no extra", name)
    assert error == f"launcher={name!r} needs {package}: pip install 'parawrap-torch[{name}]'"


def test_without_slurm_the_missing_command_is_named(folders, tmp_path, monkeypatch):
    """On a machine without Slurm, LaunchError names sbatch and says where to launch instead."""
    monkeypatch.setenv("PATH", str(tmp_path))
    error = refusal_of("no cluster", "slurm")
    assert error.startswith("sbatch is not installed here: ")


def test_memory_must_be_a_number():
    """A string such as "16G" raises PlatformError with the field, the value, and the allowed values."""
    with pytest.raises(PlatformError, match=r"ram='16G': give a number of GB above 0"):
        Platform(device="slurm", ram="16G")


def test_an_unwritable_log_folder_raises(launcher, note_for_page, tmp_path):
    """LaunchError names the folder before any rank runs. Launchers that keep no output ignore the folder."""
    (tmp_path / "file").touch()
    observation = launcher.play(scenarios.take, 1, console_logs=tmp_path / "file" / "logs")
    if reason := launcher.unable("keep output"):
        assert set(observation.expect_results()) == {"taken"}
        note_for_page("log folder", f"no error: {reason}")
        return
    note_for_page("log folder", observation.expect_error())
    assert observation.expect_error().kind is LaunchError
    assert f"console_logs='{tmp_path}/file/logs' cannot be written to" in observation.expect_error().message


def test_an_unwritable_launch_folder_raises(tmp_path, monkeypatch):
    """LaunchError names the folder and the variable that selects another folder."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    error = refusal_of("launch folder", "slurm")
    assert error.startswith(f"{tmp_path}/file cannot be written to")
    assert "PARAWRAP_LAUNCH_DIR" in error


# -- final states of Slurm jobs


STATES = [
    ("TIMEOUT", LaunchTimeoutError, "take reached the time limit of Slurm job 1, 01:00:00"),
    ("OUT_OF_MEMORY", LaunchError, "take used more memory than Slurm job 1 had reserved, ram=2 GB per node"),
    (
        "NODE_FAIL",
        RankDiedError,
        "rank 0 of 1 was lost with its node, in Slurm job 1 (node 0, node0)",
    ),
    ("PREEMPTED", LaunchError, "was preempted, and the cluster does not requeue Slurm job 1"),
    ("CANCELLED", LaunchCancelledError, "was cancelled by another process: Slurm job 1 was removed from the queue"),
    ("FAILED", LaunchError, "Slurm job 1, which ran take, ended as FAILED (NonZeroExitCode)"),
]


@pytest.mark.parametrize(("state", "kind", "text"), STATES, ids=[each[0] for each in STATES])
def test_each_final_state_of_a_job_has_its_own_error(state, kind, text, folders, tmp_path, monkeypatch):
    """The error explains the final state of the job. Scripts replace the Slurm commands."""
    monkeypatch.setattr("parawrap.launch.slurm._job_follower._POLL_S", 0.1)
    shown = f"JobId=1 JobState={state} Reason=NonZeroExitCode Restarts=0 TimeLimit=01:00:00 NodeList=node[0-1] Command=no"
    answer = f"case $* in *hostnames*) echo node0 node1;; *) echo '{shown}';; esac"
    programs = {"sbatch": "echo Submitted batch job 1", "scontrol": answer, "scancel": ":", "srun": ":"}
    for name, line in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(kind) as raised:
        wrapper(Platform(device="slurm", verbose=False, ram=2))(scenarios.take).submit(1).results(PATIENCE_S)
    assert text in str(raised.value)


# -- real clusters


@pytest.fixture
def slurm_launcher(slurm_launches, folders):
    """The Slurm launcher, with a launch folder for each test."""
    yield SlurmLauncher(slurm_launches)
    slurm_launches.settle()


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("situation", "fields", "words"),
    [("no partition", {"partition": "nowhere"}, "partition"), ("too many nodes", {"n_nodes": 9}, "9 node(s)")],
    ids=["partition", "nodes"],
)
def test_a_refused_job_raises_with_the_words_of_slurm(slurm_launcher, situation, fields, words):
    """`submit` raises LaunchError with the message of Slurm."""
    error = refusal_of(situation, "slurm", **fields)
    assert error.startswith("Slurm refused the job: ")
    assert words in error


@pytest.mark.slurm
def test_a_node_that_cannot_import_parawrap_is_named(slurm_launcher, tmp_path, monkeypatch):
    """LaunchError names the node, its host, and its Python."""
    program = "import socket, sys\nif socket.gethostname() == 'node1':\n    sys.modules['parawrap'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    error = slurm_launcher.play(scenarios.take, 1).expect_error()
    RECORDED.note("node cannot import", "slurm", error)
    assert error.kind is LaunchError
    assert f"node 1 (node1): {sys.executable} cannot import parawrap" in error.message


@pytest.mark.slurm
def test_scancel_from_outside_raises_launch_cancelled_error(slurm_launcher, tmp_path):
    """A job that another process cancels raises LaunchCancelledError."""

    def scancel(launch):
        wait_for_reports(tmp_path, "begun", 4)
        (number,) = slurm_launcher.cluster.run("squeue", "--noheader", "--format", "%i").split()
        slurm_launcher.cluster.run("scancel", number)

    observation = slurm_launcher.play(scenarios.wait_for_ever, tmp_path, do=scancel)
    RECORDED.note("cancelled from outside", "slurm", observation.expect_error())
    assert observation.expect_error().kind is LaunchCancelledError, observation.expect_error()


@pytest.mark.slurm
def test_a_lost_slurm_node_raises_rank_died_error(slurm_launcher, tmp_path):
    """After a node dies, RankDiedError says that the rank was lost with its node."""

    def kill_node(launch):
        wait_for_reports(tmp_path, "begun", 4)
        slurm_launcher.cluster.kill_node("node1")
        slurm_launcher.cluster.declare_down("node1")

    error = slurm_launcher.play(scenarios.wait_for_ever, tmp_path, do=kill_node).expect_error()
    RECORDED.note("node lost", "slurm", error)
    assert error.kind is RankDiedError, error
    assert "lost with" in error.message


@pytest.mark.slurm
def test_concurrent_launches_read_only_their_own_results(slurm_launcher):
    """Twenty launches of one function from one process each return their own result."""
    numbered = wrapper(Platform(device="slurm", verbose=False, ipc_groups=None))(lambda number: number)
    launches = [numbered.submit(number) for number in range(20)]
    assert [launch.results(3 * PATIENCE_S) for launch in launches] == [(number,) for number in range(20)]


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


@pytest.mark.slurm
def test_a_job_ends_after_its_submitter_is_killed(slurm_launcher, folders, tmp_path):
    """When the lease expires, the rank cleans up, and the launch folder is removed."""
    done = subprocess.run([sys.executable, "-c", KILLED_SUBMITTER, tmp_path], cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    wait_for_reports(tmp_path, "cleaned", 1)
    assert_no_survivors(tmp_path, 1)
    eventually(lambda: not list(folders.iterdir()), "the removal of the launch folder")


@pytest.mark.ray
def test_a_ray_cluster_that_is_too_small_raises(ray_cluster):
    """`submit` raises LaunchError with the resources of the nodes, where Ray itself would wait forever."""
    error = refusal_of("too many nodes", "ray", n_nodes=9)
    assert error.startswith(
        "the platform needs 9 node(s) with 1 CPU each, but only 2 of the Ray cluster's nodes have that: "
    )


@pytest.mark.ray
def test_a_lost_ray_node_raises_rank_died_error(ray_cluster, tmp_path):
    """RankDiedError names the lost rank, and the ranks of other nodes end."""
    node = ray_cluster.add_node()
    launch = wrapper(Platform(device="ray", n_nodes=3, verbose=False))(scenarios.wait_for_ever).submit(tmp_path)
    try:
        wait_for_reports(tmp_path, "begun", 3)
        ray_cluster.kill_node(node)
        with pytest.raises(RankDiedError) as raised:
            launch.results(PATIENCE_S)
    finally:
        launch.cancel()
    RECORDED.note("node lost", "ray", ErrorRecord.of(raised.value))
    assert "was lost with its node, which no longer answers (node " in str(raised.value)
    assert_no_survivors(tmp_path, 3)


@pytest.mark.slurm
def test_a_launch_folder_is_private_and_holds_no_secrets(slurm_launcher, folders, tmp_path, monkeypatch):
    """Only the owner can enter the folder, no file in it has the submitter's environment, and the launch removes it."""
    monkeypatch.setenv("A_SECRET", SECRET)
    found = []

    def search_files(launch):
        wait_for_reports(tmp_path, "begun", 4)
        (folder,) = folders.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = [path for path in folder.rglob("*") if path.is_file()]
        found.extend(str(path) for path in files if SECRET.encode() in path.read_bytes())
        assert len(files) > 3
        launch.cancel()

    slurm_launcher.play(scenarios.wait_for_ever, tmp_path, do=search_files).expect_error()
    assert not found
    assert Path(folders).is_dir()

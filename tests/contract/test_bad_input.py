"""What clusters are given that cannot work, and what becomes of jobs that somebody else ends."""

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
from tests.contract.harness import OnSlurm, Told, all_said, none_alive
from tests.contract.table import SEEN
from tests.contract.torchrun_world import ROOT
from tests.launch.processes import PATIENCE_S, eventually

pytestmark = pytest.mark.contract

WORDS = "unlikely-words-of-the-environment"


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folder of launches; nothing is left in it."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
    yield folder
    assert not folder.is_dir() or not list(folder.iterdir())


def refusal_of(situation, name, **fields):
    """What launching on this cluster raises at once; noted for the page."""
    with pytest.raises(LaunchError) as raised:
        wrapper(Platform(device=name, verbose=False, **fields))(scenarios.exit_3).submit()
    SEEN.note(situation, name, Told.of(raised.value))
    return str(raised.value)


@pytest.mark.parametrize(("name", "package"), [("slurm", "submitit"), ("ray", "Ray")])
def test_what_is_not_installed_is_named_with_its_extra(name, package, folders, monkeypatch):
    """The message has the command that installs it; nothing was started."""
    for module in [each for each in sys.modules if each.partition(".")[0] == package.lower()]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package.lower(), None)
    told = refusal_of("no extra", name)
    assert told == f"launcher={name!r} needs {package}: pip install 'parawrap[{name}]'"


def test_without_slurm_the_missing_command_is_named(folders, tmp_path, monkeypatch):
    """On a machine that is no login node, with what to do instead."""
    monkeypatch.setenv("PATH", str(tmp_path))
    told = refusal_of("no cluster", "slurm")
    assert told.startswith("sbatch is not installed here: ")


def test_memory_is_a_number():
    """A text such as "16G" is refused by name, value and what is allowed, before anything else."""
    with pytest.raises(PlatformError, match=r"ram='16G': give a number of GB above 0"):
        Platform(device="slurm", ram="16G")


def test_a_log_folder_that_cannot_be_written_to_is_told(launcher, seen_by_user, tmp_path):
    """LaunchError names it, before any rank runs the function; where nobody keeps what ranks write, it is not needed."""
    (tmp_path / "file").touch()
    seen = launcher.play(scenarios.take, 1, console_logs=tmp_path / "file" / "logs")
    if reason := launcher.unable("keep output"):
        assert set(seen.given()) == {"taken"}
        seen_by_user("log folder", f"nothing: {reason}")
        return
    seen_by_user("log folder", seen.raised())
    assert seen.raised().kind is LaunchError
    assert f"console_logs='{tmp_path}/file/logs' cannot be written to" in seen.raised().message


def test_a_launch_folder_that_cannot_be_written_to_is_told(tmp_path, monkeypatch):
    """With the variable that names another one."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "file"))
    told = refusal_of("launch folder", "slurm")
    assert told.startswith(f"{tmp_path}/file cannot be written to")
    assert "PARAWRAP_LAUNCH_DIR" in told


# -- what Slurm says of a job that is over


STATES = [
    ("TIMEOUT", LaunchTimeoutError, "take reached the time limit of Slurm job 1, 01:00:00"),
    ("OUT_OF_MEMORY", LaunchError, "take used more memory than Slurm job 1 had reserved, ram=2 GB per node"),
    (
        "NODE_FAIL",
        RankDiedError,
        "rank 0 of 1 was lost with its node, in Slurm job 1 (node 0, node[0-1])",
    ),
    ("PREEMPTED", LaunchError, "was preempted, and the cluster does not requeue Slurm job 1"),
    ("CANCELLED", LaunchCancelledError, "was cancelled by another process: Slurm job 1 was removed from the queue"),
    ("FAILED", LaunchError, "Slurm job 1, which ran take, ended as FAILED (NonZeroExitCode)"),
]


@pytest.mark.parametrize(("state", "kind", "text"), STATES, ids=[each[0] for each in STATES])
def test_a_job_that_slurm_ended_is_told_by_why(state, kind, text, folders, tmp_path, monkeypatch):
    """Each of its states has an exception of its own, which says what to look at; here Slurm is a few scripts."""
    monkeypatch.setattr("parawrap.launch.clusters._job_follower._POLL_S", 0.1)
    shown = f"JobId=1 JobState={state} Reason=NonZeroExitCode Restarts=0 TimeLimit=01:00:00 NodeList=node[0-1] Command=no"
    programs = {"sbatch": "echo Submitted batch job 1", "scontrol": f"echo '{shown}'", "scancel": ":", "srun": ":"}
    for name, line in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(kind) as raised:
        wrapper(Platform(device="slurm", verbose=False, ram=2))(scenarios.take).submit(1).results(PATIENCE_S)
    assert text in str(raised.value)


# -- a cluster's own


@pytest.fixture
def on_slurm(slurm_launches, folders):
    """Launches on the cluster of the tests, each in a folder of the test's."""
    yield OnSlurm(slurm_launches)
    slurm_launches.settle()


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("situation", "fields", "words"),
    [("no partition", {"partition": "nowhere"}, "partition"), ("too many nodes", {"n_nodes": 9}, "9 node(s)")],
    ids=["partition", "nodes"],
)
def test_a_job_that_slurm_refuses_is_told_in_its_words(on_slurm, situation, fields, words):
    """At once."""
    told = refusal_of(situation, "slurm", **fields)
    assert told.startswith("Slurm refused the job: ")
    assert words in told


@pytest.mark.slurm
def test_a_node_that_cannot_import_parawrap_is_named(on_slurm, tmp_path, monkeypatch):
    """With its Python, and in moments."""
    program = "import socket, sys\nif socket.gethostname() == 'node1':\n    sys.modules['parawrap'] = None\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = on_slurm.play(scenarios.take, 1).raised()
    SEEN.note("node cannot import", "slurm", told)
    assert told.kind is LaunchError
    assert f"node 1 (node1): {sys.executable} cannot import parawrap" in told.message


@pytest.mark.slurm
def test_a_job_that_somebody_else_cancels_is_told(on_slurm, tmp_path):
    """By LaunchCancelledError; ranks clean up."""

    def cancel(launch):
        all_said(tmp_path, "begun", 4)
        (number,) = on_slurm.cluster.run("squeue", "--noheader", "--format", "%i").split()
        on_slurm.cluster.run("scancel", number)

    seen = on_slurm.play(scenarios.wait_for_ever, tmp_path, do=cancel)
    SEEN.note("cancelled from outside", "slurm", seen.raised())
    assert seen.raised().kind is LaunchCancelledError, seen.raised()


@pytest.mark.slurm
def test_a_lost_node_is_told(on_slurm, tmp_path):
    """RankDiedError in bounded time: a rank is lost with its node."""

    def kill(launch):
        all_said(tmp_path, "begun", 4)
        on_slurm.cluster.kill_node("node1")
        on_slurm.cluster.declare_down("node1")

    told = on_slurm.play(scenarios.wait_for_ever, tmp_path, do=kill).raised()
    SEEN.note("node lost", "slurm", told)
    assert told.kind is RankDiedError, told
    assert "lost with" in told.message


@pytest.mark.slurm
def test_launches_at_once_read_only_their_own_results(on_slurm):
    """Twenty of one name, in one place, each with a folder of its own."""
    numbered = wrapper(Platform(device="slurm", verbose=False, ipc_groups=None))(lambda number: number)
    launches = [numbered.submit(number) for number in range(20)]
    assert [launch.results(3 * PATIENCE_S) for launch in launches] == [(number,) for number in range(20)]


FORGETFUL = """
import os, pathlib, signal, sys, time
from parawrap import Platform, wrapper
from parawrap.launch import slurm
from tests.contract import scenarios


slurm._LEASE_S = 8.0  # more than a sign of life takes to come
folder = pathlib.Path(sys.argv[1])
wrapper(Platform(device="slurm", verbose=False, ipc_groups=None))(scenarios.wait_for_ever).submit(folder)
while not (folder / "begun-0").exists():
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slurm
def test_a_job_whose_submitter_was_killed_ends(on_slurm, folders, tmp_path):
    """When its lease is over: the rank cleans up, and the folder is gone."""
    done = subprocess.run([sys.executable, "-c", FORGETFUL, tmp_path], cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    all_said(tmp_path, "cleaned", 1)
    none_alive(tmp_path, 1)
    eventually(lambda: not list(folders.iterdir()), "the end of the folder")


@pytest.mark.ray
def test_a_ray_cluster_that_is_too_small_is_told(ray_cluster):
    """At once, with what its nodes have: Ray itself would wait for ever."""
    told = refusal_of("too many nodes", "ray", n_nodes=9)
    assert told.startswith(
        "the platform needs 9 node(s) with 1 CPU each, but only 2 of the Ray cluster's nodes have that: "
    )


@pytest.mark.ray
def test_a_lost_ray_node_is_told(ray_cluster, tmp_path):
    """RankDiedError for its rank, and the ranks of other nodes end."""
    node = ray_cluster.add_node()
    launch = wrapper(Platform(device="ray", n_nodes=3, verbose=False))(scenarios.wait_for_ever).submit(tmp_path)
    try:
        all_said(tmp_path, "begun", 3)
        ray_cluster.kill_node(node)
        with pytest.raises(RankDiedError) as raised:
            launch.results(PATIENCE_S)
    finally:
        launch.cancel()
    SEEN.note("node lost", "ray", Told.of(raised.value))
    assert "was lost with its node, which no longer answers (node " in str(raised.value)
    none_alive(tmp_path, 3)


@pytest.mark.slurm
def test_the_folder_of_a_launch_is_private_and_tells_no_secrets(on_slurm, folders, tmp_path, monkeypatch):
    """Nobody else may enter it, no file in it has the submitter's environment, and it goes with the launch."""
    monkeypatch.setenv("A_SECRET", WORDS)
    found = []

    def look(launch):
        all_said(tmp_path, "begun", 4)
        (folder,) = folders.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = [path for path in folder.rglob("*") if path.is_file()]
        found.extend(str(path) for path in files if WORDS.encode() in path.read_bytes())
        assert len(files) > 3
        launch.cancel()

    on_slurm.play(scenarios.wait_for_ever, tmp_path, do=look).raised()
    assert not found
    assert Path(folders).is_dir()

"""Launches that Slurm ends or refuses, without a cluster: scripts replace the Slurm commands."""

from __future__ import annotations

import math
import os
import signal

import pytest

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    Platform,
    RankDiedError,
    wrapper,
)
from parawrap.launch import Job
from parawrap.launch.slurm import batch_run, job_start
from parawrap.launch.slurm.job_start import JobStart
from parawrap.launch.slurm.launch_folder import Folder
from parawrap.processes.outcomes import Died
from tests.helpers.waiting import PATIENCE_S

STATES = [
    ("TIMEOUT", LaunchTimeoutError, "len reached the time limit of Slurm job 1, 01:00:00"),
    (
        "OUT_OF_MEMORY",
        LaunchError,
        "len used more memory than Slurm job 1 had reserved, 2 GB per node",
    ),
    ("NODE_FAIL", LaunchError, "has lost a node, and Slurm does not say which one of node0, node1"),
    ("PREEMPTED", LaunchError, "Slurm job 1, which ran len, ended as PREEMPTED"),
    (
        "CANCELLED",
        LaunchCancelledError,
        "was cancelled by another process: Slurm job 1 was removed from the queue",
    ),
    ("FAILED", LaunchError, "Slurm job 1, which ran len, ended as FAILED (NonZeroExitCode)"),
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    """The launch folder. No launch leaves files in it."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
    yield
    assert not folder.is_dir() or not list(folder.iterdir())


@pytest.fixture
def ends_as(tmp_path, monkeypatch):
    """Make Slurm say that each job has ended in a state."""
    return lambda state, *args, **options: _replace_slurm(
        tmp_path, monkeypatch, state, *args, **options
    )


def _replace_slurm(tmp_path, monkeypatch, state, *, restarts=0, log="", down=""):
    """Slurm restarted the job so often, wrote this log, and reports a node as down."""
    monkeypatch.setattr(batch_run, "_POLL_S", 0.1)
    monkeypatch.setattr(batch_run, "_FILE_DELAY_S", 0.1)
    shown = (
        f"JobId=1 JobState={state} Reason=NonZeroExitCode Restarts={restarts} TimeLimit=01:00:00"
    )
    shown += " NodeList=node[0-1] Command=no"
    answer = (
        "case $* in *hostnames*\\[*) echo node0 node1;; *hostnames*) echo $3;; *) echo "
        f"'{shown}';; esac"
    )
    write = (
        "printf '"
        + log.replace("\n", "\\n")
        + "' > $(sed -n 's/^#SBATCH --output=//p' $1 | sed s/%j/1/)"
    )
    programs = {
        "sbatch": f"{write}; echo Submitted batch job 1",
        "scontrol": answer,
        "scancel": ":",
        "srun": ":",
    }
    programs["sinfo"] = f"case $* in *{down or 'none'}) echo DOWN;; *) echo IDLE;; esac"
    for name, line in programs.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{line}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.parametrize(("state", "kind", "text"), STATES, ids=[each[0] for each in STATES])
def test_each_final_state_has_its_error(state, kind, text, ends_as):
    ends_as(state)
    with pytest.raises(kind) as raised:
        wrapper(Platform(device="slurm", verbose=False, ram=2, n_nodes=2))(len).submit("").results(
            PATIENCE_S
        )
    assert text in str(raised.value)


def test_jobs_that_list_some_of_their_nodes(ends_as):
    """Slurm lists the nodes that still end, and none that was lost. No rank is blamed."""
    ends_as("NODE_FAIL", down="node0")
    with pytest.raises(LaunchError, match="does not say which one of its nodes") as raised:
        wrapper(Platform(device="slurm", verbose=False, n_nodes=3))(len).submit("").results(
            PATIENCE_S
        )
    assert not isinstance(raised.value, RankDiedError)


def test_an_unknown_node_uses_up_a_restart(ends_as):
    ends_as("NODE_FAIL")
    platform = Platform(device="slurm", verbose=False, n_nodes=2, max_restarts=1)
    with pytest.raises(LaunchError, match="max_restarts=1 allows no more starts") as raised:
        wrapper(platform)(len).submit("").results(PATIENCE_S)
    assert raised.value.__notes__ == ["attempt 0 lost a node"]


BEGUN = "parawrap: start 0 of this job\n"
RESTARTS = [
    ("", "", LaunchError, "again (start 1), and nothing reports a lost node"),
    (
        "",
        "node1",
        RankDiedError,
        "rank 1 of 2 was lost with its node, in Slurm job 1 (node 1, node1)",
    ),
    (
        "srun: error: Node failure on node1\n",
        "",
        RankDiedError,
        "rank 1 of 2 was lost with its node",
    ),
    (
        "DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS\n",
        "",
        LaunchError,
        "does not say which one of node0, node1",
    ),
    (
        "JOB 1 CANCELLED AT 2026 DUE TO JOB REQUEUE ***\n",
        "",
        LaunchCancelledError,
        "was removed from the queue",
    ),
    (
        "JOB 1 CANCELLED AT 2026 DUE TO PREEMPTION ***\n",
        "",
        LaunchCancelledError,
        "was removed from the queue",
    ),
]


@pytest.mark.parametrize(("words", "down", "kind", "text"), RESTARTS)
def test_a_restart_alone_is_no_lost_node(words, down, kind, text, ends_as):
    """Slurm starts the job again, and a user cancels it.

    A restart that was wanted does not count for max_restarts=0.
    """
    ends_as("CANCELLED", restarts=1, log=BEGUN + words, down=down)
    with pytest.raises(kind) as raised:
        wrapper(Platform(device="slurm", verbose=False, n_nodes=2))(len).submit("").results(
            PATIENCE_S
        )
    assert text in str(raised.value)
    assert type(raised.value) is kind


def test_stacks_of_ranks_that_do_not_answer(monkeypatch):
    """The stacks of ranks that do not answer say so. A request leaves no file, and ranks that
    have ended have no stacks.
    """
    monkeypatch.setattr(batch_run, "_STACKS_S", 0.5)
    (folder,) = Folder.new("job", 1)
    run = batch_run.BatchRun(Job(Platform(device="slurm", n_nodes=3), len, ("",)), folder)
    assert run.stacks() == {}
    run._start = JobStart(0, run.job.platform, folder, run.number)
    run._start.outcomes[2] = Died(0.0, 0, 7)
    run._has_begun = True
    folder.write_answer(0, 1, "of the first request")
    stacks = run.stacks()
    assert (stacks.keys(), stacks[0]) == ({0, 1}, "of the first request")
    assert stacks[1].startswith("no answer within ")
    assert run.stacks()[0] == stacks[1], "an answer to an earlier request"
    assert folder.last_request(0) == 0
    folder.remove()


@pytest.mark.parametrize(
    ("words", "died"),
    [
        ("Exited with exit code 7", Died(math.inf, 0, 7)),
        ("exited", Died(math.inf, 0, 0)),
        ("Killed", Died(math.inf, 0, -signal.SIGKILL)),
        ("Segmentation fault (core dumped)", Died(math.inf, 0, -signal.SIGSEGV)),
        ("Real-time signal 10", Died(math.inf, 0, -signal.SIGRTMIN - 10)),
        ("Out Of Memory", Died(math.inf, 0, None, lost_with="its task: Out Of Memory")),
    ],
)
def test_words_of_srun_name_a_death(words, died):
    assert job_start._read_death(words) == died


def test_only_the_first_ends_are_deaths():
    """After its line about the step, srun ends the other tasks.

    It also names tasks that still run.
    """
    log = (
        "srun: error: node0: tasks 2-3,5: Killed\nsrun: StepId=7.0 task 4: running\nsrun: "
        "launch/slurm: _step_signal: Terminating StepId=7.0\nsrun: error: node1: task 1: "
        "Terminated\n"
    )
    first = log.partition(job_start._ENDS_ALL)[0]
    ((ranks, how),) = job_start._DEATH.findall(first)
    assert ([*job_start._numbers_in(ranks)], how) == ([2, 3, 5], "Killed")

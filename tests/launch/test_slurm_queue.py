"""Parsing of the output of Slurm commands. Scripts with fixed output replace the commands."""

from __future__ import annotations

import os

import pytest

from parawrap.launch.slurm._commands import JobState, job_state, requeue_job

PENDING = "JobId=7 ArrayJobId=7 ArrayTaskId=4-9%2 JobState=PENDING Reason=JobArrayTaskLimit Restarts=0 NodeList=(null)"
RUNNING = "JobId=9 ArrayJobId=7 ArrayTaskId=4 JobState=RUNNING Reason=None Restarts=1 TimeLimit=01:00:00 NodeList=node[0-1]"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that replaces a Slurm command by a script and returns the file with the arguments of the last call."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def answer(command, text, code=0, last=""):
        path = tmp_path / command
        path.write_text(f"#!/bin/sh\necho $* > {path}.args\necho '{text}'\n{last or f'exit {code}'}\n")
        path.chmod(0o755)
        return path.with_suffix(".args")

    return answer


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (PENDING, JobState("PENDING", "JobArrayTaskLimit", 0, "", "")),
        (RUNNING, JobState("RUNNING", "None", 1, "node[0-1]", "01:00:00")),
    ],
    ids=["pending", "running"],
)
def test_job_state_is_parsed_from_its_record(text, state, slurm):
    """A pending array element uses the shared record of all pending elements."""
    arguments = slurm("scontrol", text)
    assert job_state("7_4") == state
    assert arguments.read_text() == "--oneliner show job 7_4\n"


@pytest.mark.parametrize("unknown", ["slurm_load_jobs error: Invalid job id specified", "Job 7_4 not found"])
def test_a_job_unknown_to_the_controller_is_over(unknown, slurm):
    """A job that the controller has forgotten counts as over. No accounting is asked."""
    accounts = slurm("sacct", "COMPLETED")
    slurm("scontrol", unknown, 1)
    state = job_state("7_4")
    assert state.name == "FORGOTTEN"
    assert state.is_over
    assert not accounts.exists()


def test_without_an_answer_the_job_state_is_unknown(slurm):
    """If the controller does not answer, the job does not count as over."""
    slurm("scontrol", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1)
    state = job_state("7_4")
    assert state.name == "UNKNOWN"
    assert not state.is_over


def test_an_element_of_an_array_is_requeued_alone(slurm, monkeypatch):
    """The requeue command names the element, because the SLURM_JOB_ID of one element is the number of the whole array."""
    arguments = slurm("scontrol", "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert requeue_job("7") is None
    assert arguments.read_text() == "requeue 7\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "9")
    assert requeue_job("7") is None
    assert arguments.read_text() == "requeue 7_9\n"
    slurm("scontrol", "Requested operation is presently disabled", 1)
    assert requeue_job("7") == "Requested operation is presently disabled"


@pytest.mark.parametrize("sign", ["TERM", "KILL"])
def test_a_requeue_that_slurm_ends_with_the_job_is_done(sign, slurm):
    """Slurm ends all processes of the job, and the command that requeues the job is one of them."""
    arguments = slurm("scontrol", "", last=f"kill -{sign} $$")
    assert requeue_job("7") is None
    assert arguments.read_text() == "requeue 7\n"

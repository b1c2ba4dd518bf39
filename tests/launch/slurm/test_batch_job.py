"""The batch job of a Slurm launch: its script and its submission. Scripts with fixed output replace Slurm's commands."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess

import pytest

from parawrap.errors import PlatformError
from parawrap.launch._platform import Platform
from parawrap.launch.slurm import batch_job
from parawrap.launch.slurm.commands import job_state, requeue_job
from parawrap.launch.slurm.launch_folder import Folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "launches"))
    (folder,) = Folder.new("my job", 1)
    return folder


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that replaces a command by a script and returns the file with the arguments of the last call."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def put(name, script):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho $* > {path}.args\n{script}\n")
        path.chmod(0o755)
        return path.with_suffix(".args")

    return put


def platform(**fields):
    return Platform(**{"device": "slurm", "n_nodes": 2, "n_cpus": 4} | fields)


def test_the_script_has_the_resources():
    """It has one task per rank. Options and parameters of the user override, and need no Slurm."""
    text = batch_job.job_script(platform(n_gpus=2, ram=1.5))
    for line in ("--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=4", "--gpus-per-node=2", "--mem=1536M"):
        assert f"#SBATCH {line}\n" in text
    assert "--kill-on-bad-exit=1" in text
    more = {"account": "lab", "slurm_signal_delay_s": 77, "mail_type": "BEGIN", "setup": ["echo before"], "time": 9}
    text = batch_job.job_script(platform(timeout_min=3, slurm_additional_parameters=more))
    for line in ("--account=lab", "--signal=USR2@77", "--mail-type=BEGIN", "--time=9"):
        assert f"#SBATCH {line}\n" in text
    assert text.index("echo before") < text.index("srun ")


@pytest.mark.parametrize("name", ["nodes", "ntasks-per-node", "slurm_nodes", "use_srun", "error", "open_mode"])
def test_contradicting_parameters(name):
    with pytest.raises(PlatformError, match=f"leave {name.removeprefix('slurm_').replace('-', '_')} out"):
        batch_job.job_script(platform(slurm_additional_parameters={name: 1}))


def test_sbatch_sees_no_surrounding_job(folder, command, tmp_path, monkeypatch):
    """It would read the variables of the job as options. This process keeps them."""
    command("sbatch", f"env > {tmp_path}/seen; echo Submitted batch job 7")
    for name in ("srun", "scontrol", "scancel"):
        command(name, "")
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "here")
    assert batch_job.submit(platform(), [folder], b"") == ["7"]
    assert os.environ["SLURM_JOB_ID"] == "here"
    names = {line.partition("=")[0] for line in (tmp_path / "seen").read_text().splitlines()}
    assert {name for name in names if name.startswith("SLURM_")} == {"SLURM_CONF"}


def test_signals_wait_for_the_rank():
    """Slurm's signals would end a process that still imports torch, and processes that the function starts."""
    show = "import signal; print(*sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))"
    call = [*shlex.split(batch_job.PYTHON), "-c", show]
    blocked = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
    assert {str(int(signal.SIGUSR1)), str(int(signal.SIGUSR2))} <= set(blocked)


# -- other commands of Slurm


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        ("slurm_load_jobs error: Invalid job id specified", "FORGOTTEN"),
        ("Job 7_4 not found", "FORGOTTEN"),
        ("slurm_load_jobs error: Unable to contact slurm controller (connect failure)", "UNKNOWN"),
    ],
)
def test_a_forgotten_job_is_over(answer, name, command):
    """A job does not count as over if the controller does not answer. Accounting is not used."""
    accounts = command("sacct", "echo COMPLETED")
    command("scontrol", f"echo '{answer}'; exit 1")
    state = job_state("7_4")
    assert (state.name, state.is_over) == (name, name == "FORGOTTEN")
    assert not accounts.exists()


def test_an_element_is_requeued_alone(command, monkeypatch):
    """The SLURM_JOB_ID of one element is the number of the whole array."""
    arguments = command("scontrol", "")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert requeue_job("7") is None
    assert arguments.read_text() == "requeue 7\n"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "7")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "9")
    assert requeue_job("7") is None
    assert arguments.read_text() == "requeue 7_9\n"
    command("scontrol", "echo Requested operation is presently disabled; exit 1")
    assert requeue_job("7") == "Requested operation is presently disabled"
    command("scontrol", "kill -TERM $$")  # Slurm ends all processes of the job, and this command is one of them
    assert requeue_job("7") is None

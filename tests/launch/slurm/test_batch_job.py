"""The batch job of a Slurm launch: its script and its submission.

Scripts with fixed output replace Slurm's commands.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess

import pytest

from parawrap.errors import LaunchError, PlatformError
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
    """A function that replaces a command by a script and returns the file with the arguments of the
    last call.
    """
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
    """The script has one task per rank. Options and parameters of the user override, and need no
    Slurm.
    """
    text = batch_job.job_script(platform(n_gpus=2, ram=1.5))
    for line in (
        "--nodes=2",
        "--ntasks-per-node=2",
        "--cpus-per-task=4",
        "--gpus-per-node=2",
        "--mem=1536M",
    ):
        assert f"#SBATCH {line}\n" in text
    assert "--kill-on-bad-exit=1" in text
    more = {
        "account": "lab",
        "slurm_signal_delay_s": 77,
        "mail_type": "BEGIN",
        "setup": ["echo before"],
        "time": 9,
    }
    text = batch_job.job_script(platform(timeout_min=3, slurm_additional_parameters=more))
    for line in ("--account=lab", "--signal=USR2@77", "--mail-type=BEGIN", "--time=9"):
        assert f"#SBATCH {line}\n" in text
    assert text.index("echo before") < text.index("srun ")


@pytest.mark.parametrize(
    "name", ["nodes", "ntasks-per-node", "slurm_nodes", "use_srun", "error", "open_mode"]
)
def test_contradicting_parameters(name):
    with pytest.raises(
        PlatformError, match=f"leave {name.removeprefix('slurm_').replace('-', '_')} out"
    ):
        batch_job.job_script(platform(slurm_additional_parameters={name: 1}))


@pytest.mark.parametrize("value", ["a\nexport EVIL=1", "tab\there", "a\x00b"])
@pytest.mark.parametrize("field", ["name", "partition", "account"])
def test_a_value_stays_in_its_line(field, value):
    """The rest of a value after a line break would be a command."""
    fields = (
        {"slurm_additional_parameters": {"account": value}}
        if field == "account"
        else {field: value}
    )
    with pytest.raises(PlatformError) as raised:
        batch_job.job_script(platform(**fields))
    assert field in str(raised.value)
    assert repr(value) in str(raised.value)


def test_the_preview_is_the_script(command, tmp_path, monkeypatch):
    """The preview is the script, and quotes the folder."""
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(tmp_path / "my launches; true"))
    (folder,) = Folder.new("job", 1)
    _replace_slurm(command, f'cp "$1" {tmp_path}/submitted; echo Submitted batch job 7')
    assert batch_job.submit(platform(name="job"), [folder], b"") == ["7"]
    planned = batch_job.job_script(platform(name="job"))
    submitted = (tmp_path / "submitted").read_text()
    assert planned.replace("/job/", f"/{folder.path.parent.name}/") == submitted


def _replace_slurm(command, sbatch):
    command("sbatch", sbatch)
    for name in ("srun", "scontrol", "scancel"):
        command(name, "")


def test_sbatch_sees_no_surrounding_job(folder, command, tmp_path, monkeypatch):
    """No variable of a surrounding job reaches sbatch, which would read it as an option. This
    process keeps the variables.
    """
    _replace_slurm(command, f"env > {tmp_path}/seen; echo Submitted batch job 7")
    for name in ("SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_CONF"):
        monkeypatch.setenv(name, "here")
    assert batch_job.submit(platform(), [folder], b"") == ["7"]
    assert os.environ["SLURM_JOB_ID"] == "here"
    assert _names_in(tmp_path / "seen", "SLURM_") == {"SLURM_CONF"}


def _names_in(path, prefix):
    names = {line.partition("=")[0] for line in path.read_text().splitlines()}
    return {name for name in names if name.startswith(prefix)}


def test_variables_override_no_platform(folder, command, tmp_path, monkeypatch):
    """Variables of sbatch are stronger than the script.

    Those for which nothing is given still hold.
    """
    names = {
        "PARTITION",
        "TIMELIMIT",
        "JOB_NAME",
        "ACCOUNT",
        "QOS",
        "ARRAY_INX",
        "OUTPUT",
        "MEM_PER_NODE",
        "CONSTRAINT",
    }
    for name in names:
        monkeypatch.setenv(f"SBATCH_{name}", "here")
    before = dict(os.environ)
    for sbatch, ends in (
        (f"env > {tmp_path}/seen; echo Submitted batch job 7", False),
        ("echo no >&2; exit 1", True),
    ):
        _replace_slurm(command, sbatch)
        with pytest.raises(LaunchError) if ends else contextlib.nullcontext():
            given = platform(
                partition="mine", timeout_min=3, slurm_additional_parameters={"account": "lab"}
            )
            batch_job.submit(given, [folder], b"")
        assert dict(os.environ) == before
    assert _names_in(tmp_path / "seen", "SBATCH_") == {"SBATCH_QOS", "SBATCH_CONSTRAINT"}
    _replace_slurm(command, f"env > {tmp_path}/seen; echo Submitted batch job 7")
    batch_job.submit(platform(), [folder], b"")
    kept = {"PARTITION", "TIMELIMIT", "ACCOUNT", "QOS", "CONSTRAINT"}
    assert _names_in(tmp_path / "seen", "SBATCH_") == {f"SBATCH_{name}" for name in kept}


def run_python(code, folder):
    """Run code as the tasks run submitit."""
    call = [*shlex.split(batch_job.PYTHON), "-c", code, str(folder)]
    return subprocess.run(call, check=False, capture_output=True, text=True)


def test_a_signal_waits_for_the_rank(tmp_path):
    """SIGUSR2 would end a process that still imports torch, and what the function starts.

    SIGUSR1 is the user's.
    """
    show = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    assert run_python(show, tmp_path).stdout.split() == [str(int(signal.SIGUSR2))]


def test_files_in_the_folder_do_no_harm(tmp_path):
    """`python -m` would search there first."""
    (tmp_path / "random.py").write_text("print('replaced')")
    assert run_python("import random, sys; print(sys.flags.safe_path)", tmp_path).stdout == "True\n"


def test_a_task_runs_nothing_of_another_user(tmp_path):
    done = run_python("print('run')", "/" if os.geteuid() else _given_away(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "belongs to another user" in done.stderr


def _given_away(path):
    os.chown(path, 65534, 65534)
    return path


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
    command(
        "scontrol", "kill -TERM $$"
    )  # Slurm ends all processes of the job, and this command is one of them
    assert requeue_job("7") is None

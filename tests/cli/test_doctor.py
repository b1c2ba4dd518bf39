"""``parawrap doctor``: states, trials, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from contextlib import suppress
from unittest.mock import Mock

import pytest

from parawrap.cli import _check, _doctor, _machine, _trials, main
from parawrap.cli._check import Check, run_command
from tests.cli.conftest import ROOT

STATES = {"ok", "missing", "warning", "problem"}


FACTS = {"torch_version": "2.0", "nvidia_gpu_models": "GPU 0: A\nGPU 1: B", "cpu_info": "many lines"}


@pytest.fixture
def checks(monkeypatch):
    """A function that sets the checks of the doctor."""

    def use(*made):
        monkeypatch.setattr(_doctor, "describe_machine", lambda _: (FACTS, list(made)))
        monkeypatch.setattr(_doctor, "TRIALS", ())

    return use


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that puts a shell script on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def put(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


def test_this_machine_has_no_problem(parawrap):
    """The fields of collect_env are there, and each check has a state and a detail. The three trials work here."""
    import torch

    shown = parawrap("doctor", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    report = json.loads(shown.stdout)
    assert report["machine"]["torch_version"] == torch.__version__
    assert {"os", "python_version", "cuda_compiled_version", "pip_packages"} <= set(report["machine"])
    assert {each["state"] for each in report["checks"]} <= STATES - {"problem"}
    assert all(each["detail"] for each in report["checks"])
    assert {"block on lanes", "launch of two ranks", "block on two workers"} <= {each["name"] for each in report["checks"]}


def test_each_state_has_a_line(checks, capsys):
    """Facts, a line per check with its cure below it, and a summary."""
    checks(Check("a", "ok", "here"), Check("b", "warning", "small", "Enlarge it"), Check("c", "missing", "no"))
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split() for line in lines] == [
        ["torch", "version:", "2.0"],
        ["nvidia", "gpu", "models:", "GPU", "0:", "A,", "GPU", "1:", "B"],
        [],
        ["ok", "a", "here"],
        ["warning", "b", "small"],
        ["Enlarge", "it"],
        ["missing", "c", "no"],
        [],
        ["0", "problems,", "1", "warning,", "1", "ok,", "1", "missing"],
    ]


def test_doctor_needs_no_standard_output(checks, monkeypatch):
    """As after >&- in a shell: the exit code is the result."""
    checks(Check("a", "problem", "broken", "Mend it"))
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["doctor"]) == 1


def test_a_machine_without_torch_is_a_problem(parawrap, tmp_path):
    """The only line names the missing module and its cure, and no trial runs."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    shown = parawrap("doctor", "--json", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    (check,) = json.loads(shown.stdout)["checks"]
    assert (shown.returncode, check["state"]) == (1, "problem")
    assert "No module named torch" in check["detail"]
    assert "install torch" in check["cure"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_problem_gives_exit_code_1(checks, capsys, options):
    """The cure of a problem is shown. Its traceback is shown with --verbose."""
    checks(Check("a", "problem", "broken", "Mend it", traceback="line 1"), Check("b", "ok", "here"))
    assert main(["doctor", *options]) == 1
    assert "Mend it" in capsys.readouterr().out
    main(["doctor", "--verbose"])
    assert "line 1" in capsys.readouterr().out


def test_a_trial_that_fails_shows_its_error():
    """The last line of the error is the detail, and the traceback is kept."""
    check = _trials.run_trial("gone", 60)
    assert (check.state, check.detail) == ("problem", "KeyError: 'gone'")
    assert "Traceback" in check.traceback


def test_files_of_the_working_folder_do_not_mislead_a_trial(tmp_path, monkeypatch):
    """A trial does not import a file that has the name of a standard module."""
    (tmp_path / "random.py").write_text("raise RuntimeError('not the standard module')")
    monkeypatch.chdir(tmp_path)
    assert _trials.run_trial("block on lanes", 60).state == "ok"


def test_a_trial_has_a_time_limit():
    """A trial that is not done in time is a problem."""
    check = _trials.run_trial("block on two workers", 0.01)
    assert (check.state, check.detail) == ("problem", "not done after 0.01 seconds")


def test_a_command_is_killed_with_the_processes_that_it_started(command, tmp_path):
    """A process that keeps the pipe of its parent open does not prolong the time limit."""
    command("slow", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait")
    start = time.monotonic()
    assert run_command(["slow"], 1.0) == (1, "", "not done after 1 seconds")
    assert time.monotonic() - start < 30
    pid = int((tmp_path / "pid").read_text())
    with suppress(ProcessLookupError):
        while True:  # until init has reaped the process
            os.kill(pid, 0)
            time.sleep(0.01)


def test_slurm_whose_controller_answers(command):
    """The controller's answer is the state of Slurm."""
    command("sbatch", "")
    command("scontrol", '[ "$1" = ping ] && echo "Slurmctld(primary) at head is UP"')
    check = _machine._check_slurm()
    assert check.state == "ok"
    assert check.detail.startswith("the controller answers; submitit ")


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ('echo "Slurmctld(primary) at head is DOWN"', "Slurmctld(primary) at head is DOWN"),
        ('echo "scontrol: fatal: no configuration" >&2; exit 1', "scontrol: fatal: no configuration"),
        ("sleep 600", "not done after 0.5 seconds"),
    ],
)
def test_slurm_whose_controller_does_not_answer_is_a_warning(command, monkeypatch, script, detail):
    """Launches on this machine work. scontrol has a time limit."""
    command("sbatch", "")
    command("scontrol", script)
    monkeypatch.setattr(_machine, "_SCONTROL_LIMIT_S", 0.5)
    check = _machine._check_slurm()
    assert (check.state, check.detail) == ("warning", f"the controller does not answer: {detail}")
    assert "scontrol ping" in check.cure


def test_small_shared_memory_is_a_warning(monkeypatch, tmp_path):
    """The default size of docker, 64 MiB, is too small for a DataLoader with workers."""
    usage = type("Usage", (), {"total": 64 << 20, "free": 1 << 20})
    monkeypatch.setattr(_machine.shutil, "disk_usage", lambda _: usage)
    check = _machine._check_shared_memory(tmp_path)
    assert check.state == "warning"
    assert "--shm-size" in check.cure
    assert _machine._check_shared_memory(tmp_path / "gone").state == "missing"


def test_few_open_files_are_a_warning(monkeypatch):
    """A low limit names the command that raises it."""
    monkeypatch.setattr(_machine.resource, "getrlimit", lambda _: (256, 4096))
    assert "ulimit -n" in _machine._check_open_files().cure


def test_a_gpu_without_a_cuda_build_is_a_warning(monkeypatch):
    """A machine with nvidia-smi and a CPU build of torch names the remedy."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(_machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in _machine._check_accelerators().cure
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in _machine._check_accelerators().cure


def test_a_check_that_raises_is_a_problem_of_its_part(monkeypatch):
    """A broken driver does not hide the other parts."""
    monkeypatch.setattr(_machine, "_CHECKS", {"a": lambda: 1 // 0, "b": lambda: Check("b", "ok", "here")})
    broken, fine = _machine.machine_checks()
    assert (broken.name, broken.state) == ("a", "problem")
    assert broken.detail.startswith("ZeroDivisionError: ")
    assert fine.state == "ok"


def test_a_trial_that_cannot_start_is_a_problem(monkeypatch):
    """A limit on processes is a finding of the doctor, not a crash."""
    refusal = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(_check.subprocess, "Popen", Mock(side_effect=refusal))
    check = _trials.run_trial("launch of two ranks", 1.0)
    assert (check.state, check.detail) == ("problem", f"the process did not start: {refusal}")
    assert "ulimit -u" in check.cure

"""``parawrap doctor``: states, trials, cures, and exit codes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from parawrap.cli import _check, _doctor, _machine, _trials, main
from parawrap.cli._check import Check, run_command
from tests.helpers.processes import assert_gone
from tests.helpers.worlds import ROOT


@pytest.fixture
def command(tmp_path, monkeypatch):
    """A function that puts a shell script on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def put(name, script):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


def test_machine_has_no_problem(here, monkeypatch):
    monkeypatch.setattr(_doctor, "TRIALS", ())  # each trial imports torch
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    shown = here("doctor", "--json", "--timeout", "600")
    assert (shown.returncode, shown.stderr) == (0, "")
    report = json.loads(shown.stdout)
    assert report["machine"]["torch_version"] == torch.__version__
    assert {"os", "python_version", "cuda_compiled_version", "pip_packages"} <= set(report["machine"])
    assert "emulated cores (PARAWRAP_NEURON_RUNTIME=host)" in shown.stdout
    assert all(each["detail"] and each["state"] in ("ok", "missing", "warning") for each in report["checks"])


@pytest.mark.parametrize("name", _trials.TRIALS)
def test_trials_work_here(name):
    assert " ms" in _trials.TRIALS[name]()


def test_a_machine_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "parawrap", "doctor", "--json"]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    (check,) = json.loads(shown.stdout)["checks"]
    assert (shown.returncode, check["state"]) == (1, "problem")
    assert "No module named torch" in check["detail"]
    assert "install torch" in check["cure"]


def test_each_state_has_a_line(monkeypatch, capsys):
    facts = {"torch_version": "2.0", "nvidia_gpu_models": "GPU 0: A\nGPU 1: B", "cpu_info": "many lines"}
    checks = [Check("b", "warning", "small", "Enlarge it"), Check("c", "missing", "no")]
    monkeypatch.setattr(_doctor, "describe_machine", lambda _: (facts, checks))
    monkeypatch.setattr(_doctor, "TRIALS", ())
    assert main(["doctor"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]] == [
        "torch version: 2.0",
        "nvidia gpu models: GPU 0: A, GPU 1: B",
        "",
        "warning b small",
        "Enlarge it",
        "missing c no",
        "",
        "0 problems, 1 warning, 0 ok, 1 missing",
    ]


def test_problem_gives_exit_code_1(monkeypatch, capsys):
    """Its cure is shown, and its traceback with --verbose. No standard output is needed."""
    check = Check("a", "problem", "broken", "Mend it", traceback="line 1")
    monkeypatch.setattr(_doctor, "describe_machine", lambda _: ({}, [check]))
    for options, text in (["--json"], "Mend it"), ([], "Mend it"), (["--verbose"], "line 1"):
        assert main(["doctor", *options]) == 1
        assert text in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdout", None)  # as after >&- in a shell
    assert main(["doctor"]) == 1


def test_failed_trial_is_a_problem(monkeypatch, tmp_path):
    """An error, a time limit, and a limit on processes are findings. Files of the working folder do not mislead it."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not the standard module')")
    monkeypatch.chdir(tmp_path)
    check = _trials.run_trial("gone", 600)
    assert (check.state, check.detail) == ("problem", "KeyError: 'gone'")
    assert "Traceback" in check.traceback
    check = _trials.run_trial("block on two workers", 0.01)
    assert (check.state, check.detail) == ("problem", "not done after 0.01 seconds")
    refusal = BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
    monkeypatch.setattr(_check.subprocess, "Popen", Mock(side_effect=refusal))
    check = _trials.run_trial("launch of two ranks", 1.0)
    assert (check.state, check.detail) == ("problem", f"the process did not start: {refusal}")
    assert "ulimit -u" in check.cure


def test_a_command_is_killed_whole(command, tmp_path):
    """A process that keeps the pipe of its parent open does not prolong the time limit."""
    command("slow", f"sleep 600 & echo $! > {tmp_path / 'pid'}; wait")
    assert run_command(["slow"], 3.0) == (1, "", "not done after 3 seconds")
    assert_gone([int((tmp_path / "pid").read_text())])


def test_slurm_is_as_it_answers(command):
    """Without an answer, it is a warning, because launches on this machine work."""
    command("sbatch", "")
    command("scontrol", '[ "$1" = ping ] && echo "Slurmctld(primary) at head is UP"')
    check = _machine._check_slurm()
    assert (check.state, check.detail[:22]) == ("ok", "the controller answers")
    command("scontrol", 'echo "scontrol: fatal: no configuration" >&2; exit 1')
    check = _machine._check_slurm()
    assert check.detail == "the controller does not answer: scontrol: fatal: no configuration"
    assert (check.state, "scontrol ping" in check.cure) == ("warning", True)


def test_limits_are_warnings(monkeypatch, tmp_path):
    """Docker's shared memory, few open files, and a GPU that torch does not use."""
    monkeypatch.setattr(_machine.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=1 << 20))
    monkeypatch.setattr(_machine.resource, "getrlimit", lambda _: (256, 4096))
    check = _machine._check_shared_memory(tmp_path)
    assert (check.state, "--shm-size" in check.cure) == ("warning", True)
    assert _machine._check_shared_memory(tmp_path / "gone").state == "missing"
    assert "ulimit -n" in _machine._check_open_files().cure
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(_machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in _machine._check_accelerators().cure
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in _machine._check_accelerators().cure

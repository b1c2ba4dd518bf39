"""``parawrap doctor``: states, trials, cures, and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from parawrap.cli import _doctor, main
from parawrap.cli._doctor import Check
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
    """The trials run here, too."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    shown = here("doctor", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    report = json.loads(shown.stdout)
    assert report["machine"]["torch_version"] == torch.__version__
    assert {"os", "python_version", "cuda_compiled_version", "pip_packages"} <= set(report["machine"])
    found = {each["name"]: each for each in report["checks"]}
    assert "cores with the runtime host" in found["NeuronCores"]["detail"]
    assert "gave the output of the plain call" in found["block on two lanes"]["detail"]
    assert "two processes met" in found["launch of two ranks"]["detail"]
    assert all(each["state"] in ("ok", "missing", "warning") for each in found.values())


def test_a_machine_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module named torch')")
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-m", "parawrap", "doctor", "--json"]
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    (check,) = json.loads(shown.stdout)["checks"]
    assert (shown.returncode, check["name"], check["state"]) == (1, "torch", "problem")
    assert "No module named torch" in check["detail"]
    assert "Install torch" in check["cure"]


def test_each_state_has_a_line(monkeypatch, capsys):
    """A check that raises is a problem, with its cure and its traceback, and gives exit code 1."""
    facts = {"torch_version": "2.0", "nvidia_gpu_models": "GPU 0: A\nGPU 1: B", "cpu_info": "many lines"}
    checks = {
        "b": (lambda: Check("warning", "small", "Enlarge it"), ""),
        "c": (lambda: Check("missing", "no"), ""),
        "d": (lambda: 1 // 0, "Mend it"),
    }
    monkeypatch.setattr(_doctor, "_collect_facts", lambda: facts)
    monkeypatch.setattr(_doctor, "_CHECKS", checks)
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[:9] == [
        "torch version: 2.0",
        "nvidia gpu models: GPU 0: A, GPU 1: B",
        "",
        "warning b small",
        "Enlarge it",
        "missing c no",
        "problem d ZeroDivisionError: integer division or modulo by zero",
        "Mend it",
        "Traceback (most recent call last):",
    ]
    assert lines[-1] == "1 problem, 1 warning, 0 ok, 1 missing"


def test_slurm_is_as_it_answers(command, monkeypatch):
    """Without an answer, it is a warning, because launches on this machine work."""
    command("sbatch", "")
    command("scontrol", '[ "$1" = ping ] && echo "Slurmctld(primary) at head is UP"')
    check = _doctor._check_slurm()
    assert check.detail.startswith("the controller answers")
    command("scontrol", 'echo "scontrol: fatal: no configuration" >&2; exit 1')
    check = _doctor._check_slurm()
    assert check.detail == "the controller does not answer: scontrol: fatal: no configuration"
    assert (check.state, "scontrol ping" in check.cure) == ("warning", True)
    command("scontrol", "exec sleep 60")
    monkeypatch.setattr(_doctor, "_SCONTROL_LIMIT_S", 0.1)
    check = _doctor._check_slurm()
    assert (check.state, check.detail) == ("warning", "the controller does not answer within 0.1 s")


def test_limits_are_warnings(monkeypatch, tmp_path):
    """Docker's shared memory, few open files, and a GPU that torch does not use."""
    monkeypatch.setattr(_doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=1 << 20))
    monkeypatch.setattr(_doctor.resource, "getrlimit", lambda _: (256, 4096))
    check = _doctor._check_shared_memory(tmp_path)
    assert (check.state, "--shm-size" in check.cure) == ("warning", True)
    assert _doctor._check_shared_memory(tmp_path / "gone").state == "missing"
    assert "ulimit -n" in _doctor._check_open_files().cure
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in _doctor._check_accelerators().cure
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in _doctor._check_accelerators().cure

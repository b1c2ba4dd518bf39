"""``parawrap doctor``: states, trials, cures, and exit codes."""

from __future__ import annotations

import platform
from types import SimpleNamespace

import torch

from parawrap import __version__
from parawrap.cli import _doctor, main


def test_machine_has_no_problem(here):
    """The doctor prints the versions, six checks, and a summary. The trials run here, too."""
    shown = here("doctor")
    assert (shown.returncode, shown.stderr) == (0, "")
    versions, *checks, empty, summary = shown.stdout.splitlines()
    python = platform.python_version()
    assert versions == f"parawrap {__version__}, torch {torch.__version__}, Python {python}"
    states = [line.split()[0] for line in checks]
    assert states.count("ok") + states.count("warning") == 6  # a warning has a line below it
    assert "gave the output of the plain call" in shown.stdout
    assert "two processes met" in shown.stdout
    assert (empty, summary.startswith("0 problems, ")) == ("", True)


def test_each_state_has_a_line(monkeypatch, capsys):
    """A check that raises is a problem, with its traceback, and gives exit code 1."""
    checks = {"a": lambda: ("big", ""), "b": lambda: ("small", "Enlarge it"), "c": lambda: 1 / 0}
    monkeypatch.setattr(_doctor, "_CHECKS", checks)
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[:5] == [
        "ok a big",
        "warning b small",
        "Enlarge it",
        "problem c ZeroDivisionError: division by zero",
        "Traceback (most recent call last):",
    ]
    assert lines[-2:] == ["", "1 problem, 1 warning, 1 ok"]


def test_all_ends_with_the_report_of_torch(monkeypatch, capsys):
    """The report of torch comes last, so that a bug report has it and the checks stand first."""
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: "facts\nmore")
    monkeypatch.setattr(_doctor, "_CHECKS", {"a": lambda: ("big", "")})
    assert main(["doctor", "--all"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert lines == ["", "0 problems, 0 warnings, 1 ok", "", "facts", "more"]
    assert main(["doctor"]) == 0
    assert "facts" not in capsys.readouterr().out


def test_limits_are_warnings(monkeypatch, tmp_path):
    """Docker's shared memory, few open files, and a GPU that torch does not use."""
    monkeypatch.setattr(
        _doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=1 << 20)
    )
    monkeypatch.setattr(_doctor.resource, "getrlimit", lambda _: (256, 4096))
    assert "--shm-size" in _doctor._check_shared_memory(tmp_path)[1]
    assert _doctor._check_shared_memory(tmp_path / "gone")[1] == ""
    assert "ulimit -n" in _doctor._check_open_files()[1]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(_doctor.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in _doctor._check_accelerators()[1]
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in _doctor._check_accelerators()[1]

"""``parawrap doctor``: states, trials, cures, and exit codes."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from parawrap.cli import _doctor, main


def test_machine_has_no_problem(here):
    """The trials run here, too."""
    shown = here("doctor")
    assert (shown.returncode, shown.stderr) == (0, "")
    for part in (
        f"PyTorch version: {torch.__version__}",
        "gave the output of the plain call",
        "two processes met",
        "\n0 problems, ",
    ):
        assert part in shown.stdout


def test_each_state_has_a_line(monkeypatch, capsys):
    """A check that raises is a problem, with its traceback, and gives exit code 1."""
    checks = {"a": lambda: ("big", ""), "b": lambda: ("small", "Enlarge it"), "c": lambda: 1 / 0}
    monkeypatch.setattr(torch.utils.collect_env, "get_pretty_env_info", lambda: "facts")
    monkeypatch.setattr(_doctor, "_CHECKS", checks)
    assert main(["doctor"]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines[:7] == [
        "facts",
        "",
        "ok a big",
        "warning b small",
        "Enlarge it",
        "problem c ZeroDivisionError: division by zero",
        "Traceback (most recent call last):",
    ]
    assert lines[-1] == "1 problem, 1 warning, 1 ok"


def test_limits_are_warnings(monkeypatch, tmp_path):
    """Docker's shared memory, few open files, and a GPU that torch does not use."""
    monkeypatch.setattr(_doctor.shutil, "disk_usage", lambda _: SimpleNamespace(total=64 << 20, free=1 << 20))
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

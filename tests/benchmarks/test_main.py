"""The command: its suites, their environment, and its files."""

from __future__ import annotations

import datetime as dt
import json
import platform

import pytest
import torch

import parawrap
from benchmarks import __main__ as command
from benchmarks import cuda_python
from benchmarks._measure import Arm, Result, Row
from parawrap.backends.cpu_backend import usable_cores

ROW = Row(
    "calls",
    {"arm": Arm(2.0, 1.0, 3.0)},
    [Result("overhead", 2.0, "us").held_to("under", 1)],
    peers="torch",
    note="a remark",
)


@pytest.fixture
def started(monkeypatch):
    """Return the suites, benchmarks, and threads that the command would start."""
    found = []

    def start(suite, names, fixed):
        found.append((suite, names, fixed["OMP_NUM_THREADS"]))
        return 0

    monkeypatch.setattr(command, "_in_a_process", start)
    monkeypatch.setattr(command, "_measure", lambda suite, names: pytest.fail("measured in this process"))
    monkeypatch.setenv("OMP_NUM_THREADS", "not a number")
    return found


def test_without_a_gpu(monkeypatch, capsys, started):
    """The command prints the reason and returns 1. The other suites run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["cuda", "launching"]) == 1
    assert "cuda cannot run: no GPU is available: torch" in capsys.readouterr().out
    assert [suite for suite, _, _ in started] == ["launching"]


def test_a_failed_suite_fails_all(monkeypatch):
    """The command returns the highest exit code."""
    codes = iter([1, 0])
    monkeypatch.setattr(command, "_in_a_process", lambda suite, names, fixed: next(codes))
    assert command.main(["engine", "launching"]) == 1


def test_results_name_the_machine(monkeypatch, tmp_path, capsys):
    """The JSON file has hardware, versions, date, command, and rows. The page has the same."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(command, "_driver", lambda: "580.1")
    command._show("cuda", [ROW], keep=True)
    document = json.loads((tmp_path / "cuda.json").read_text())
    assert dt.date.fromisoformat(document["date"])
    assert document["command"] == "make bench-cuda (python -m benchmarks cuda)"
    assert document["hardware"] == {
        "machine": platform.machine(), "cores": f"{usable_cores()} cores", "gpu": "NVIDIA H200, driver 580.1"
    }  # fmt: skip
    assert document["versions"]["torch"] == torch.__version__
    assert document["versions"]["parawrap"] == parawrap.__version__
    assert document["rows"] == [json.loads(json.dumps(ROW.as_json()))]
    page = (tmp_path / "cuda.md").read_text()
    assert page.startswith(f"# On one GPU\n\n{document['date']}, ")
    assert "NVIDIA H200, driver 580.1" in page
    assert "| benchmark | quantity | value (us) | goal (us) | met |\n|---|---|---|---|---|\n" in page
    assert "| calls | overhead | 2 | under 1 | **no** |" in page
    assert "| calls | arm | 2 | 1 | 3 |" in page
    assert "| calls | torch |" in page
    assert "- calls: a remark." in page
    assert "`make bench-cuda` (`python -m benchmarks cuda`)" in page
    assert "| calls | overhead | 2 | under 1 | **no** |" in (tmp_path / "README.md").read_text()


def test_missing_requirements():
    """Names and versions come from setup.cfg."""
    required = cuda_python.requirements()
    assert [requirement.partition(">=")[0] for requirement in required] == [
        "torch", "wrapt", "typing-extensions", "optree", "cloudpickle",
    ]  # fmt: skip
    assert cuda_python.lacking(required) == []
    lacks = cuda_python.lacking(["torch>=99.0", "no-such-package>=1"])
    assert lacks[0].startswith("torch>=99.0 (has ")
    assert lacks[1] == "no-such-package>=1"

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


def test_without_a_gpu_the_cuda_suite_is_refused_by_name(monkeypatch, capsys, started):
    """The command prints the reason and returns 1. The other suites run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["cuda", "launching"]) == 1
    assert "cuda cannot run: no GPU is available: torch" in capsys.readouterr().out
    assert [suite for suite, _, _ in started] == ["launching"]


def test_without_a_gpu_the_other_suites_are_measured(monkeypatch, capsys, started):
    """The command skips the cuda suite, prints that, and returns 0."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert "cuda is skipped: no GPU is available" in capsys.readouterr().out
    assert [suite for suite, _, _ in started] == ["engine", "launching", "neuron", "cpu_lanes", "workers"]


def test_with_a_gpu_the_cuda_suite_includes_lanes_on_the_host(monkeypatch, started):
    """The suite runs in one process."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["cuda"]) == 0
    assert started == [("cuda", ("cuda", "cpu_lanes"), str(usable_cores()))]


def test_only_suites_about_cpu_lanes_run_torch_on_every_core(started):
    """The other suites use one thread, because torch's own threads are not one of their arms."""
    command.main(["mapping", "overhead", "collate"])
    assert started == [("cpu_lanes", ("mapping",), str(usable_cores())), ("engine", ("overhead", "collate"), "1")]


def test_a_suite_runs_in_this_process_if_its_environment_is_set(monkeypatch):
    """Otherwise each process would start another."""
    for name, value in command._fixed(command.SUITES["engine"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_measure", lambda suite, names: 7)
    assert command.main(["collate"]) == 7


def test_a_failure_of_one_suite_fails_the_command(monkeypatch):
    """The command returns the highest exit code."""
    codes = iter([1, 0])
    monkeypatch.setattr(command, "_in_a_process", lambda suite, names, fixed: next(codes))
    assert command.main(["engine", "launching"]) == 1


def test_an_unknown_word_is_refused():
    """The message lists the suites and benchmarks."""
    with pytest.raises(
        SystemExit, match=r"'cudo' is not a suite or benchmark. Use one of collate, cpu_lanes, cuda, engine"
    ):
        command.main(["cudo"])


def test_results_name_machine_date_and_command(monkeypatch, tmp_path, capsys):
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


def test_a_part_of_a_suite_is_printed_and_not_written(monkeypatch, tmp_path, capsys):
    """Files hold complete suites only."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    command._show("engine", [ROW], keep=False)
    assert "| calls | overhead | 2 | under 1 | **no** |" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_without_nvidia_smi_the_driver_is_unknown(monkeypatch):
    """A missing command does not fail the suite."""
    monkeypatch.setenv("PATH", "")
    assert command._driver() == "unknown"


def test_missing_and_old_requirements_are_listed():
    """Names and versions come from setup.cfg."""
    required = cuda_python.requirements()
    assert [requirement.partition(">=")[0] for requirement in required] == [
        "torch", "wrapt", "typing-extensions", "optree", "cloudpickle",
    ]  # fmt: skip
    assert cuda_python.lacking(required) == []
    lacks = cuda_python.lacking(["torch>=99.0", "no-such-package>=1"])
    assert lacks[0].startswith("torch>=99.0 (has ")
    assert lacks[1] == "no-such-package>=1"


def test_packages_of_tests_are_checked_too(capsys):
    """`make device` names pytest if the Python of a GPU machine lacks it."""
    assert cuda_python.main(["pytest", "pytest-timeout", "no-such-package"]) == 1
    assert "it lacks no-such-package. Install" in capsys.readouterr().err


def test_a_row_is_logged_when_it_is_measured(caplog):
    """A suite that is ended early leaves its rows in its log."""
    with caplog.at_level("INFO", logger="benchmarks"):
        Row("calls", {}, [Result("overhead", 1234.5, "us")])
    assert caplog.messages == ["calls: overhead 1,234 us"]

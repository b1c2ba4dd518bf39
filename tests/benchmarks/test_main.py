"""The one command: which suites it runs, in what environment, and what it writes."""

from __future__ import annotations

import datetime as dt
import json
import platform

import pytest
import torch

import parawrap
from benchmarks import __main__ as command
from benchmarks import cuda_python
from benchmarks._measure import Arm, Row
from parawrap.backends.cpu import usable_cores

ROW = Row("what", {"arm": Arm(2.0, 1.0, 3.0)}, "verdict", "wanted", held=False, peers="torch")


@pytest.fixture
def started(monkeypatch):
    """What the command would start, instead of starting it: words and threads."""
    found = []

    def start(suite, names, fixed):
        found.append((suite, names, fixed["OMP_NUM_THREADS"]))
        return 0

    monkeypatch.setattr(command, "_in_a_process", start)
    monkeypatch.setattr(command, "_measure", lambda suite, names: pytest.fail("measured in this process"))
    monkeypatch.setenv("OMP_NUM_THREADS", "no figure")
    return found


def test_without_a_gpu_the_cuda_suite_is_refused_by_name(monkeypatch, capsys, started):
    """It says why and fails; what else was asked for runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["cuda", "launching"]) == 1
    assert "cuda cannot run: there is no GPU to measure: torch" in capsys.readouterr().out
    assert [suite for suite, _, _ in started] == ["launching"]


def test_without_a_gpu_everything_else_is_measured(monkeypatch, capsys, started):
    """The cuda suite is left out, which is said, and is no failure."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 0
    assert "cuda is left out: there is no GPU to measure" in capsys.readouterr().out
    assert [suite for suite, _, _ in started] == ["engine", "launching", "sizing", "neuron", "cpu_lanes", "plan"]


def test_with_a_gpu_the_cuda_suite_is_complete(monkeypatch, started):
    """The calls, the streams and the lanes of the host's cores."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert command.main(["cuda"]) == 0
    assert started == [("cuda", ("cuda", "cpu_lanes"), str(usable_cores()))]


def test_lanes_on_the_cpu_get_every_core_and_the_others_one_thread(started):
    """Torch's own threads are the peer of the one, and would blur the others."""
    command.main(["cpu_lanes", "overhead", "collate"])
    assert started == [("cpu_lanes", ("cpu_lanes",), str(usable_cores())), ("engine", ("overhead", "collate"), "1")]


def test_a_suite_whose_environment_is_in_force_is_measured_here(monkeypatch):
    """The process that the command started does not start another."""
    for name, value in command._fixed(command.SUITES["engine"]).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(command, "_measure", lambda suite, names: 7)
    assert command.main(["collate"]) == 7


def test_a_failure_in_one_process_is_the_commands(monkeypatch):
    """The highest code of all."""
    codes = iter([1, 0])
    monkeypatch.setattr(command, "_in_a_process", lambda suite, names, fixed: next(codes))
    assert command.main(["engine", "launching"]) == 1


def test_a_word_that_names_nothing_is_refused():
    """The message lists what there is."""
    with pytest.raises(SystemExit, match=r"no suite or benchmark 'cudo': name some of collate, cpu_lanes, cuda, engine"):
        command.main(["cudo"])


def test_results_tell_where_when_and_how(monkeypatch, tmp_path, capsys):
    """JSON with hardware, versions, date, command and rows; a page with the same."""
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
    assert "| what | arm: 2.0 us (1.0 to 3.0) | verdict |  | wanted | **no** | torch |" in page
    assert "make bench-cuda" in page
    assert "| what | verdict |  | wanted | **no** | torch |" in (tmp_path / "README.md").read_text()


def test_a_part_of_a_suite_is_printed_and_not_written(monkeypatch, tmp_path, capsys):
    """Files hold whole suites alone."""
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    command._show("engine", [ROW], keep=False)
    assert "verdict" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_driver_that_cannot_be_asked_is_unknown(monkeypatch):
    """No nvidia-smi is no failure."""
    monkeypatch.setenv("PATH", "")
    assert command._driver() == "unknown"


def test_a_python_is_asked_for_what_parawrap_requires():
    """Names and bounds are setup.cfg's; what is missing or too old is named."""
    wanted = cuda_python.requirements()
    assert [requirement.partition(">=")[0] for requirement in wanted] == [
        "torch", "wrapt", "typing-extensions", "optree", "cloudpickle",
    ]  # fmt: skip
    assert cuda_python.lacking(wanted) == []
    lacks = cuda_python.lacking(["torch>=99.0", "no-such-package>=1"])
    assert lacks[0].startswith("torch>=99.0 (has ")
    assert lacks[1] == "no-such-package>=1"

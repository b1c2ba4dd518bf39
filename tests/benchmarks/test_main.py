"""The command: its suites and its files. No test needs a GPU."""

from __future__ import annotations

import datetime as dt
import json

import torch

from benchmarks import __main__ as command
from benchmarks._measure import Arm, Result, Row

ROW = Row(
    "calls",
    {"arm": Arm(2.0, 1.0, 3.0)},
    [Result("overhead", 2.0, "us").held_to("under", 1)],
    peers="torch",
    note="a remark",
)


def test_cuda_suite_needs_a_gpu(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        command, "_in_a_process", lambda suite, names, fixed: started.append(suite) or 0
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["cuda", "launching"]) == 1
    assert "cuda cannot run: no GPU is available: torch" in capsys.readouterr().out
    assert started == ["launching"]


def test_results_name_the_machine(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(command, "_driver", lambda: "580.1")
    command._show("cuda", [ROW], keep=True)
    document = json.loads((tmp_path / "cuda.json").read_text())
    assert dt.date.fromisoformat(document["date"])
    assert document["command"] == "make bench-cuda (python -m benchmarks cuda)"
    assert (document["hardware"]["gpu"], document["versions"]["torch"]) == (
        "NVIDIA H200, driver 580.1",
        torch.__version__,
    )
    assert document["rows"] == [json.loads(json.dumps(ROW.as_json()))]
    page = (tmp_path / "cuda.md").read_text()
    assert page.startswith(f"# On one GPU\n\n{document['date']}, ")
    for line in ("overhead | 2 | under 1 | **no** |", "arm | 2 | 1 | 3 |", "torch |"):
        assert f"| calls | {line}" in page
    assert "| calls | overhead | 2 | under 1 | **no** |" in (tmp_path / "README.md").read_text()

"""``parawrap doctor``: states, trials, and exit codes."""

from __future__ import annotations

import errno
import json
import sys
from unittest.mock import Mock

import pytest

from parawrap.cli import _doctor, _machine, _trials, main
from parawrap.cli._check import Check

STATES = {"ok", "missing", "warning", "problem"}


@pytest.fixture
def checks(monkeypatch):
    """A function that sets the checks of the doctor."""
    return lambda *made: monkeypatch.setattr(_doctor, "_checks", lambda _: iter(made))


def test_this_machine_has_no_problem(parawrap):
    """Each check has a state and a detail. The block, the launch, and the workers work here, and their times are known."""
    shown = parawrap("doctor", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    listed = json.loads(shown.stdout)["checks"]
    assert {each["state"] for each in listed} <= STATES - {"problem"}
    assert all(each["detail"] for each in listed)
    timed = {each["name"]: each["milliseconds"] for each in listed if each["milliseconds"] is not None}
    assert {"block on two CPU lanes", "launch of two ranks", "block on two workers"} <= set(timed)
    assert min(timed.values()) > 0


def test_each_state_has_a_line(checks, capsys):
    """A line per check, with its cure below it, and a summary."""
    checks(
        Check("a", "ok", "here", milliseconds=12.3),
        Check("b", "warning", "small", "Enlarge it"),
        Check("c", "missing", "no"),
    )
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert [line.split() for line in lines] == [
        ["ok", "a", "here,", "12", "ms"],
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


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_problem_gives_exit_code_1(checks, capsys, options):
    """The cure of a problem is shown. Its traceback is shown with --verbose."""
    checks(Check("a", "problem", "broken", "Mend it", traceback="line 1"), Check("b", "ok", "here"))
    assert main(["doctor", *options]) == 1
    assert "Mend it" in capsys.readouterr().out
    main(["doctor", "--verbose"])
    assert "line 1" in capsys.readouterr().out


def test_a_trial_that_fails_shows_its_error(monkeypatch):
    """The last line of the error is the detail, and the traceback is kept."""
    monkeypatch.setitem(_trials._CURES, "gone", "Mend it")
    with _trials.Trial("gone") as trial:
        check = trial.check(60)
    assert (check.state, check.detail, check.cure) == ("problem", "KeyError: 'gone'", "Mend it")
    assert "Traceback" in check.traceback


def test_files_of_the_working_folder_do_not_mislead_a_trial(tmp_path, monkeypatch):
    """A trial does not import a file that has the name of a standard module."""
    (tmp_path / "random.py").write_text("raise RuntimeError('not the standard module')")
    monkeypatch.chdir(tmp_path)
    with _trials.Trial("block on two CPU lanes") as trial:
        assert trial.check(60).state == "ok"


def test_a_trial_has_a_time_limit():
    """A trial that is not done in time is a problem. Its process is killed."""
    with _trials.Trial("block on two workers") as trial:
        check = trial.check(0.01)
    assert (check.state, check.detail) == ("problem", "not done after 0.01 seconds")
    assert trial._process.poll() is not None


def test_small_shared_memory_is_a_warning(monkeypatch, tmp_path):
    """The default size of docker, 64 MiB, is too small for a DataLoader with workers."""
    usage = type("Usage", (), {"total": 64 << 20, "free": 1 << 20})
    monkeypatch.setattr(_machine.shutil, "disk_usage", lambda _: usage)
    check = _machine._shared_memory(tmp_path)
    assert check.state == "warning"
    assert "--shm-size" in check.cure
    assert _machine._shared_memory(tmp_path / "gone").state == "missing"


def test_few_open_files_are_a_warning(monkeypatch):
    """A low limit names the command that raises it."""
    monkeypatch.setattr(_machine.resource, "getrlimit", lambda _: (256, 4096))
    assert "ulimit -n" in _machine._open_files().cure


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"memory.max": "max\n"}, None),
        ({"memory.max": "1024\n"}, 1024),
        ({"memory/memory.limit_in_bytes": "7"}, 7),
        ({}, None),
    ],
)
def test_memory_limit_of_a_container_is_read(tmp_path, files, limit):
    """Version 2 of cgroup and v1 have the limit in different files."""
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _machine._memory_limit(tmp_path) == limit


def test_a_gpu_without_a_cuda_build_is_a_warning(monkeypatch):
    """A machine with nvidia-smi and a CPU build of torch names the remedy."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(_machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "CUDA build" in _machine._cuda().cure
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    assert "CUDA_VISIBLE_DEVICES" in _machine._cuda().cure


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
    monkeypatch.setattr(_trials.subprocess, "Popen", Mock(side_effect=refusal))
    with _trials.Trial("launch of two ranks") as trial:
        check = trial.check(1.0)
    assert (check.state, check.detail) == ("problem", f"the process did not start: {refusal}")
    assert "ulimit -u" in check.cure

"""The interpreters that the matrix tests."""

import sys
from pathlib import Path

import pytest

from tests import matrix


def test_interpreters_that_do_not_run_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shim of pyenv for a Python that is not active ends with 127."""
    for name, script in ("python3.13", "exit 127"), ("python3.14", f'exec {sys.executable} "$@"'):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(matrix.pythons().values()) == [str(tmp_path / "python3.14")]


def test_versions_and_paths_name_interpreters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A version stands for its newest release, with the interpreter lock unless it ends with a t."""
    found = {"3.12.9": "old", "3.12.10": "new", "3.14.0": "lock", "3.14.0t": "free"}
    monkeypatch.setattr(matrix, "pythons", lambda: found)
    assert list(matrix.chosen(["3.12", "./python", "3.14", "3.14t", "3.13"])) == ["new", "./python", "lock", "free"]
    assert capsys.readouterr().out == "No Python 3.13 on this machine.\n"

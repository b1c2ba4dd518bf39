"""Run the command line in this process, in a folder with train.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parawrap.cli import main
from tests.helpers.scripts import read_script


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(read_script("cli_functions"))
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch, capfd):
    """A function that runs the command line in the folder, and returns the finished process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    modules = {*sys.modules}

    def run(*args):
        capfd.readouterr()
        try:
            code = main(args)
        except SystemExit as error:
            code = error.code
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    yield run
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]

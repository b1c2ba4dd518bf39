"""``parawrap run``: targets, arguments, platforms, results, and failures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parawrap.cli import main


@pytest.fixture
def here(tmp_path, monkeypatch, capfd, parawrap):
    """As `parawrap`, in this process: the folder with train.py is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
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
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def test_each_rank_gets_the_arguments(parawrap):
    """Numbers and lists are Python values, other text is a string, and NAME=VALUE is a keyword argument."""
    shown = parawrap("run", "train:main", "--device", "cpu", "--n", "2", "--", "0.1", "[1, 2]", "text", "epochs=3")
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[-2:] == [f"rank {rank}: ({rank}, 0.1, ([1, 2], 'text'), 3)" for rank in range(2)]
    assert sorted(lines[:-2]) == ["[rank 0] training", "[rank 1] training"]


def test_a_decorated_function_has_its_platform(here):
    """Without options, the function's own platform is used."""
    assert here("run", "train:decorated").stdout == "rank 0: (2, 0)\nrank 1: (2, 0)\n"


def test_options_change_the_platform_of_a_decorated_function(here):
    """--n and --set replace fields, and keep the others, such as verbose."""
    shown = here("run", "train:decorated", "--n", "1", "--set", "seed=7")
    assert shown.stdout == "rank 0: (1, 7)\n"


def test_a_file_and_a_member_are_targets(here, tmp_path):
    """A target may be a path to a .py file, and a dotted name in it."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "jobs.py").write_text((tmp_path / "train.py").read_text())
    assert here("run", "folder/jobs.py:Group.member", "--device", "cpu").stdout == "rank 0: 'member'\n"


def test_dry_run_starts_nothing(here, tmp_path):
    """--dry-run prints the ranks, and does not call the function."""
    started = tmp_path / "started"
    shown = here("run", "train:forever", "--device", "cpu", "--n", "2", "--dry-run", "--", str(started))
    assert shown.returncode == 0
    assert "rank 1: node 0, local rank 1, cpu" in shown.stdout
    assert not started.exists()


def test_inline_runs_here(here):
    """--inline runs rank 0 of 1 in this process."""
    shown = here("run", "train:main", "--inline", "--", "1")
    assert shown.stdout == "training\nrank 0: (0, 1, (), 1)\n"


def test_trace_is_written(here, tmp_path):
    """--trace is the field of Platform."""
    here("run", "train:main", "--device", "cpu", "--trace", "launch.html", "--", "1")
    assert (tmp_path / "launch.html").exists()


def test_the_exception_of_a_rank_is_shown(parawrap):
    """The exception has its remote traceback with source lines. The exit code is 1."""
    shown = parawrap("run", "train:fail", "--device", "cpu")
    assert shown.returncode == 1
    assert shown.stdout == ""
    assert 'raise ValueError("no data")' in shown.stderr
    assert "ValueError: no data" in shown.stderr


def test_an_error_at_the_import_of_the_module_is_shown(parawrap, tmp_path):
    """A module that imports a missing package shows this package with a traceback, not itself as missing."""
    (tmp_path / "broken.py").write_text("import missing_package\n")
    shown = parawrap("run", "broken:main")
    assert shown.returncode == 1
    assert "No module named 'missing_package'" in shown.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train"], "'train' does not name a function. Give MODULE:FUNCTION"),
        (["train:"], "does not name a function"),
        (["gone:main"], "module 'gone' was not found in "),
        (["gone.py:main"], "the file 'gone.py' does not exist"),
        (["train:gone"], "'train' has no function 'gone'. It has main, decorated, fail, forever, Group"),
        (["train:main", "--device", "tpu", "--", "1"], "device='tpu': give auto, cpu, gpu"),
        (["train:main", "--set", "seed", "--", "1"], "--set seed: give FIELD=VALUE"),
        (["train:main", "--set", "sed=1", "--", "1"], "sed=1: Platform has no such field: did you mean seed?"),
        (["train:main"], "train:main: missing a required argument: 'lr'"),
        (["train:main", "--n", "x"], "argument --n: invalid int value: 'x'"),
    ],
)
def test_wrong_names_and_options(here, args, message):
    """One line names the wrong value and what to do. The exit code is 2."""
    shown = here("run", *args)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_file_with_the_name_of_a_module_is_refused(here, tmp_path):
    """A file that another module hides is not replaced by that module."""
    (tmp_path / "os.py").write_text("def main(): pass\n")
    assert "Rename 'os.py'" in here("run", "os.py:main").stderr

"""``parawrap run``: targets, arguments, platforms, results, and failures."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from parawrap.cli import main
from parawrap.cli._run import _rank_count
from tests.cli.conftest import ROOT


@pytest.fixture
def here(tmp_path, monkeypatch, capfd, parawrap):
    """As `parawrap`, in this process: the folder with train.py is the current one."""
    monkeypatch.chdir(tmp_path)
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
    assert here("run", "train:decorated").stdout == "rank 0: (2, 'script')\nrank 1: (2, 'script')\n"


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
        (["train:gone"], "'train' has no function 'gone'. It has main, decorated, fail, forever, Unprintable"),
        (["train:main", "--device", "tpu", "--", "1"], "device='tpu': give auto, cpu, gpu"),
        (["train:main", "--set", "seed", "--", "1"], "--set seed: give FIELD=VALUE"),
        (["train:main", "--set", "sed=1", "--", "1"], "sed=1: Platform has no such field: did you mean seed?"),
        (["train:main"], "train:main: main() missing a required argument: 'lr'"),
        (["train:main", "--n", "x"], "argument --n: invalid int value: 'x'"),
        (["train:coroutine"], "coroutine"),
        ([".train:main"], "'.train:main' does not name a function"),
        (["train..x:main"], "'train..x:main' does not name a function"),
        (["train:main", "--set", "n_cpus=3", "--n", "2", "--", "1"], "n_cpus is given twice, as 3 and 2"),
        (["train:main", "--device", "cpu", "--set", "device=gpu", "--", "1"], "device is given twice, as 'cpu' and 'gpu'"),
        (
            ["train:main", "--inline", "--n", "2", "--", "1"],
            "--inline runs one rank in this process, so n has no effect",
        ),
        (["train:main", "--inline", "--trace", "t.html", "--", "1"], "so trace has no effect"),
        (["train:main", "--inline", "--timeout-min", "1", "--", "1"], "so timeout_min has no effect"),
        (["train:main", "--inline", "--dry-run"], "argument --dry-run: not allowed with argument --inline"),
        (["train:main", "--dry", "--", "1"], "unrecognized arguments: --dry"),
        (
            ["train:main", "0.1"],
            "unrecognized arguments: 0.1. Put arguments of the function after --: parawrap run train:main -- 0.1",
        ),
        (["train:main", "--lr", "0.1"], "after --: parawrap run train:main -- --lr 0.1"),
        (["train:typed", "--", "--lr", "fast"], 'train:typed: Invalid value for --lr: unable to convert "fast" into float'),
        (["train:typed", "--", "--n-steps", "4"], "train:typed: Parameter --lr requires an argument"),
        (["train:typed", "--", "1", "2", "3"], "train:typed: Unused Tokens: ['3']"),
        (["train:typed", "--", "1", "--mode", "odd"], 'Choose from: "fast", "slow"'),
        (["train:main", "--", "1", "--epoch", "2"], "train:main: Unknown option: --epoch. Did you mean --epochs?"),
        (["train:main", "--trace", "gone/t.html", "--", "1"], "trace: the folder of 'gone/t.html' does not exist"),
        (["train:main", "--set", "n_cpus=abc", "--", "1"], "n_cpus='abc'"),
        (["train:typed", "--inline", "--", "0.5", "--n-steps", "2.5"], "Invalid value for --n-steps"),
    ],
)
def test_wrong_names_and_options(here, args, message):
    """One line names the wrong value and what to do. The exit code is 2."""
    shown = here("run", *args)
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.parametrize(
    ("target", "words", "result"),
    [
        ("typed", ["--lr", "0.5", "--n-steps", "4"], "(0.5, 4, False, None, None, 'fast', {})"),
        ("typed", ["--lr=1", "--n_steps=4"], "(1.0, 4, False, None, None, 'fast', {})"),
        ("typed", ["0.5", "--verbose", "--name", "3"], "(0.5, 3, True, '3', None, 'fast', {})"),
        ("typed", ["0.5", "--no-verbose", "--sizes", "1", "2"], "(0.5, 3, False, None, [1, 2], 'fast', {})"),
        ("typed", ["0.5", "--sizes", "[1, 2]", "mode=slow"], "(0.5, 3, False, None, [1, 2], 'slow', {})"),
        ("typed", ["0.5", "--two-words", "1", "c=[2]"], "(0.5, 3, False, None, None, 'fast', {'two_words': 1, 'c': [2]})"),
        ("main", ["--lr", "0.5", "--epochs", "0.25"], "(0, 0.5, (), 0.25)"),
        ("main", ["-1", "--epochs", "[1, 2]"], "(0, -1, (), [1, 2])"),
        ("configured", ["--config.lr", "1", "--config.n_layers", "4"], "Config(lr=1.0, n_layers=4)"),
        ("for_type_checkers", ["1", "[1, 2]", "a", "3"], "(1.0, [1, 2], ('a', 3))"),
        ("Group.make", ["--size", "3"], "('Group', 3)"),
        ("group.method", ["3"], "3"),
    ],
)
def test_annotations_convert_arguments(here, target, words, result):
    """Options, flags, lists, dataclasses, and more keywords. Without a usable annotation, a value is a Python value."""
    shown = here("run", f"train:{target}", "--inline", "--", *words)
    assert (shown.returncode, shown.stdout.splitlines()[-1:], shown.stderr) == (0, [f"rank 0: {result}"], "")


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_help_of_the_function_is_shown(here, word):
    """It has the parameters with their descriptions, and nothing is launched."""
    shown = here("run", "train:typed", "--", word)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("Usage: parawrap run train:typed -- ")
    assert "Train a model." in shown.stdout
    assert "LR, --lr: The learning rate. [required]" in shown.stdout
    assert "rank 0" not in shown.stdout


def test_a_function_without_parameters_reads_the_arguments_from_sys_argv(here):
    """Each rank has the words, as a script would."""
    shown = here("run", "train:script", "--device", "cpu", "--n", "2", "--", "--lr", "0.5")
    assert (shown.returncode, shown.stdout) == (0, "rank 0: 0.5\nrank 1: 0.5\n")
    assert here("run", "train:without_parameters", "--inline", "--", "a", "b").stdout == "rank 0: ['train', 'a', 'b']\n"


def test_a_function_without_parameters_shows_its_own_help(here):
    """The help of its argparse is shown once, and nothing is launched."""
    shown = here("run", "train:script", "--device", "cpu", "--n", "2", "--", "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.startswith("usage: train [-h] [--lr LR]\n")


def test_without_cyclopts_only_arguments_need_it(parawrap, tmp_path):
    """A function without arguments is launched. Otherwise the message says what to install."""
    (tmp_path / "cyclopts.py").write_text("raise ImportError")
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    assert parawrap("run", "train:decorated", "--inline", PYTHONPATH=path).stdout == "rank 0: (1, 'script')\n"
    shown = parawrap("run", "train:main", "--inline", "--", "1", PYTHONPATH=path)
    assert shown.returncode == 2
    assert "pip install 'parawrap-torch[cli]'" in shown.stderr


def test_a_device_resets_the_launcher_of_a_decorated_function(here):
    """--device cpu tries a function of Slurm on this machine. Its GPUs are those of the cluster."""
    assert here("run", "train:on_slurm", "--device", "cpu").stdout == "rank 0: (1.0, 1)\n"
    assert here("run", "train:on_slurm", "--device", "cpu", "--inline", "--", "--lr", "2").stdout == "rank 0: (2.0, 1)\n"


def test_a_device_that_names_a_launcher_keeps_the_other_fields(here):
    """--device slurm and --launcher slurm leave the function on Slurm."""
    for option in ("--device", "--launcher"):
        shown = here("run", "train:on_slurm", option, "slurm", "--dry-run")
        assert (shown.returncode, "#SBATCH --gpus-per-node=8" in shown.stdout) == (0, True)


def test_gpus_and_cpus_are_fields_of_the_platform(here):
    """--cpus is n_cpus, and --gpus is n_gpus."""
    assert here("run", "train:decorated", "--cpus", "1").stdout == "rank 0: (1, 'script')\n"
    assert "n_gpus=2: device='cpu' uses no GPUs" in here("run", "train:decorated", "--gpus", "2").stderr
    shown = here("run", "train:main", "--device", "slurm", "--gpus", "8", "--cpus", "3", "--dry-run", "--", "1")
    assert shown.returncode == 0
    assert "--cpus-per-task=3" in shown.stdout


@pytest.mark.parametrize(
    ("platform", "field"),
    [
        ({"device": "cpu"}, "n_cpus"),
        ({"device": "slurm"}, "n_cpus"),
        ({"device": "slurm", "n_gpus": 8}, "n_gpus"),
        ({"launcher": "ray"}, "n_cpus"),
        ({"device": "gpu", "launcher": "slurm"}, "n_gpus"),
        ({"device": "neuron"}, "n_gpus"),
    ],
)
def test_n_counts_the_ranks_of_a_node(platform, field):
    """Ranks of a cluster are on CPUs unless the platform has GPUs, whatever devices this machine has."""
    assert _rank_count(platform) == field


def test_two_counts_of_ranks_are_refused(here):
    """--n does not become the number of threads per rank."""
    shown = here("run", "train:main", "--device", "slurm", "--set", "n_gpus=8", "--n", "4", "--", "1")
    assert (shown.returncode, "n_gpus is given twice, as 8 and 4" in shown.stderr) == (2, True)


def test_a_file_with_the_name_of_a_builtin_module_is_refused(here, tmp_path):
    """A module that is built into Python has no file."""
    (tmp_path / "time.py").write_text("def main(): pass\n")
    shown = here("run", "time.py:main")
    assert (shown.returncode, "'time' is the name of another module, which is built in. Rename" in shown.stderr) == (
        2,
        True,
    )


def test_a_file_with_the_name_of_a_module_is_refused(here, tmp_path):
    """A file that another module hides is not replaced by that module."""
    (tmp_path / "os.py").write_text("def main(): pass\n")
    assert f"Rename '{tmp_path / 'os.py'}'" in here("run", "os.py:main").stderr


def test_text_that_is_no_literal_is_a_string(here):
    """A literal that Python cannot build, such as a set of sets, is passed as text."""
    assert here("run", "train:main", "--inline", "--", "{{}}").stdout.endswith("rank 0: (0, '{{}}', (), 1)\n")


def test_results_that_cannot_be_printed_are_described(parawrap):
    """A character that the terminal lacks is escaped, and a value whose repr raises has its type."""
    shown = parawrap("run", "train:odd_results", "--device", "cpu", "--n", "2", PYTHONIOENCODING="ascii")
    assert shown.stdout == "rank 0: '\\u2192'\nrank 1: <Unprintable: its __repr__ raised OSError>\n"
    assert shown.returncode == 0


def test_an_object_with_a_platform_is_launched_like_a_function(here):
    """Only functions that @wrapper decorated bring their own platform."""
    assert here("run", "train:with_platform", "--device", "cpu").stdout == "rank 0: 'called'\n"


def test_a_module_that_exits_is_an_error(here, tmp_path):
    """A script without a main guard does not look like a success."""
    (tmp_path / "script.py").write_text("import sys\nsys.exit(0)\n")
    shown = here("run", "script:main", "--inline")
    assert shown.returncode == 2
    assert "script exits while it is imported, with 0. Put its script under if __name__" in shown.stderr


def test_the_module_has_the_arguments_of_a_script(here, tmp_path):
    """sys.argv has the module and the arguments after --, in this process and in ranks."""
    (tmp_path / "argv.py").write_text("import sys\ndef main(*_): return sys.argv\n")
    expected = "rank 0: ['argv.py', '1']\n"
    assert here("run", "argv.py:main", "--inline", "--", "1").stdout == expected
    assert here("run", "argv.py:main", "--device", "cpu", "--", "1").stdout == expected


def test_a_link_is_followed(here, tmp_path):
    """As with `python FILE`, modules next to the file are found, and not those next to the link."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "near.py").write_text("value = 1\n")
    (tmp_path / "real" / "script.py").write_text("from near import value\ndef main(): return value\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "script.py")
    assert here("run", "link.py:main", "--inline").stdout == "rank 0: 1\n"


def test_a_file_with_a_dot_in_its_name_is_refused(here, tmp_path):
    """The name of a module has no dots."""
    (tmp_path / "my.job.py").write_text("def main(): pass\n")
    shown = here("run", "my.job.py:main")
    assert shown.returncode == 2
    assert "Rename the file: its name ends with .py, and has no other dot" in shown.stderr


def test_a_builtin_without_a_signature_is_called(here):
    """Python checks the arguments if nothing else can."""
    assert here("run", "builtins:max", "--inline", "--", "1", "2").stdout == "rank 0: 2\n"


def test_a_path_may_begin_with_dots(here, tmp_path, monkeypatch):
    """Dots of a path are not those of a module."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    assert here("run", "../train.py:Group.member", "--inline").stdout == "rank 0: 'member'\n"


def test_an_inline_function_that_exits_has_no_result(here):
    """sys.exit(0) in the function is a failure, as it is in a rank."""
    shown = here("run", "train:leave", "--inline")
    assert shown.returncode == 1
    assert shown.stderr == "parawrap run: rank 0 called sys.exit(0) and returned nothing\n"


def test_trace_may_be_none(here):
    """--set trace=None is the default of the field."""
    assert here("run", "train:decorated", "--set", "trace=None").stdout == "rank 0: (2, 'script')\nrank 1: (2, 'script')\n"

"""``parawrap run``: targets, arguments, platforms, results, and failures."""

from __future__ import annotations

import sys

import pytest
import torch


def test_each_rank_gets_arguments(here):
    """A parameter without an annotation takes the type of its default, or a string."""
    shown = here(
        "run",
        "train:main",
        "--device",
        "cpu",
        "--n",
        "2",
        "--",
        "0.1",
        "1",
        "text",
        "--epochs",
        "3",
    )
    assert shown.returncode == 0
    lines = shown.stdout.splitlines()
    assert lines[-2:] == [f"rank {rank}: ({rank}, '0.1', ('1', 'text'), 3)" for rank in range(2)]
    assert sorted(lines[:-2]) == ["[rank 0] training", "[rank 1] training"]


def test_decorated_has_its_platform(here):
    two = "rank 0: (2, 'script')\nrank 1: (2, 'script')\n"
    assert here("run", "train:decorated", "--set", "ram=None").stdout == two
    assert (
        here("run", "train:decorated", "--n", "1", "--set", "seed=7").stdout == "rank 0: (1, 7)\n"
    )
    assert (
        "n_gpus=2: device='cpu' uses no GPUs"
        in here("run", "train:decorated", "--set", "n_gpus=2").stderr
    )


def test_cluster_functions_run_here(here):
    """--local, with the fields of this machine, tries a function of Slurm here. --device slurm
    keeps it on Slurm.
    """
    on_cpus = "run", "train:on_slurm", "--local", "--device", "cpu"
    assert here(*on_cpus).stdout == "rank 0: (1.0, 1)\n"
    assert here(*on_cpus, "--inline", "--", "--lr", "2").stdout == "rank 0: (2.0, 1)\n"
    assert here(*on_cpus, "--n", "2").stdout.endswith("rank 1: (1.0, 2)\n")
    tried = here("run", "train:tried", "--device", "slurm", "--nodes", "2", "--n", "2", "--local")
    assert tried.stdout == "".join(f"rank {rank}: '{rank} of 4'\n" for rank in range(4))
    shown = here("run", "train:on_slurm", "--device", "slurm", "--dry-run")
    assert (shown.returncode, "#SBATCH --gpus-per-node=8" in shown.stdout) == (0, True)


CPUS, GPUS = ["cpu", "cpu"], ["cuda:0", "cuda:1"]
CORES = ["NeuronCore 0 (tensors on the CPU)", "NeuronCore 1 (tensors on the CPU)"]
COUNTS = [
    # the platform of the decorator, if any; the options; and the devices of the ranks of a node
    (None, "--n 2", GPUS),
    (None, "--device auto --n 2", GPUS),
    (None, "--device gpu --n 2", GPUS),
    (None, "--device gpu --n 2 --set n_cpus=8", GPUS),
    (None, "--device mps --n 1", ["mps"]),
    (None, "--device neuron --n 2", CORES),
    (None, "--device CPU --n 2", CPUS),
    (None, "--device slurm --n 2", CPUS),
    (None, "--device slurm --n 2 --set print_ranks=(1,)", CPUS),
    (None, "--device ray --n 2", CPUS),
    (None, "--device gpu --n 2 --set launcher=ray", GPUS),
    ("device='cpu', n_cpus=8", "--n 2", CPUS),
    ("device='cpu', n_cpus=8", "--device gpu --n 2", GPUS),
    ("device='gpu', device_ids=[2, 3]", "--device cpu --n 2", CPUS),
    ("device='gpu', device_ids=[2, 3]", "--set device=cpu --n 2", CPUS),
    ("device='slurm', n_cpus=8", "--n 2", CPUS),
    ("device='slurm', n_gpus=8, n_cpus=8", "--n 2", GPUS),
    ("device='slurm', n_gpus=8, n_cpus=8", "--n 2 --device slurm --set n_cpus=4", GPUS),
    ("device='slurm', n_gpus=8, n_cpus=8", "--n 2 --local", GPUS),
    ("device='slurm', n_gpus=8, n_cpus=8", "--n 2 --device cpu", CPUS),
    ("device='ray', n_cpus=8", "--n 2", CPUS),
    ("device='ray', n_gpus=8, n_cpus=8", "--n 2", GPUS),
    ("device='neuron', n_gpus=1, n_cpus=8", "--n 2", CORES),
]


def use_four_gpus(monkeypatch):
    """Let this machine seem to have four GPUs, the one of a Mac, and two NeuronCores."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")


def make_job(folder, platform):
    decorator = "" if platform is None else f"@wrapper(Platform({platform}))\n"
    text = f"from parawrap import Platform, wrapper\n{decorator}def main(): ...\n"
    (folder / "job.py").write_text(text)


@pytest.mark.parametrize(("platform", "options", "devices"), COUNTS)
def test_n_means_ranks_per_node(here, folder, monkeypatch, platform, options, devices):
    """--n is the number of ranks on each node of every platform."""
    use_four_gpus(monkeypatch)
    make_job(folder, platform)
    shown = here("run", "job:main", *options.split(), "--dry-run")
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = [line for line in shown.stdout.splitlines() if line.startswith("rank ")]
    assert [line.rpartition(", ")[2] for line in lines] == devices


def test_auto_takes_what_this_machine_has(here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for options in ["--n", "2"], ["--device", "auto", "--n", "2"]:
        shown = here("run", "train:tried", *options, "--dry-run")
        assert "rank 1: node 0, local rank 1, cpu" in shown.stdout


@pytest.mark.parametrize(
    ("platform", "options", "tasks", "cores"),
    [
        ("device='slurm', n_gpus=4, n_cpus=8", "--n 2", 2, 8),
        ("device='slurm', n_gpus=4, n_cpus=8", "--device cpu --n 2", 2, 1),
        ("device='slurm', n_gpus=4, n_cpus=8", "--device cpu", 1, 1),
        ("device='slurm', n_gpus=4, n_cpus=8", "--device cpu --set n_cpus=3", 3, 1),
        ("device='slurm', n_cpus=8", "--device slurm --set n_gpus=4", 4, 1),
        ("device='slurm', n_cpus=8", "--device gpu --set n_gpus=4 --set n_cpus=3", 4, 3),
    ],
)
def test_threads_are_not_taken_for_ranks(here, folder, platform, options, tasks, cores):
    """`n_cpus` counts the cores of a GPU rank, or CPU ranks.

    Options that move the ranks from GPUs to CPUs, or back, drop it.
    """
    make_job(folder, platform)
    shown = here("run", "job:main", *options.split(), "--dry-run")
    assert f"#SBATCH --ntasks-per-node={tasks}\n" in shown.stdout
    assert f"#SBATCH --cpus-per-task={cores}\n" in shown.stdout


def test_dry_run_starts_nothing(here, folder):
    shown = here(
        "run", "train:forever", "--device", "cpu", "--n", "2", "--dry-run", "--", "started"
    )
    assert shown.returncode == 0
    assert "rank 1: node 0, local rank 1, cpu" in shown.stdout
    assert not (folder / "started").exists()


def test_failures_have_tracebacks(here, folder):
    """The traceback of a rank has source lines.

    A module that imports a missing package is not itself missing.
    """
    shown = here("run", "train:fail", "--device", "cpu")
    assert (shown.returncode, "rank 0:" in shown.stdout) == (1, False)
    assert 'raise ValueError("no data")' in shown.stderr
    assert "ValueError: no data" in shown.stderr
    (folder / "broken.py").write_text("import missing_package\n")
    shown = here("run", "broken:main")
    assert (shown.returncode, "No module named 'missing_package'" in shown.stderr) == (1, True)
    shown = here("run", "train:leave", "--inline")
    assert (
        shown.returncode,
        "sys.exit(0) was called, so there are no results" in shown.stderr,
    ) == (1, True)
    (folder / "exits.py").write_text("import sys\nsys.exit(0)\n")
    shown = here("run", "exits:tried")
    assert (shown.returncode, "under if __name__ == '__main__':" in shown.stderr) == (1, True)


WRONG = [
    # the command line, the message, and a command line with its cure
    ("train", "'train' does not name a function. Give MODULE:FUNCTION", "train:tried"),
    ("gone:main", "module 'gone' was not found in ", None),
    (
        "train.py:tried",
        "Give MODULE:FUNCTION, such as jobs.train:main for jobs/train.py",
        "train:tried",
    ),
    ("train:gone", "'train' has no function 'gone'", "train:tried"),
    ("train:tried --set sed=1", "unexpected keyword argument 'sed'", "train:tried --set seed=1"),
    (
        "train:tried --set seed",
        "--set seed: give FIELD=VALUE, such as --set seed=1",
        "train:tried --set seed=1",
    ),
    (
        "train:tried --device cpu --n 2 --set n_cpus=3",
        "--n 2 and --set n_cpus=3 both give the ranks per node: leave one of them out",
        "train:tried --n 2",
    ),
    (
        "train:tried --device slurm --n 2 --set n_gpus=4",
        "--n 2 and --set n_gpus=4 both give the ranks per node",
        "train:tried --n 2",
    ),
    ("train:tried --device gpus --n 2", "device='gpus': give auto, cpu, ", "train:tried --n 2"),
    (
        "train:typed --lr 0.1",
        "Put arguments of the function after --: parawrap run train:typed -- --lr 0.1",
        "train:typed -- --lr 0.1",
    ),
    (
        "train:typed --device cpu --n 1 --lr 0.1 --set seed=1",
        "after --: parawrap run train:typed --device cpu --n 1 --set seed=1 -- --lr 0.1",
        "train:typed --device cpu --n 1 --set seed=1 -- --lr 0.1",
    ),
    ("train:main", "train:main: main() missing a required argument: 'lr'", "train:main -- 1"),
    (
        "train:typed -- 0.5 --mode quick",
        'train:typed: Invalid value "quick" for --mode. Choose from: "fast", "slow"',
        "train:typed -- 0.5 --mode slow",
    ),
    ("train:for_type_checkers -- 1", "name 'Missing' is not defined", None),
]


@pytest.mark.parametrize(("line", "message", "cured"), WRONG, ids=[line for line, *_ in WRONG])
def test_wrong_names_and_options(here, line, message, cured):
    """The message names the wrong value, without a traceback.

    The command line with the cure runs.
    """
    shown = here("run", *line.split())
    assert shown.returncode == 2
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr
    if cured is not None:
        target, *words = cured.split()
        shown = here("run", target, "--device", "cpu", *words)
        assert (shown.returncode, "rank 0: " in shown.stdout) == (0, True), shown


@pytest.mark.parametrize(
    ("target", "words", "result"),
    [
        ("typed", ["--lr", "0.5", "--n-steps", "4"], "(0.5, 4, False, None, None, 'fast', {})"),
        (
            "typed",
            ["0.5", "--verbose", "--name", "3", "--sizes", "1", "2"],
            "(0.5, 3, True, '3', [1, 2], 'fast', {})",
        ),
        (
            "typed",
            ["0.5", "--no-verbose", "--sizes", "[1, 2]"],
            "(0.5, 3, False, None, [1, 2], 'fast', {})",
        ),
        (
            "configured",
            ["--config.lr", "1", "--config.n-layers", "4"],
            "Config(lr=1.0, n_layers=4)",
        ),
        ("script", ["--lr", "0.5"], "(0.5, ['train', '--lr', '0.5'])"),
    ],
)
def test_annotations_convert(here, target, words, result):
    shown = here("run", f"train:{target}", "--inline", "--", *words)
    assert (shown.returncode, shown.stdout.splitlines()[-1:], shown.stderr) == (
        0,
        [f"rank 0: {result}"],
        "",
    )


def test_help_of_function_is_shown(here):
    """The help of a function describes its parameters, and nothing is launched."""
    for word in "--help", "-h":
        shown = here("run", "train:typed", "--", word)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("Usage: parawrap run train:typed -- ")
        assert "Train a model." in shown.stdout
        assert "LR, --lr: The learning rate. [required]" in shown.stdout
        assert "rank 0" not in shown.stdout


def test_modules_in_folders(here, folder):
    (folder / "jobs").mkdir()
    (folder / "jobs" / "job.py").write_text("import sys\ndef main(*_): return sys.argv\n")
    for options in ["--inline"], ["--device", "cpu"]:
        assert (
            here("run", "jobs.job:main", *options, "--", "1").stdout
            == "rank 0: ['jobs.job', '1']\n"
        )
    assert here("run", "os:fspath", "--inline", "--", "a").stdout == "rank 0: 'a'\n"


def test_arguments_need_cyclopts(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "cyclopts", None)
    assert here("run", "train:decorated", "--inline").stdout == "rank 0: (1, 'script')\n"
    shown = here("run", "train:main", "--inline", "--", "1")
    assert shown.returncode == 2
    assert "pip install 'parawrap-torch[cli]'" in shown.stderr

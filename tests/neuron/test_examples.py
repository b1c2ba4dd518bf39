"""The vendor's documentation examples run as they stand, as their reader would run them on a laptop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
_REPORTED = re.compile(r"(\d+) rows in, (\d+) rows out, relative difference at most (\S+)")


def run(name, cores=None, warnings="error"):
    """What an example prints, run on so many emulated cores; without a number, on those that a laptop has by default."""
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("NEURON_RT_")}
    surroundings["PARAWRAP_NEURON_RUNTIME"] = "host"
    if cores is not None:
        surroundings["NEURON_RT_NUM_CORES"] = str(cores)
    command = [sys.executable, "-W", warnings, EXAMPLES / f"{name}.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    assert found.returncode == 0, found.stderr
    return found


def rows_of(stdout):
    """The rows of each call that was reported, which came out as they went in and are the plain model's up to rounding."""
    reports = _REPORTED.findall(stdout)
    assert reports, stdout
    for rows_in, rows_out, apart in reports:
        assert rows_in == rows_out
        assert float(apart) < 1e-5
    return [int(rows_in) for rows_in, _, _ in reports]


def refusals(stdout):
    return [line.removeprefix("refused: ") for line in stdout.splitlines() if line.startswith("refused: ")]


@pytest.mark.parametrize(("cores", "count", "rows"), [(None, 2, 5), (4, 4, 9)])
def test_by_default_every_core_takes_part(cores, count, rows):
    """The process has two emulated cores, or what NEURON_RT_NUM_CORES says, and there is a replica on each."""
    stdout = run("neuron_default", cores).stdout
    assert f"{count} NeuronCores in this process, replicas on {list(range(count))}\n" in stdout
    assert rows_of(stdout) == [rows]


def test_the_cores_that_are_named_and_no_others():
    """Of four cores the two that are named get all rows; a fifth is refused, with those that there are."""
    stdout = run("neuron_specify_cores", cores=4).stdout
    assert "replicas on [0, 1]\n" in stdout
    assert rows_of(stdout) == [5, 5]
    lanes = [(core, int(rows)) for core, rows in re.findall(r"a lane of (\S+): rows (\d+)", stdout)]
    assert {core for core, _ in lanes} == {"nc:0", "nc:1"}
    assert sum(rows for _, rows in lanes) == 5
    [refused] = refusals(stdout)
    assert refused.startswith("'nc:4' is not there: this process sees nc:0 to nc:3")


def test_rows_on_another_dim_are_the_compiled_size_for_each_core():
    """Two cores take four frames each; seven frames are refused with both numbers."""
    stdout = run("neuron_dim").stdout
    assert rows_of(stdout) == [8]
    [refused] = refusals(stdout)
    assert "7 rows on dim 1 over 2 NeuronCores are 3.5 a core" in refused
    assert "it must be 4, as the model is compiled, so 8 rows in all" in refused


def test_dynamic_batching_takes_batches_of_two_to_six():
    """The vendor's sizes through a model for one row, and short last inferences through one for two, without a warning."""
    assert rows_of(run("neuron_dynamic_batching").stdout) == [2, 3, 4, 5, 6, 3, 4, 5, 6]


def test_batches_that_leave_cores_idle_are_told_of_and_taken():
    """On four cores the same batches go through, and each that is too small for them is named at the example's own line."""
    found = run("neuron_dynamic_batching", cores=4, warnings="default")
    assert rows_of(found.stdout) == [2, 3, 4, 5, 6, 3, 4, 5, 6]
    told = re.findall(r"(\S+):\d+: UserWarning: (\d+) rows keep (\d) of 4 NeuronCores busy", found.stderr)
    assert [(rows, busy) for _, rows, busy in told] == [
        ("2", "2"),
        ("3", "3"),
        ("3", "2"),
        ("4", "2"),
        ("5", "3"),
        ("6", "3"),
    ]
    assert {file for file, _, _ in told} == {str(EXAMPLES / "neuron_dynamic_batching.py")}


def test_without_dynamic_batching_one_size_works():
    """Two cores of four take two rows; four rows are refused with both numbers."""
    stdout = run("neuron_fixed_batch", cores=4).stdout
    [refused] = refusals(stdout)
    assert "4 rows on dim 0 over 2 NeuronCores are 2 a core" in refused
    assert "it must be 1, as the model is compiled, so 2 rows in all" in refused
    assert rows_of(stdout) == [2]


def test_every_example_is_run_here():
    """An example for NeuronCores that no test runs is one that nobody runs."""
    text = Path(__file__).read_text()
    assert [file.stem for file in EXAMPLES.glob("neuron_*.py") if f'run("{file.stem}"' not in text] == []

"""The examples from the vendor's documentation run unchanged on emulated cores."""

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
    """Return the output of an example on `cores` emulated cores, or on the default number."""
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith("NEURON_RT_")}
    surroundings["PARAWRAP_NEURON_RUNTIME"] = "host"
    if cores is not None:
        surroundings["NEURON_RT_NUM_CORES"] = str(cores)
    command = [sys.executable, "-W", warnings, EXAMPLES / f"{name}.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    assert found.returncode == 0, found.stderr
    return found


def rows_of(stdout):
    """Return the row counts of the reported calls, after checking that outputs have these rows and match the model."""
    reports = _REPORTED.findall(stdout)
    assert reports, stdout
    for rows_in, rows_out, apart in reports:
        assert rows_in == rows_out
        assert float(apart) < 1e-5
    return [int(rows_in) for rows_in, _, _ in reports]


def refusals(stdout):
    return [line.removeprefix("refused: ") for line in stdout.splitlines() if line.startswith("refused: ")]


@pytest.mark.parametrize(("cores", "count", "rows"), [(None, 2, 5), (4, 4, 9)])
def test_every_core_is_used_by_default(cores, count, rows):
    """The process has two emulated cores, or the number in NEURON_RT_NUM_CORES, with a replica on each."""
    stdout = run("neuron_default", cores).stdout
    assert f"{count} NeuronCores in this process, replicas on {list(range(count))}\n" in stdout
    assert rows_of(stdout) == [rows]


def test_only_the_named_cores_are_used():
    """Of four cores, the two named cores get all rows. A fifth core is refused, and the error lists the cores."""
    stdout = run("neuron_specify_cores", cores=4).stdout
    assert "replicas on [0, 1]\n" in stdout
    assert rows_of(stdout) == [5, 5]
    lanes = [(core, int(rows)) for core, rows in re.findall(r"a lane of (\S+): rows (\d+)", stdout)]
    assert {core for core, _ in lanes} == {"nc:0", "nc:1"}
    assert sum(rows for _, rows in lanes) == 5
    [refused] = refusals(stdout)
    assert refused.startswith("'nc:4' is not available: this process sees nc:0 to nc:3")


def test_rows_on_another_dim_are_the_compiled_size_for_each_core():
    """Two cores take four frames each. Seven frames are refused, and the error shows both numbers."""
    stdout = run("neuron_dim").stdout
    assert rows_of(stdout) == [8]
    [refused] = refusals(stdout)
    assert "7 rows on dim 1 over 2 NeuronCores are 3.5 per core" in refused
    assert "each core takes 4, the compiled number of rows. Pass 8 rows" in refused


def test_dynamic_batching_takes_batches_of_two_to_six():
    """The vendor's batch sizes run through models for one and for two rows, without a warning."""
    assert rows_of(run("neuron_dynamic_batching").stdout) == [2, 3, 4, 5, 6, 3, 4, 5, 6]


def test_batches_that_leave_cores_idle_run_with_a_warning():
    """On four cores, each batch that is too small issues a warning at the example's own line."""
    found = run("neuron_dynamic_batching", cores=4, warnings="default")
    assert rows_of(found.stdout) == [2, 3, 4, 5, 6, 3, 4, 5, 6]
    warned = re.findall(r"(\S+):\d+: UserWarning: (\d+) rows keep (\d) of 4 NeuronCores busy", found.stderr)
    assert [(rows, busy) for _, rows, busy in warned] == [
        ("2", "2"),
        ("3", "3"),
        ("3", "2"),
        ("4", "2"),
        ("5", "3"),
        ("6", "3"),
    ]
    assert {file for file, _, _ in warned} == {str(EXAMPLES / "neuron_dynamic_batching.py")}


def test_without_dynamic_batching_one_size_works():
    """Two of four cores take two rows. Four rows are refused, and the error shows both numbers."""
    stdout = run("neuron_fixed_batch", cores=4).stdout
    [refused] = refusals(stdout)
    assert "4 rows on dim 0 over 2 NeuronCores are 2 per core" in refused
    assert "each core takes 1, the compiled number of rows. Pass 2 rows" in refused
    assert rows_of(stdout) == [2]


def test_every_example_is_run_here():
    """Every NeuronCore example has a test in this file."""
    text = Path(__file__).read_text()
    assert [file.stem for file in EXAMPLES.glob("neuron_*.py") if f'run("{file.stem}"' not in text] == []

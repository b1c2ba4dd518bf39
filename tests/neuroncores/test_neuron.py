"""`parawrap.neuron` in ranks, and in the examples of the vendor's documentation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parawrap import Platform, PlatformError, current_rank, neuron, wrapper

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("variable", "value", "cores"),
    [("NEURON_RT_NUM_CORES", "2", ["0", "1"]), ("NEURON_RT_VISIBLE_CORES", "4,6", ["4", "6"])],
)
def test_each_rank_has_its_own_core(monkeypatch, variable, value, cores):
    """A rank gets one core of the process, and its models see only that core."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv(variable, value)

    @wrapper(Platform(device="neuron", verbose=False))
    def serve(x):
        net = neuron.DataParallel(neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3)))
        device = str(current_rank().device)
        return os.environ["NEURON_RT_VISIBLE_CORES"], neuron.core_count(), net.device_ids, device, net(x)

    x = torch.randn(4, 3)
    results = list(serve(x))
    assert [result[:4] for result in results] == [(core, 1, [0], "cpu") for core in cores]
    assert all(torch.equal(result[4], x.relu()) for result in results)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("NEURON_RT_NUM_CORES", "3", r"n_gpus=8: 3 are visible"),
        ("NEURON_RT_VISIBLE_CORES", "0-a", r"NEURON_RT_VISIBLE_CORES='0-a'.*'0-6', '3' or '0,2-4'"),
    ],
)
def test_wrong_number_of_ranks(monkeypatch, variable, value, said):
    """The platform never starts fewer ranks than the user asked for."""
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv(variable, value)
    with pytest.raises(PlatformError, match=said):
        Platform(device="neuron", n_gpus=8)


# -- examples


def run(name, cores=None, warnings="error"):
    """Return the process of an example on `cores` emulated cores, or on the default number, and the rows of its calls."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("NEURON_RT_")}
    environ["PARAWRAP_NEURON_RUNTIME"] = "host"
    if cores is not None:
        environ["NEURON_RT_NUM_CORES"] = str(cores)
    command = [sys.executable, "-W", warnings, EXAMPLES / f"{name}.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert found.returncode == 0, found.stderr
    reports = re.findall(r"(\d+) rows in, (\d+) rows out, relative difference at most (\S+)", found.stdout)
    assert reports, found.stdout
    assert all(rows_in == rows_out and float(apart) < 1e-5 for rows_in, rows_out, apart in reports)
    return found, [int(rows_in) for rows_in, _, _ in reports]


@pytest.mark.parametrize(
    ("name", "cores", "rows", "parts"),
    [
        ("neuron_default", None, [5], ["2 NeuronCores in this process, replicas on [0, 1]\n"]),
        ("neuron_default", 4, [9], ["4 NeuronCores in this process, replicas on [0, 1, 2, 3]\n"]),
        (
            "neuron_specify_cores",
            4,
            [5, 5],
            ["on [0, 1]\n", "refused: 'nc:4' is not available: this process sees nc:0 to nc:3"],
        ),
        ("neuron_dim", None, [8], ["refused: ", "7 rows on dim 1 over 2 NeuronCores are 3.5 per core", "Pass 8 rows"]),
        ("neuron_dynamic_batching", None, [2, 3, 4, 5, 6, 3, 4, 5, 6], []),
        ("neuron_fixed_batch", 4, [2], ["refused: ", "4 rows on dim 0 over 2 NeuronCores are 2 per core", "Pass 2 rows"]),
    ],
)
def test_examples_of_the_vendor_run(name, cores, rows, parts):
    """Unchanged and without warnings. What the page says is refused, is refused."""
    found, counts = run(name, cores)
    assert counts == rows
    for part in parts:
        assert part in found.stdout


def test_idle_cores_warn(host):
    """On four cores, each batch that is too small warns at the example's own line."""
    found, _ = run("neuron_dynamic_batching", cores=4, warnings="default")
    warned = re.findall(r"(\S+):\d+: UserWarning: (\d+) rows keep (\d) of 4 NeuronCores busy", found.stderr)
    assert [(int(rows), int(busy)) for _, rows, busy in warned] == [(2, 2), (3, 3), (3, 2), (4, 2), (5, 3), (6, 3)]
    assert {file for file, _, _ in warned} == {str(EXAMPLES / "neuron_dynamic_batching.py")}


def test_every_example_is_run():
    text = Path(__file__).read_text()
    assert [file.stem for file in EXAMPLES.glob("neuron_*.py") if f'"{file.stem}"' not in text] == []

"""`parawrap.neuron` in ranks, and in the examples of the vendor's documentation."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest
import torch

from parawrap import DeviceListError, Platform, current_rank, neuron, wrapper
from parawrap.neuroncores import using
from parawrap.testing import NeuronHost

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_each_rank_has_its_own_core(monkeypatch):
    """The models of a rank see only its own core, and torch has `n_cpus` threads.

    A platform refuses core numbers that are malformed.
    """
    monkeypatch.setenv("PARAWRAP_NEURON_RUNTIME", "host")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4,6")

    @wrapper(Platform(device="neuron", n_cpus=3, verbose=False))
    def serve(x):
        net = neuron.DataParallel(neuron.trace(torch.nn.ReLU(), torch.zeros(1, 3)))
        place = str(current_rank().device), torch.get_num_threads()
        return (
            os.environ["NEURON_RT_VISIBLE_CORES"],
            neuron.core_count(),
            net.device_ids,
            place,
            net(x),
        )

    x = torch.randn(4, 3)
    results = list(serve(x))
    assert [result[:4] for result in results] == [(core, 1, [0], ("cpu", 3)) for core in ("4", "6")]
    assert all(torch.equal(result[4], x.relu()) for result in results)
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "first")
    with pytest.raises(
        DeviceListError,
        match="NEURON_RT_VISIBLE_CORES='first': 'first' is neither a core nor a range",
    ):
        Platform(device="neuron")


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs an example on some emulated cores, by default two, and returns
    its output.
    """
    monkeypatch.syspath_prepend(EXAMPLES)
    for variable in "NEURON_RT_NUM_CORES", "NEURON_RT_VISIBLE_CORES":
        monkeypatch.delenv(variable, raising=False)

    def run_example(name, cores=None):
        if cores is not None:
            monkeypatch.setenv("NEURON_RT_NUM_CORES", str(cores))
        with using(NeuronHost()):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_example


def assert_reported(output, rows):
    """Check that an example had batches of these rows, and that its outputs were the plain ones."""
    reports = re.findall(
        r"(\d+) rows in, (\d+) rows out, relative difference at most (\S+)", output
    )
    assert [(int(rows_in), int(rows_out)) for rows_in, rows_out, _ in reports] == [
        (count, count) for count in rows
    ]
    assert all(float(apart) < 1e-5 for _, _, apart in reports)


@pytest.mark.parametrize(
    ("name", "cores", "rows", "parts"),
    [
        ("neuron_default", 4, [9], ["4 NeuronCores in this process, replicas on [0, 1, 2, 3]\n"]),
        (
            "neuron_specify_cores",
            4,
            [5, 5],
            ["on [0, 1]\n", "refused: 'nc:4' is not available: this process sees nc:0 to nc:3"],
        ),
        (
            "neuron_dim",
            None,
            [8],
            ["refused: ", "7 rows on dim 1 over 2 NeuronCores are 3.5 per core", "Pass 8."],
        ),
        (
            "neuron_fixed_batch",
            4,
            [2],
            ["refused: ", "4 rows on dim 0 over 2 NeuronCores are 2 per core", "Pass 2."],
        ),
    ],
)
def test_examples_of_the_vendor_run(run, name, cores, rows, parts):
    """Examples of the vendor run unchanged and without warnings. What the page says is refused, is
    refused.
    """
    found = run(name, cores)
    assert_reported(found, rows)
    for part in parts:
        assert part in found

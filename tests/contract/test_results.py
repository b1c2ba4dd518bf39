"""Contract tests of successful launches: the view of each rank, its results, its output, and its
restarts.
"""

from __future__ import annotations

import os
import random

import pytest
import torch

from parawrap import LaunchError
from tests.contract import scenarios
from tests.contract.table import behavior_of, check_cell
from tests.helpers.launches import wait_for_reports

pytestmark = pytest.mark.contract

KEEP_NO_OUTPUT = ("torchrun", "inline")


@pytest.fixture(name="size")
def _size(launcher):
    """The number of ranks of the launch that describes them."""
    return {"inline": 1, "slurm": 4, "ray": 4}.get(launcher.name, 2)


@pytest.fixture(name="of_ranks")
def _of_ranks(observed):
    """A function that returns one entry of each rank's result."""
    return lambda key: [each[key] for each in observed["described"].expect_results()]


def test_a_rank_knows_its_place(launcher, size, of_ranks):
    """Results are in the order of ranks.

    Each node is one host; on Slurm, the two nodes are two hosts.
    """
    local = size // launcher.n_nodes
    assert of_ranks("place") == [(r, r % local, r // local, size, 0, "cpu") for r in range(size)]
    assert of_ranks("platform") == [("script", launcher.n_nodes)] * size
    hosts = [
        f"node{r // local}" if launcher.name == "slurm" else os.uname().nodename
        for r in range(size)
    ]
    assert of_ranks("host") == hosts


def test_ranks_have_variables_of_torchrun(launcher, size, of_ranks):
    """Every rank has RANK, WORLD_SIZE, and so on. An inline rank keeps the caller's environment."""
    if launcher.name == "inline":
        assert of_ranks("variables") == [
            {name: os.environ.get(name) for name in scenarios.VARIABLES}
        ]
        return
    local = size // launcher.n_nodes
    for rank, variables in enumerate(of_ranks("variables")):
        address, port = variables.pop("MASTER_ADDR"), variables.pop("MASTER_PORT")
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank % local,
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": local,
        }
        assert variables == {name: str(value) for name, value in numbers.items()}
        assert address
        assert int(port) > 0


def test_the_group_has_all_ranks(size, of_ranks):
    assert [total.item() for total in of_ranks("total")] == [sum(range(10, 10 + size))] * size
    assert of_ranks("group") == [(size, rank, rank) for rank in range(size)]


def test_arguments_and_results_arrive(launcher, size, of_ranks):
    """Values, functions, and tensors of 8 MB arrive. Each rank has its own copy."""
    for (first, second), by_name in of_ranks("arguments"):
        assert (first, second["x"].tolist(), by_name) == (1, [0, 1, 2], "two")
    assert of_ranks("value") == [10**rank for rank in range(size)]
    for rank, big in enumerate(of_ranks("big")):
        assert (big.shape, big[0].item(), big[1:].any().item()) == ((1 << 21,), rank, False)


def test_surroundings_of_ranks(launcher, size, of_ranks):
    """Every rank draws the numbers of a plain process with the script's seed, and can't read its
    standard input.
    """
    expected = (
        random.Random(0).random(),
        torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist(),
    )
    assert of_ranks("drawn") == [expected] * size
    assert launcher.name in KEEP_NO_OUTPUT or of_ranks("stdin") == [""] * size


def test_output_has_a_rank_prefix(launcher, size, observed):
    """Both streams are shown, kept by `logs`, and written to files.

    Under torchrun and inline they are not touched.
    """
    observation, folder = observed["described"], observed.folder / "described"
    lines = observed.output.splitlines()
    if launcher.name in KEEP_NO_OUTPUT:
        text = observation.output or observed.output
        assert all(
            f"{stream} of {rank}" in text for rank in range(size) for stream in ("out", "err")
        )
        assert not any(observation.logs)
        assert not (folder / "logs").exists()
        return
    (logs,) = (folder / "logs").iterdir()
    assert sorted(path.name for path in logs.iterdir()) == [
        f"rank-{rank}.log" for rank in range(size)
    ]
    for rank in range(size):
        for stream in "out", "err":
            assert f"[rank {rank}] {stream} of {rank}" in lines
            assert f"{stream} of {rank}" in observation.logs[rank].splitlines()
        assert (logs / f"rank-{rank}.log").read_text() == observation.logs[rank]


def test_upon_finish_is_called_once(launcher, observed):
    """The launching process calls `upon_finish`, if the launch succeeds.

    Under torchrun, the process of rank 0 does.
    """
    (called,) = (observed.folder / "described").glob("finished-*")
    assert called.name == f"finished-{launcher.name != 'torchrun'}"
    assert observed["raised"].kind is scenarios.OddError
    assert not (observed.folder / "raised" / "finished").exists()


def test_a_rank_cannot_launch(launcher, of_ranks):
    kind, message = of_ranks("refusal")[-1]
    check_cell("nested", launcher.name, behavior_of(kind, message))
    assert kind is LaunchError


def test_a_launch_restarts(launcher, observed):
    """After a failure, and after a preemption with `requeue()`, with all ranks saved at one step.
    No step is lost.
    """
    size = 1 if launcher.name == "inline" else 2
    (step,) = {int(step) for step in wait_for_reports(observed.folder / "restarting", "due", size)}
    assert step > 0
    # They do not restart after a failure
    starts = 1 if launcher.name in ("torchrun", "inline") else 2
    assert observed["restarting"].expect_results() == [(step, starts)] * size
    # After the results: the last start notes the step that it continues with
    for rank in range(size):
        done = (observed.folder / "restarting" / f"steps-{rank}").read_text().split()
        assert done == [str(each) for each in range(step + 1)]

"""Ranks that stay in a notebook: the cells of one kernel call the same ranks."""

from __future__ import annotations

import pytest

from tests.helpers.notebooks import run_notebook

CELLS = {
    "open": """
import os
import time
from pathlib import Path
import torch
from parawrap import Platform, current_rank, functional

ranks = Platform(device="cpu", n_cpus=2).open()
lr = 0.1
""",
    "train": """
def load():
    global model
    model = functional.to(torch.nn.Linear(1, 1, bias=False))
    model.module.weight.data.zero_()

def train(steps):
    losses = []
    for _ in range(steps):
        loss = (model(torch.ones(1, 1) * current_rank().global_rank) - 1).square().mean()
        loss.backward()
        for each in model.parameters():
            each.data -= lr * each.grad
            each.grad = None
        losses.append(loss.item())
    return losses

ranks(load)
first = ranks(train, 3)
""",
    "train on": """
second = ranks(train, 3)
ranks(load)
whole = ranks(train, 6)
print([[*a, *b] for a, b in zip(first, second)] == [*whole])
""",
    "redefine": """
def train(steps):
    return f"redefined, {steps} steps with {lr}"

lr = 0.5
print(*ranks(train, 7), *ranks(lambda: type(model).__name__))
""",
    "own step": """
def count():
    global step
    step = 3

ranks(count)
""",
    "say": """
def say():
    print("in rank", current_rank().global_rank)

ranks(say)
print("said")
""",
    "interrupt": """
def wait():
    Path(f"waiting-{current_rank().global_rank}").touch()
    time.sleep(600)

try:
    ranks(wait)
except KeyboardInterrupt:
    print("interrupted")
""",
    "after": """
print(*ranks(lambda: (current_rank().global_rank, step)))
""",
    "processes": """
def process():
    return os.getpid()

print(*ranks(process))
""",
    "display": "ranks",
    "display ended": "ranks.close()\nranks",
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The executed cells, by name."""
    folder = tmp_path_factory.mktemp("notebook")
    executed = run_notebook([*CELLS.values()], folder, interrupt_at=folder / "waiting-1")
    return dict(zip(CELLS, executed, strict=True))


def lines_of(cell):
    """The lines of output of a cell."""
    return "".join(output.text for output in cell.outputs if output.output_type == "stream").splitlines()


def test_cells_share_the_state_of_ranks(cells):
    """A later cell trains on, as one call of as many steps does, and a redefined function and number take effect."""
    assert lines_of(cells["train on"]) == ["True"]
    (line,) = lines_of(cells["redefine"])
    assert line == "redefined, 7 steps with 0.5 " * 2 + "DistributedDataParallel DistributedDataParallel"


def test_output_is_under_the_calling_cell(cells):
    assert sorted(lines_of(cells["say"])) == ["[rank 0] in rank 0", "[rank 1] in rank 1", "said"]


def test_an_interrupted_cell_keeps_the_ranks(cells):
    """The call raises KeyboardInterrupt. The ranks answer the next call, and have their globals."""
    assert lines_of(cells["interrupt"])[-1] == "interrupted"
    assert lines_of(cells["after"]) == ["(0, 3) (1, 3)"]


def test_ranks_are_shown_as_a_table(cells):
    """The table has the device, process, state, and last call of each rank, or says that the ranks have ended."""
    html, ended = (cells[name].outputs[-1].data["text/html"] for name in ("display", "display ended"))
    assert "2 ranks of cpu: idle" in html
    for row, process in zip(html.split("<tr")[-2:], lines_of(cells["processes"])[0].split(), strict=True):
        assert all(text in row for text in ("cpu", process, "idle", "process, "))
    assert "2 ranks of cpu: ended" in ended
    assert "idle" not in ended

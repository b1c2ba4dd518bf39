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
from parawrap.errors import UnsendableError

ranks = Platform(device="cpu", n_cpus=2).open()
lr = 0.1
""",
    "train": """
def load():
    global model, optimizer
    bare = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(bare.weight)
    torch.nn.init.zeros_(bare.bias)
    model = functional.to(bare)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

def train(steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(torch.ones(1, 1) * current_rank().global_rank) - 1).square().mean()
        loss.backward()
        optimizer.step()
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
    return f"redefined, {steps} steps"

print(*ranks(train, 7))
""",
    "lambda": """
print(*ranks(lambda: type(model).__name__))
""",
    "rate": """
def rate():
    return lr

print(*ranks(rate))
""",
    "changed rate": """
lr = 0.5
print(*ranks(rate), *ranks(lambda: lr))
""",
    "own step": """
def count():
    global step
    step = 3

ranks(count)
print(*ranks(lambda: step))
""",
    "two steps": """
step = 8
try:
    ranks(lambda: step)
except UnsendableError as error:
    print(error.message)
""",
    "one step": """
del step
print(*ranks(lambda: step))
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
    time.sleep(100)

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
    """The lines of output of a cell, sorted."""
    return sorted("".join(output.text for output in cell.outputs if output.output_type == "stream").splitlines())


def html_of(cell):
    return cell.outputs[-1].data["text/html"]


def test_a_later_cell_trains_on(cells):
    """Two calls train as one call of as many steps does, bit for bit."""
    assert lines_of(cells["train on"]) == ["True"]


def test_a_redefined_function_takes_effect(cells):
    assert lines_of(cells["redefine"]) == ["redefined, 7 steps redefined, 7 steps"]


def test_a_lambda_sees_globals_of_a_call(cells):
    """A lambda uses a global that an earlier call assigned in the ranks."""
    assert lines_of(cells["lambda"]) == ["DistributedDataParallel DistributedDataParallel"]


def test_a_changed_global_arrives(cells):
    assert lines_of(cells["rate"]) == ["0.1 0.1"]
    assert lines_of(cells["changed rate"]) == ["0.5 0.5 0.5 0.5"]


def test_a_global_with_two_owners_is_refused(cells):
    """The notebook and the ranks assigned it. Once the notebook deletes its own, that of the ranks is used."""
    assert lines_of(cells["own step"]) == ["3 3"]
    assert lines_of(cells["two steps"])[0].startswith("the global 'step', which <lambda> uses, was assigned in the ranks")
    assert lines_of(cells["one step"]) == ["3 3"]


def test_output_appears_under_the_calling_cell(cells):
    assert lines_of(cells["say"]) == ["[rank 0] in rank 0", "[rank 1] in rank 1", "said"]


def test_an_interrupted_cell_keeps_the_ranks(cells):
    """The call raises KeyboardInterrupt. The ranks answer the next call, and have their globals."""
    assert lines_of(cells["interrupt"])[-1] == "interrupted"
    assert lines_of(cells["after"]) == ["(0, 3) (1, 3)"]


def test_ranks_are_shown_as_a_table(cells):
    """The table has the device, the process, the state, and the last call of each rank."""
    html = html_of(cells["display"])
    for text in ("2 ranks of cpu: idle", *("rank", "device", "process", "state", "last call")):
        assert text in html
    rows = html.split("<tr")[-2:]
    for row, process in zip(rows, lines_of(cells["processes"])[0].split(), strict=True):
        assert all(text in row for text in ("cpu", process, "idle", "process, "))


def test_the_table_of_closed_ranks_says_so(cells):
    html = html_of(cells["display ended"])
    assert "2 ranks of cpu: ended" in html
    assert "idle" not in html

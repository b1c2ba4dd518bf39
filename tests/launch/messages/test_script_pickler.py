"""Functions and classes of notebook cells can be launched."""

from __future__ import annotations

import pytest

from tests.helpers.notebooks import run_notebook

CELLS = [
    """
from parawrap import Platform, current_rank, wrapper
import torch, torch.distributed as dist

STEP = 10

class Answer:
    def __init__(self, value):
        self.value = value

def helper(value):
    return STEP * value
""",
    """
@wrapper(Platform(device="cpu", n_cpus=2))
def function(start):
    rank = current_rank().global_rank
    total = torch.tensor(start + rank)
    dist.all_reduce(total)
    print("in rank", rank, flush=True)
    return Answer(helper(total.item()))

results = function(3)
print([type(each) is Answer for each in results], [each.value for each in results])
""",
    """
STEP = 100
print([each.value for each in function(0)])
""",
    """
class Failure(Exception):
    pass

@wrapper(Platform(device="cpu", n_cpus=2))
def fails():
    raise Failure("in the cell")

try:
    fails()
except Failure as error:
    print("caught", error)
    print('raise Failure("in the cell")' in error.__notes__[0])
""",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The output lines of each cell of an executed notebook, sorted."""
    executed = run_notebook(CELLS, tmp_path_factory.mktemp("notebook"))
    return [
        sorted("".join(output.text for output in cell.outputs if output.output_type == "stream").splitlines())
        for cell in executed
    ]


def test_functions_of_cells_launch(outputs):
    """Instances of a cell's class come back, and output of ranks is shown under the cell."""
    assert outputs[1] == ["[True, True] [70, 70]", "[rank 0] in rank 0", "[rank 1] in rank 1"]


def test_a_launch_uses_changed_globals(outputs):
    assert "[100, 100]" in outputs[2]


def test_exceptions_of_cells_can_be_caught(outputs):
    """They have the notebook's class, and the traceback from the rank shows the line of the cell."""
    assert outputs[3] == ["True", "caught in the cell"]

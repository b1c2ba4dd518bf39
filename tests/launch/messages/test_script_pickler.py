"""Functions and classes of notebook cells can be launched."""

from __future__ import annotations

from tests.helpers.notebooks import run_notebook

CELLS = [
    """
import time
from parawrap import LaunchTimeoutError, Platform, current_rank, wrapper
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

@wrapper(Platform(device="cpu", n_cpus=1))
def fails():
    raise Failure("in the cell")

@wrapper(Platform(device="cpu", n_cpus=1, hang_timeout_s=2))
def sleeps():
    time.sleep(600)

try:
    fails()
except Failure as error:
    print("caught", error)
    print('raise Failure("in the cell")' in error.__notes__[0])
try:
    sleeps()
except LaunchTimeoutError as error:
    print("time.sleep(600)" in error.stacks[0])
""",
]


def test_functions_of_cells_launch(tmp_path):
    """Classes come back as the notebook's own, changed globals hold, and tracebacks and stacks show lines of cells."""
    executed = run_notebook(CELLS, tmp_path)
    lines = [sorted("".join(each.text for each in cell.outputs).splitlines()) for cell in executed]
    assert lines[1:] == [
        ["[True, True] [70, 70]", "[rank 0] in rank 0", "[rank 1] in rank 1"],
        ["[100, 100]", "[rank 0] in rank 0", "[rank 1] in rank 1"],
        ["True", "True", "caught in the cell"],
    ]

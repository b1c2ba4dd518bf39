"""The helpers of `functional` in a world that torchrun started instead of parawrap."""

from __future__ import annotations

import pytest

from tests.helpers import worlds

SCRIPT = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from parawrap import functional

dist.init_process_group("gloo")
rank = dist.get_rank()
generator = torch.Generator().manual_seed(rank)
loader = functional.shard_loader(DataLoader(torch.arange(5.0), 2, shuffle=True, generator=generator))
rows = torch.cat(list(loader))
evaluated = functional.shard_loader(DataLoader(torch.arange(1.0)), pad=False)
mine = list(evaluated)
assert functional.gather_rows(rows, loader).tolist() == [0, 1, 2, 3, 4]
assert functional.gather_rows(torch.cat(mine) if mine else torch.empty(0), evaluated).tolist() == [0]
assert functional.reduce_metrics(float(rank), weight=len(mine)) == 0
assert type(functional.to(torch.nn.Linear(1, 1), device="cpu")).__name__ == "DistributedDataParallel"
dist.destroy_process_group()
"""


@pytest.mark.long
def test_helpers_work_under_torchrun(tmp_path):
    """Two ranks can shard a loader, reduce a metric, gather rows, and train a module."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert worlds.torchrun(tmp_path, script=script) == 0

"""`functional` in a world that torchrun started instead of parawrap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_helpers_work_in_torchs_own_world(tmp_path):
    """Two ranks under torchrun can shard a loader, reduce a metric, gather rows, and shard a module."""
    script = Path(__file__).with_name("foreign_world.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, tmp_path]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert set(one.pop("rows") + other.pop("rows")) == {0, 1, 2, 3, 4}
    assert one == other == {"gathered": [0, 1, 2, 3, 4], "one row": [0], "mean": 0.0, "model": "FSDPLinear"}

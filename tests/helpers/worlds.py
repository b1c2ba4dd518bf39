"""Worlds of torchrun, whose ranks run the scenarios of a script, and variables of other worlds."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

from tests.helpers.processes import kill_with_stacks, start_python
from tests.helpers.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
_VARIABLES = (
    "SLURM",
    "OMPI",
    "PMI",
    "PMIX",
    "MPI_",
    "TORCHELASTIC",
    "RANK",
    "LOCAL_",
    "WORLD_SIZE",
    "MASTER_",
    "GROUP_",
)


def environment(**added):
    """Return this process's variables, without any world's variables, plus `added`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_VARIABLES)}
    own = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(ROOT)}
    return kept | own | {name: str(value) for name, value in added.items()}


def torchrun(folder, *names, script, options=()):
    """Run the scenarios of a script in a torchrun world of two ranks, and return torchrun's exit
    code.

    A late one and its children print their stacks, and are killed.
    """
    args = (
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options,
        script,
        folder,
        *names,
    )
    process = start_python(*args, cwd=folder, env=environment())
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(PATIENCE_S)
    kill_with_stacks(process.pid)
    return process.wait()

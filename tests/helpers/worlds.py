"""Worlds of torchrun, srun, and mpirun: processes that run the scenarios of a script as ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
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
    return _exit_codes([start_python(*args, cwd=folder, env=environment())])[0]


def run_with_variables(variables, folder, *names, script):
    """Run scenarios in processes that find their world only in variables, and return the exit
    codes.
    """
    started = [
        start_python(script, folder, *names, cwd=folder, env=environment(**each))
        for each in variables
    ]
    return _exit_codes(started)


def _exit_codes(processes):
    """Wait for processes and return their exit codes.

    Late ones and their children print their stacks, and are killed.
    """
    deadline = time.monotonic() + PATIENCE_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))
    for late in [process for process in processes if process.poll() is None]:
        kill_with_stacks(late.pid)
    return [process.wait() for process in processes]

"""A torchrun world that makes one call. Its ranks run this file as their script."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import cloudpickle
import torch

ROOT = Path(__file__).parents[2]


class TorchrunWorld:
    """Two processes of torchrun, with a folder for their endings.

    Not thread-safe; `stop` ends the world.
    """

    def __init__(self, folder, call):
        self._folder = Path(folder)
        Path(folder, "call").write_bytes(cloudpickle.dumps(call))
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            __file__,
            str(folder),
        ]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "PYTHONFAULTHANDLER": "1",
        }
        with Path(folder, "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                cwd=folder,
            )

    @property
    def exit_code(self):
        """The exit code of torchrun; None while it runs."""
        return self._process.poll()

    def log(self):
        return Path(self._folder, "log").read_text()

    def endings(self):
        """Return the return value of the call in each rank, or None if torchrun ended a rank."""
        paths = [Path(self._folder, f"ending-{rank}") for rank in range(2)]
        return (
            [pickle.loads(path.read_bytes()) for path in paths]
            if all(path.exists() for path in paths)
            else None
        )

    def preempt(self):
        """Send SIGUSR2 to one rank, as a user of torchrun would."""
        os.kill(int(Path(self._folder, "pid-1").read_text()), signal.SIGUSR2)

    def cancel(self):
        """Send SIGTERM to torchrun, which ends its ranks."""
        self._process.terminate()

    def stop(self):
        from tests.helpers.processes import kill_with_stacks  # not needed in the ranks

        kill_with_stacks(self._process.pid)
        self._process.wait()


def _make_the_call(folder):
    rank = os.environ["RANK"]
    Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)  # like the launching process of the other launchers
    ending = pickle.loads(Path(folder, "call").read_bytes())()
    Path(folder, f"ending-{rank}").write_bytes(pickle.dumps(ending))


if __name__ == "__main__":
    _make_the_call(sys.argv[1])

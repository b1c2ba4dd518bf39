"""A torchrun world that runs one call after another until a rank dies, because a world takes seconds to start.

The ranks run this file as their script.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import cloudpickle
import psutil
import torch

ROOT = Path(__file__).parents[2]
_POLL_S = 0.02


class TorchrunWorld:
    """Processes of torchrun, with a folder for calls and endings. Not thread-safe; `stop` ends the world."""

    def __init__(self, folder, count):
        self._folder, self._count, self._calls = Path(folder), count, 0
        self._log = self._folder / "log"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), __file__, str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PARAWRAP_OWNER": str(os.getpid())}
        environment["PYTHONFAULTHANDLER"] = "1"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
            )

    @property
    def exit_code(self):
        """The exit code of torchrun; None while it runs."""
        return self._process.poll()

    def is_up(self):
        """Return True once torchrun has started every rank."""
        return all((self._folder / f"pid-{rank}").exists() for rank in range(self._count))

    def log(self):
        return self._log.read_text()

    def begin(self, call):
        self._calls += 1
        _write(self._folder / f"call-{self._calls}", cloudpickle.dumps(call))

    def endings(self):
        """Return the return value of the call in each rank, or None while a rank is still running it."""
        paths = [self._folder / f"ending-{self._calls}-{rank}" for rank in range(self._count)]
        return [pickle.loads(path.read_bytes()) for path in paths] if all(path.exists() for path in paths) else None

    def preempt(self):
        """Send SIGUSR2 to one rank, as a user of torchrun would."""
        os.kill(int((self._folder / "pid-1").read_text()), signal.SIGUSR2)

    def cancel(self):
        """Send SIGTERM to torchrun, which ends its ranks."""
        self._process.terminate()

    def stop(self):
        """Stop the world: idle ranks exit, and busy ranks are killed after 10 seconds."""
        (self._folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            from tests.helpers.processes import kill_with_stacks  # not needed in the ranks

            kill_with_stacks(self._process.pid)
        self._process.wait()


def _write(path, data):
    begun = path.with_name(f".{path.name}")
    begun.write_bytes(data)
    begun.rename(path)


def _run_calls(folder):
    """In a rank: run each call that arrives, until the world is stopped or its owner has exited."""
    rank, owner = os.environ["RANK"], int(os.environ["PARAWRAP_OWNER"])
    _write(folder / f"pid-{rank}", str(os.getpid()).encode())
    torch.manual_seed(0)  # like the launching process of the other launchers
    number = 1
    while not (folder / "stop").exists() and psutil.pid_exists(owner):
        path = folder / f"call-{number}"
        if path.exists():
            _write(folder / f"ending-{number}-{rank}", pickle.dumps(pickle.loads(path.read_bytes())()))
            number += 1
        else:
            time.sleep(_POLL_S)


if __name__ == "__main__":
    _run_calls(Path(sys.argv[1]))

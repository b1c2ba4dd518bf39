"""A world of torchrun's that plays one call after another, until a rank dies: a world takes seconds to start.

This file is also what runs in its ranks.
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

ROOT = Path(__file__).parents[2]
_LOOK_S = 0.02


class TorchrunWorld:
    """Four processes that torchrun started. For one thread; `stop` ends it.

    Args:
        folder: where calls and endings are written; must be there.
        count: of ranks.
    """

    def __init__(self, folder, count):
        self._folder, self._count, self._calls = Path(folder), count, 0
        self._log = self._folder / "log"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), __file__, str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PARAWRAP_OWNER": str(os.getpid())}
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder
            )

    @property
    def exit_code(self):
        """Torchrun's own; None while it runs."""
        return self._process.poll()

    def is_up(self):
        """Whether torchrun has started every rank."""
        return all((self._folder / f"pid-{rank}").exists() for rank in range(self._count))

    def log(self):
        """All that torchrun and its ranks have written so far."""
        return self._log.read_text()

    def begin(self, call):
        """Have every rank make this call, a function without arguments."""
        self._calls += 1
        _write(self._folder / f"call-{self._calls}", cloudpickle.dumps(call))

    def endings(self):
        """What the call came to in each rank, as soon as that is so in all of them; None before."""
        paths = [self._folder / f"ending-{self._calls}-{rank}" for rank in range(self._count)]
        return [pickle.loads(path.read_bytes()) for path in paths] if all(path.exists() for path in paths) else None

    def preempt(self):
        """Tell one rank, as torchrun's user would."""
        os.kill(int((self._folder / "pid-1").read_text()), signal.SIGUSR2)

    def cancel(self):
        """End torchrun, which ends its ranks."""
        self._process.terminate()

    def stop(self):
        """End it; ranks between two calls leave by themselves."""
        (self._folder / "stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            for each in [*psutil.Process(self._process.pid).children(recursive=True), self._process]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
        self._process.wait()


def _write(path, data):
    begun = path.with_name(f".{path.name}")
    begun.write_bytes(data)
    begun.rename(path)


def _play(folder):
    """In a rank: make each call that comes, until nobody is there to ask."""
    rank, owner = os.environ["RANK"], int(os.environ["PARAWRAP_OWNER"])
    _write(folder / f"pid-{rank}", str(os.getpid()).encode())
    number = 1
    while not (folder / "stop").exists() and psutil.pid_exists(owner):
        path = folder / f"call-{number}"
        if path.exists():
            _write(folder / f"ending-{number}-{rank}", pickle.dumps(pickle.loads(path.read_bytes())()))
            number += 1
        else:
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    _play(Path(sys.argv[1]))

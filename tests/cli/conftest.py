"""Run the command line in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
TRAIN = """
import os
import time

import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper


def main(lr, *layers, epochs=1):
    print("training")
    return current_rank().global_rank, lr, layers, epochs


@wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
def decorated():
    return current_rank().world_size, current_rank().platform.seed


def fail():
    raise ValueError("no data")


def forever(path):
    open(path, "w").write(str(os.getpid()))
    time.sleep(600)


class Unprintable:
    def __repr__(self):
        raise OSError("gone")


def odd_results():
    return ["\u2192", Unprintable()][current_rank().global_rank]


async def coroutine():
    pass


def leave():
    raise SystemExit(0)


class WithPlatform:
    platform = Platform(device="cpu")

    def __call__(self):
        return "called"


with_platform = WithPlatform()


class Group:
    @staticmethod
    def member():
        return "member"
"""


@pytest.fixture
def parawrap(tmp_path):
    """A function that runs ``python -m parawrap`` in a folder with train.py, and returns the finished process."""
    (tmp_path / "train.py").write_text(TRAIN)

    def run(*args, **environ):
        command = [sys.executable, "-m", "parawrap", *args]
        environ = {**os.environ, "PYTHONPATH": ROOT, **environ}
        return subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=100, check=False)

    return run

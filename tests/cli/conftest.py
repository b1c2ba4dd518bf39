"""Run the command line in this process, in a folder with train.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parawrap.cli import main

TRAIN = """
from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from typing import Literal

from parawrap import Platform, current_rank, wrapper


def main(lr, *layers, epochs=1):
    print("training")
    return current_rank().global_rank, lr, layers, epochs


@wrapper(Platform(device="cpu", n_cpus=2, verbose=False))
def decorated():
    return current_rank().world_size, current_rank().platform.seed


def fail():
    raise ValueError("no data")


def leave():
    sys.exit(0)


def forever(path):
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)
    time.sleep(600)


@wrapper(Platform(device="slurm", n_gpus=8, verbose=False))
def on_slurm(lr: float = 1.0):
    return lr, current_rank().world_size


def tried():
    return f"{current_rank().global_rank} of {current_rank().world_size}"


def script():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    return parser.parse_args().lr, sys.argv


@dataclass
class Config:
    lr: float = 0.1
    n_layers: int = 2


def typed(
    lr: float,
    n_steps: int = 3,
    *,
    verbose: bool = False,
    name: str | None = None,
    sizes: list[int] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    **more,
):
    '''Train a model.

    Args:
        lr: The learning rate.
    '''
    return lr, n_steps, verbose, name, sizes, mode, more


def configured(config: Config):
    return config


def for_type_checkers(lr: float, sizes: Missing = ()):
    return lr, sizes
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.fixture
def here(folder, monkeypatch, capfd):
    """A function that runs the command line in the folder, and returns the finished process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    modules = {*sys.modules}

    def run(*args):
        capfd.readouterr()
        try:
            code = main(args)
        except SystemExit as error:
            code = error.code
        return subprocess.CompletedProcess(args, code, *capfd.readouterr())

    yield run
    for name in {*sys.modules} - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]

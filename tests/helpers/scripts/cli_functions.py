"""Functions that tests of the command line run, as a user's train.py."""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
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
    Path(path + ".new").write_text(str(os.getpid()))
    Path(path + ".new").rename(path)
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


def typed(  # noqa: D417 (one parameter has a description)
    lr: float,
    n_steps: int = 3,
    *,
    verbose: bool = False,
    name: str | None = None,
    sizes: list[int] | None = None,
    mode: Literal["fast", "slow"] = "fast",
    **more,
):
    """Train a model.

    Args:
        lr: The learning rate.
    """
    return lr, n_steps, verbose, name, sizes, mode, more


def configured(config: Config):
    return config


def for_type_checkers(lr: float, sizes: Missing = ()):  # noqa: F821 (imported for type checkers)
    return lr, sizes

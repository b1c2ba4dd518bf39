"""Random number generators: seeded alike in every rank, or put back after a rank was played in this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["preserved_generators", "seed", "seed_all"]

_SEEDS = 2**32  # numpy's seeds are below it


def seed_all(seed: int) -> None:
    """Seed python, torch, the accelerators, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)  # the accelerators too
    if numpys := _numpys():
        numpys.seed(seed % _SEEDS)


def seed(platforms: int | None) -> None:
    """As a platform's ``seed`` says; None draws one. A rank that is forked from a warm process starts with its state."""
    seed_all(random.SystemRandom().randrange(_SEEDS) if platforms is None else platforms)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Leave python's, numpy's and torch's generators as they were found, on the CPU and on this device."""
    pythons, numpys = random.getstate(), _numpys()
    state = numpys.get_state() if numpys else None
    try:
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_type_with_generators(device)):
            yield
    finally:
        random.setstate(pythons)
        if numpys:
            numpys.set_state(state)


def _type_with_generators(device: torch.device) -> str:
    """What fork_rng takes: with no devices given, any kind that it knows does."""
    return "cuda" if device.type == "cpu" else device.type


def _numpys() -> Any:
    """Numpy's global generator, where numpy is loaded."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None

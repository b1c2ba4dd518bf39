"""Random number generators: seeded alike in every rank, or put back after a rank was played in this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["preserved_generators", "seed_all", "seed_each_differently"]

_SEEDS = 2**32  # numpy's seeds are below it


def seed_all(seed: int) -> None:
    """Seed python, torch, the accelerators, and numpy where it is loaded."""
    random.seed(seed)
    torch.manual_seed(seed)  # the accelerators too
    if numpys := _numpys():
        numpys.seed(seed % _SEEDS)


def seed_each_differently() -> None:
    """Seed from the system's entropy. A rank that is forked from a warm process starts with that process's state."""
    seed_all(random.SystemRandom().randrange(_SEEDS))


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Leave every generator as it was found."""
    pythons, numpys = random.getstate(), _numpys()
    state = numpys.get_state() if numpys else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(pythons)
        if numpys:
            numpys.set_state(state)


def _numpys() -> Any:
    """Numpy's global generator, where numpy is loaded."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None

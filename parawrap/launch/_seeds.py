"""Random number generators: seeded alike in every rank, and restored after a rank ran in this process."""

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
    """Seed with a platform's ``seed``, or with a random one for None: forked ranks would all start with the same state."""
    seed_all(random.SystemRandom().randrange(_SEEDS) if platforms is None else platforms)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the generators of python, numpy, and torch at the end of the block, on the CPU and on this device."""
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
    """Return a device type that fork_rng takes. Without devices any type that it knows will do."""
    return "cuda" if device.type == "cpu" else device.type


def _numpys() -> Any:
    """Return numpy's global generator if numpy is loaded."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None

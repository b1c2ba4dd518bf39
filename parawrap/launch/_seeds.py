"""Seed the random number generators of a rank, and restore them after it ran in this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

_N_SEEDS = 2**32  # numpy accepts seeds below this


def seed_all(seed: int) -> None:
    """Seed Python, torch, the accelerators, and numpy if it is imported."""
    random.seed(seed)
    # torch.manual_seed would format a traceback for a missing CUDA
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # the accelerators too
    numpy_random = _find_numpy_random()
    if numpy_random is not None:
        numpy_random.seed(seed % _N_SEEDS)


def seed(seed_of_platform: int | Literal["script"] | None) -> None:
    """Seed with a platform's ``seed``.

    ``"script"`` is the seed that torch has in this process: ranks start with that of the script.
    None draws a random seed, because forked ranks inherit the same state.
    """
    if seed_of_platform is None:
        seed_all(random.SystemRandom().randrange(_N_SEEDS))
    elif seed_of_platform == "script":
        seed_all(torch.initial_seed())
    else:
        seed_all(seed_of_platform)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, numpy, and torch at the end of the block.

    In torch, these are the states of the CPU and of `device`.
    """
    python_state = random.getstate()
    numpy_random = _find_numpy_random()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        # Without a device that this machine lacks: `fork_rng` would raise its own error, and the
        # block raises a clearer one
        devices = []
        if device.type != "cpu":
            n_devices = torch.get_device_module(device).device_count()
            if (device.index or 0) < n_devices:
                devices = [device]
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def _find_numpy_random() -> Any:
    """Return numpy's module of random functions, or None if numpy is not imported."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None

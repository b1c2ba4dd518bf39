"""Seed the random number generators of a rank, and restore them after it ran in this process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

_SEEDS = 2**32  # numpy accepts seeds below this


def seed_all(seed: int) -> None:
    """Seed Python, torch, the accelerators, and numpy if it is imported."""
    random.seed(seed)
    # torch.manual_seed would format a traceback for a missing CUDA
    if torch.accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # the accelerators too
    if (numpy_random := _find_numpy_random()) is not None:
        numpy_random.seed(seed % _SEEDS)


def seed(seed_of_platform: int | Literal["script"] | None) -> None:
    """Seed with a platform's ``seed``.

    ``"script"`` is the seed of this process's torch; ranks have that of the script.

    None draws a random seed, because forked ranks inherit the same state.
    """
    if seed_of_platform is None:
        seed_all(random.SystemRandom().randrange(_SEEDS))
    elif seed_of_platform == "script":
        seed_all(torch.initial_seed())
    else:
        seed_all(seed_of_platform)


@contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Restore the random states of Python, numpy, and torch at the end of the block.

    Those of torch are the ones of the CPU and of this device.
    """
    python_state = random.getstate()
    # numpy's state only if something has imported it: parawrap does not
    numpy_random = _find_numpy_random()
    numpy_state = None if numpy_random is None else numpy_random.get_state()
    try:
        # The block raises the error of a device that does not exist. `fork_rng` would come first
        has_own_generator = (
            device.type != "cpu"
            and (device.index or 0) < torch.get_device_module(device).device_count()
        )
        devices = [device] if has_own_generator else []
        with torch.random.fork_rng(devices, device_type=device.type):
            yield
    finally:
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def _find_numpy_random() -> Any:
    """Return numpy's module of random functions, or None if numpy is not imported."""
    return sys.modules["numpy"].random if "numpy" in sys.modules else None

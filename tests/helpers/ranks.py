"""Launch helper for the tests of `functional`, and functions that ranks run. Each rank
imports this file, which does not import pytest: that takes 0.2 s of a processor.
"""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.distributed as dist

from parawrap import Platform, current_rank, wrapper
from tests.helpers.waiting import PATIENCE_S


def on(ranks, function, *args, **kwargs):
    """Run a function on `ranks` CPU ranks, and return the results.

    Keyword arguments are options of Platform.
    """
    return wrapper(
        Platform(device="cpu", n_cpus=ranks, **({"timeout_min": PATIENCE_S / 60} | kwargs))
    )(function)(*args)


def my_rank():
    return current_rank().global_rank


def all_sum(value=1.0):
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()


def draw_numbers():
    """Return a number of each generator."""
    return random.random(), torch.rand(1).item(), np.random.rand()


def settings_of_torch():
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.benchmark,
    )

"""Launch helper for the tests of `functional`, and functions that ranks run."""

from __future__ import annotations

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

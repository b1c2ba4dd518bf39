"""Launch helper for the tests of `functional`."""

from __future__ import annotations

from parawrap import Platform, wrapper
from tests.helpers.waiting import PATIENCE_S


def on(ranks, function, *args, **kwargs):
    """Run a function on `ranks` CPU ranks, and return the results. Keyword arguments are options of Platform."""
    return wrapper(Platform(device="cpu", n_cpus=ranks, **({"timeout_min": PATIENCE_S / 60} | kwargs)))(function)(*args)

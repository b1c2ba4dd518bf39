"""Launches on CPU ranks for the tests of `functional`."""

from __future__ import annotations

from parawrap import Platform, wrapper


def on(ranks, function, *args, **kwargs):
    """Return the results of a function on this number of CPU ranks."""
    return wrapper(Platform(device="cpu", n_cpus=ranks, **({"timeout_min": 0.5} | kwargs)))(function)(*args)

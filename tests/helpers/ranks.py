"""Launch helper for the tests of `functional`."""

from __future__ import annotations

from parawrap import Platform, wrapper


def on(ranks, function, *args, **kwargs):
    """Run a function on `ranks` CPU ranks, and return the results. Keyword arguments are options of Platform."""
    return wrapper(Platform(device="cpu", n_cpus=ranks, **({"timeout_min": 0.5} | kwargs)))(function)(*args)

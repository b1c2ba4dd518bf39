"""Blocks over each kind of pool."""

from __future__ import annotations

import os

from parawrap import Platform, parallel

CPUS = ["cpu", "cpu"]
KINDS = {
    "thread": {"devices": CPUS},
    "process": {"devices": CPUS, "workers": "process"},
    "ray": {"devices": Platform(device="ray", n_nodes=2, n_cpus=1)},
}


def over(kind, target, **options):
    """Return a block with two lanes of a kind: "thread", "process", or "ray"."""
    return parallel(target, **KINDS[kind], **options)


def processes(target, **options):
    return over("process", target, **options)


def outputs_of(p, model, x):
    """Return the output of a cut call, and of two whole calls."""
    return [model(x), *p.map([x, x])]


class OnlyHere:
    """A value that cannot be unpickled in another process."""

    def __reduce__(self):
        return _only_in, (os.getpid(),)


def _only_in(home):
    if os.getpid() != home:
        raise LookupError("not at home")
    return OnlyHere()

"""Blocks over each kind of pool, and the comparison of an output with the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch.testing import assert_close

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
    """Return a block with two worker processes."""
    return over("process", target, **options)


def outputs_of(p, model, x):
    """Return the output of a cut call, and of two whole calls."""
    return [model(x), *p.map([x, x])]


def assert_same(output, expected):
    """Assert equal types, structure, and values."""
    assert type(output) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert_close(output, expected)
    elif dataclasses.is_dataclass(expected):
        assert_same(vars(output), vars(expected))
    elif isinstance(expected, Mapping):
        assert list(output) == list(expected)
        assert_same(list(output.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(output) == len(expected)
        for one, other in zip(output, expected, strict=True):
            assert_same(one, other)
    else:
        assert output == expected

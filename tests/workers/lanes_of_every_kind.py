"""The kinds of lanes that the contract tests run over, and how they compare an output with the plain one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch.testing import assert_close

from parawrap import Parallel, Platform, parallel

__all__ = [
    "Kind",
    "assert_calls_are_plain",
    "assert_same",
    "every_kind",
    "in_threads_alone",
]


class Kind(NamedTuple):
    """One kind of lanes. Call it to make a block with two of them."""

    name: str
    devices: Any
    options: Mapping[str, Any] = {}
    marks: tuple[pytest.MarkDecorator, ...] = ()
    fixture: str | None = None  # that must be ready first

    def __call__(self, target, **options) -> Parallel:
        return parallel(target, self.devices, **self.options, **options)


CPUS = ["cpu", "cpu"]
THREAD = Kind("thread", CPUS)
PROCESS = Kind("process", CPUS, {"workers": "process"})
RAY = Kind("ray", Platform(device="ray", n_nodes=2, n_cpus=1), marks=(pytest.mark.ray,), fixture="kept_actors")
KINDS = (THREAD, PROCESS, RAY)


@pytest.fixture(name="lanes", params=[pytest.param(kind, id=kind.name, marks=kind.marks) for kind in KINDS])
def every_kind(request):
    """One kind of lanes after the other. The test runs without gradients, which workers refuse."""
    if request.param.fixture is not None:
        request.getfixturevalue(request.param.fixture)
    with torch.no_grad():
        yield request.param


def in_threads_alone(reason):
    """Run a test over threads alone: docs/workers.md says that workers differ here."""
    return pytest.mark.parametrize("lanes", [pytest.param(THREAD, id=THREAD.name)], indirect=True)


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


def assert_calls_are_plain(lanes, target, calls, **options):
    """Make calls of a target twice in one block, and compare each with the plain call."""
    expected = [target(*args, **kwargs) for args, kwargs in calls]
    with lanes(target, **options) as p:
        for _ in range(2):
            for (args, kwargs), plain in zip(calls, expected, strict=True):
                assert_same(p(*args, **kwargs), plain)
        stats = p.stats()
    assert stats.calls > stats.plain, "no call was cut"

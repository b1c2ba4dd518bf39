"""Models for these tests, comparisons with plain calls, and a counter of compilations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tests.helpers import device_models

XLAS = ["xla:0", "xla:1", "xla:2", "xla:3"]

mlp = functools.partial(device_models.mlp, torch.float32)
rows = functools.partial(device_models.rows, dtype=torch.float32)
assert_near_gradients = functools.partial(device_models.assert_same_gradients, rtol=1e-4, atol=1e-5)


def beside(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, to compare with."""
    return copy.deepcopy(model).cpu()


def assert_near(actual: Any, expected: Any) -> None:
    """Assert that two tensors are equal up to rounding, on any devices."""
    torch.testing.assert_close(actual.detach().cpu(), expected.detach().cpu(), rtol=1e-4, atol=1e-5)


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Count the graphs that torch_xla compiles inside the block."""
    import torch_xla.debug.metrics as metrics  # of the child alone

    def compiled() -> int:
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    before = compiled()
    yield lambda: compiled() - before

"""Models for these tests, comparisons with plain calls, and a counter of compilations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

XLAS = ["xla:0", "xla:1", "xla:2", "xla:3"]


def mlp() -> nn.Module:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))


def rows(count: int = 12) -> Tensor:
    """A batch on the CPU."""
    return torch.randn(count, 5)


class Images(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.conv(x)).relu().mean((2, 3)))
        return output


class Tied(nn.Module):
    """A model that uses one matrix under two names. `Module.to` copies it twice on XLA, so it is tied again there."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.up = nn.Linear(5, 7, bias=False)
        self.down = nn.Linear(5, 7, bias=False)
        self.to(device)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).tanh() @ self.down.weight


def beside(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, to compare with."""
    return copy.deepcopy(model).cpu()


def assert_near(actual: Any, expected: Any) -> None:
    """Assert that two tensors are equal up to rounding, on any devices."""
    torch.testing.assert_close(actual.detach().cpu(), expected.detach().cpu(), rtol=1e-4, atol=1e-5)


def assert_same_gradients(model: nn.Module, plain: nn.Module) -> None:
    """Assert that gradients equal those of the plain model, on the device of their parameters."""
    for (name, mine), (other, theirs) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert name == other
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.device == mine.device
        assert_near(mine.grad, theirs.grad)


@contextmanager
def compilations() -> Iterator[Callable[[], int]]:
    """Count the graphs that torch_xla compiles inside the block."""
    import torch_xla.debug.metrics as metrics  # of the child alone

    def compiled() -> int:
        data = metrics.metric_data("CompileTime")
        return 0 if data is None else int(data[0])

    before = compiled()
    yield lambda: compiled() - before

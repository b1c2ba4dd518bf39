"""Models for the contract tests. Each has several operators, because torch_neuron leaves shorter models on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    """Return a model with two linear layers for rows of size 6."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def rows(count: int) -> Tensor:
    """Return a batch for `mlp`."""
    return torch.linspace(-1.0, 1.0, count * 6).reshape(count, 6)


class Doubling(nn.Module):
    """Two tensors in, two tensors out. Its small whole numbers are exact in every floating-point format."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x + 1, x + y + y


def numbers(count: int) -> tuple[Tensor, Tensor]:
    """Return the inputs of a call of `Doubling`. All rows differ."""
    return torch.arange(2.0 * count).reshape(count, 2), -torch.arange(2.0 * count).reshape(count, 2)


class Around(nn.Module):
    """A module with compiled parts behind an ordinary linear layer."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.before(x)
        return [part(x) for part in self.parts]

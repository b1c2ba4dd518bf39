"""Models for these tests, each of more than one operator: torch_neuron leaves shorter ones on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp() -> nn.Module:
    """Two linear layers on rows of 6."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).eval()


def rows(count: int) -> Tensor:
    """A batch for `mlp`."""
    return torch.linspace(-1.0, 1.0, count * 6).reshape(count, 6)


class Doubling(nn.Module):
    """Of small whole numbers, which every arithmetic keeps exactly; takes two tensors and gives two."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x + 1, x + y + y


def numbers(count: int) -> tuple[Tensor, Tensor]:
    """A call for `Doubling`: no two rows are alike."""
    return torch.arange(2.0 * count).reshape(count, 2), -torch.arange(2.0 * count).reshape(count, 2)


class Around(nn.Module):
    """Compiled parts with a layer of plain torch before them."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before = nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.before(x)
        return [part(x) for part in self.parts]

"""Five small nets as a server on a CPU has them, each with its rows and, for training, a loss of every output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["ZOO", "ZooNet"]


class ZooNet(NamedTuple):
    """A net, and the shape of one row of its input."""

    title: str
    make: Callable[[], nn.Module]
    row: tuple[int, ...]

    def batch(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, *self.row)


def tiny_mlp() -> nn.Module:
    """Operators so small that the interpreter is most of the call."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def mlp() -> nn.Module:
    """Three layers of 512."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))


def conv() -> nn.Module:
    """Two convolutions, whose outputs are larger than what glibc keeps."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def encoder() -> nn.Module:
    """Two layers of 128, four heads. Without dropout, so that training computes the same in every arm."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Lstm(nn.Module):
    """One layer, and a classifier of its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


ZOO = {
    "tiny": ZooNet("tiny MLP, 16-32-32-4", tiny_mlp, (16,)),
    "mlp": ZooNet("MLP of 3 x 512", mlp, (512,)),
    "conv": ZooNet("conv 3-16-32, 32x32 images", conv, (3, 32, 32)),
    "encoder": ZooNet("encoder of 2 x 128, 16 tokens", encoder, (16, 128)),
    "lstm": ZooNet("LSTM 64-128, 32 steps", Lstm, (32, 64)),
}

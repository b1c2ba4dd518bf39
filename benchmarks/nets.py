"""The nets of the benchmarks: linear layers, convolutions with buffers,
attention, and recurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["SMALL_ENCODER", "Lstm", "Net", "conv", "encoder", "mlp", "plain_attention", "resnet18"]


class Net(NamedTuple):
    """A net, the shape of one input row, its usual batch size, and a batch size at which overhead
    dominates.
    """

    name: str
    make: Callable[[], nn.Module]
    row: tuple[int, ...]
    usual: int
    small: int = 1

    def batch(self, rows: int) -> torch.Tensor:
        """Return random rows on the host."""
        return torch.randn(rows, *self.row)


def mlp(width: int = 1024) -> nn.Module:
    """Return three linear layers."""
    wide = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*wide[:-1])


def conv() -> nn.Module:
    """Return two convolutions with outputs larger than the buffers that glibc keeps."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def resnet18() -> nn.Module:
    """Return the architecture of ResNet-18 (He et al., 2015, table 1): 11.7 M parameters, 1000
    classes.
    """
    stem = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    widths = (64, 64, 128, 256, 512)
    blocks = [
        block
        for before, width in pairwise(widths)
        for block in (
            _Block(before, width, stride=1 if before == width else 2),
            _Block(width, width),
        )
    ]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)
    )


class _Block(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        )
        self.second = nn.Sequential(
            nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        )
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.around = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


def encoder(layers: int = 12, width: int = 768, heads: int = 12) -> nn.Module:
    """Return a transformer encoder.

    It has no dropout, so that every arm computes the same output.
    """
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Lstm(nn.Module):
    """An LSTM layer, and a classifier of its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


@contextmanager
def plain_attention() -> Iterator[None]:
    """Turn off torch's fused attention path, so that attention runs the same operators in training
    and inference.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


SMALL_ENCODER = Net(
    "encoder of 2 x 128, 16 tokens", partial(encoder, 2, 128, 4), (16, 128), usual=32
)

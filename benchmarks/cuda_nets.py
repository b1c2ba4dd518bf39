"""Three nets of torch.nn alone: small kernels, convolutions with buffers, and many parameters in many modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

__all__ = ["NETS", "Net", "encoder", "mlp", "plain_attention", "resnet18"]


class Net(NamedTuple):
    """A net, the shape of one row of its input, a batch that leaves the overhead bare, and one of a usual size."""

    name: str
    make: Callable[[], nn.Module]
    row: tuple[int, ...]
    small: int
    usual: int

    def batch(self, rows: int) -> torch.Tensor:
        """So many random rows, on the host."""
        return torch.randn(rows, *self.row)


def mlp() -> nn.Module:
    """Three layers of 1024."""
    wide = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*wide[:-1])


def resnet18() -> nn.Module:
    """The shape of ResNet-18 (He et al., 2015, table 1): 11.7 M parameters, 1000 classes."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    widths = (64, 64, 128, 256, 512)
    blocks = [
        block
        for before, width in pairwise(widths)
        for block in (_Block(before, width, stride=1 if before == width else 2), _Block(width, width))
    ]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


class _Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, before: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width))
        self.second = nn.Sequential(nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.around = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.second(torch.relu(self.first(x))) + self.around(x))


def encoder() -> nn.Module:
    """Twelve layers of 768, twelve heads: 85 M parameters. Without dropout, so that every arm computes the same."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)


@contextmanager
def plain_attention() -> Iterator[None]:
    """Attention goes one way in every arm, in training and in inference: torch's fused fast path is off inside."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


NETS = (
    Net("MLP of 3 x 1024", mlp, (1024,), small=8, usual=8192),
    Net("ResNet-18 shape, 64x64 images", resnet18, (3, 64, 64), small=4, usual=256),
    Net("encoder of 12 x 768, 128 tokens", encoder, (128, 768), small=4, usual=64),
)

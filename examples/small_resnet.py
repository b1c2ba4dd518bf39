"""The small residual network and the report that the NeuronCore examples share.

The weights are random, so nothing is downloaded. A seed makes them the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE = (3, 32, 32)
CLASSES = 10

# Relative to the largest score. By default neuronx-cc multiplies float32 matrices in bfloat16.
TOLERANCE = 0.05


class Residual(nn.Module):
    """A residual block of two convolutions. A stride of 2 halves height and width."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        same = stride == 1 and channels_in == channels
        self.shortcut = (
            nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def small_resnet() -> nn.Module:
    """Return a classifier of 3x32x32 images into ten classes, in eval mode."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(IMAGE[0], 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16),
        Residual(16, 32, stride=2),
        Residual(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, CLASSES),
    )
    return net.eval().requires_grad_(requires_grad=False)


def report(inputs: Tensor, scores: Tensor, expected: Tensor, dim: int = 0) -> None:
    """Print the row counts of inputs and outputs, and the difference from the plain model.

    Exit if it is too large.
    """
    difference = ((scores - expected).abs().max() / expected.abs().max()).item()
    print(
        f"{inputs.shape[dim]} rows in, {scores.shape[dim]} rows out, relative difference at "
        f"most {difference:.1g}"
    )
    if not difference <= TOLERANCE:  # also true for nan
        msg = f"the scores differ from the plain model's by {difference:.1g}, more than {TOLERANCE}"
        raise SystemExit(msg)

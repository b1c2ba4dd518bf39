"""What the examples for NeuronCores share: a small residual network built from torch.nn, and the line that they report.

With random weights, so that nothing is downloaded; the seed makes them the same in every run.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE = (3, 32, 32)
CLASSES = 10

# Part of the largest score. neuronx-cc multiplies float32 matrices in bfloat16 unless compiler_args says otherwise.
TOLERANCE = 0.05


class Residual(nn.Module):
    """Two convolutions, and the input added to what they give; with a stride, half as high and wide."""

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
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def small_resnet() -> nn.Module:
    """Scores of ten classes for images of 3x32x32, in eval mode."""
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
    """Print how many rows went in and came out, and how far from the plain model's; end with an error if that is far."""
    apart = ((scores - expected).abs().max() / expected.abs().max()).item()
    print(f"{inputs.shape[dim]} rows in, {scores.shape[dim]} rows out, at most {apart:.1g} from the plain model's")
    if not apart <= TOLERANCE:  # so that nan ends it too
        msg = f"these are other scores than the plain model's: rounding is below {TOLERANCE}"
        raise SystemExit(msg)

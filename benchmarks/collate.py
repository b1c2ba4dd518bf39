"""`default_collate(2)`, compared with torch's `default_collate` followed by `chunk`."""

from __future__ import annotations

import torch
from torch.utils.data import default_collate

import parawrap
from benchmarks._measure import Result, Row, take_turns

_NOISE = 1.05  # the times of two equal arms differ by up to this ratio


def rows() -> list[Row]:
    """Measure small vectors and images."""
    vectors = [(torch.randn(128), label) for label in range(64)]
    images = [(torch.randn(3, 224, 224), label) for label in range(32)]
    return [
        _row("64 samples of (128,) and a label", vectors, 300),
        _row("32 samples of (3, 224, 224) and a label", images, 60),
    ]


def _row(name: str, samples: list[tuple[torch.Tensor, int]], rounds: int) -> Row:
    ours = parawrap.default_collate(2)
    arms = take_turns(
        {
            "torch's default_collate, then chunk": lambda: [
                value.chunk(2) for value in default_collate(samples)
            ],
            "parawrap.default_collate(2)": lambda: ours(samples),
        },
        rounds=rounds,
        calls=5,
    )
    theirs, ours_arm = arms.values()
    ratio = ours_arm.median_us / theirs.median_us
    return Row(
        f"collate: {name}",
        arms,
        [
            Result("time of parawrap divided by that of torch", ratio, "ratio").held_to(
                "at most", _NOISE
            )
        ],
        peers=f"torch {torch.__version__}",
    )

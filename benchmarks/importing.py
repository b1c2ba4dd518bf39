"""The time that ``import parawrap`` adds to ``import torch``."""

from __future__ import annotations

import subprocess
import sys

from benchmarks._measure import Row, take_turns


def rows() -> list[Row]:
    """Time fresh interpreters, in turn."""
    arms = take_turns(
        {
            "import torch": lambda: _run("import torch"),
            "import torch, parawrap": lambda: _run("import torch, parawrap"),
        },
        rounds=15,
    )
    torch_alone, both = arms.values()
    added = both.median_us / torch_alone.median_us - 1
    return [Row("import", arms, f"{added:+.1%}", "at most +15%", added <= 0.15)]


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)

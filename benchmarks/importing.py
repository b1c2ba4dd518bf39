"""The time that the import of a block adds to ``import torch``."""

from __future__ import annotations

import os
import subprocess
import sys

from benchmarks._measure import Result, Row, take_turns

_MOST_ADDED = 15.0  # percent


def rows() -> list[Row]:
    """Time fresh interpreters, in turn."""
    arms = take_turns(
        {
            "import torch": lambda: _run("import torch"),
            "from parawrap import parallel": lambda: _run(
                "import torch; from parawrap import parallel"
            ),
        },
        rounds=15,
    )
    torch_alone, both = arms.values()
    added = 100 * (both.median_us / torch_alone.median_us - 1)
    return [
        Row(
            "import",
            arms,
            [Result("time added by parawrap", added, "%").held_to("at most", _MOST_ADDED)],
        )
    ]


def _run(code: str) -> None:
    """Run code in a fresh interpreter, which reads the bytecode of both packages, as after an
    installation.
    """
    environment = {
        name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
    }
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)

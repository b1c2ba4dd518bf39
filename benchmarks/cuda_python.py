"""``python -m benchmarks.cuda_python [PACKAGE ...]``: check that this Python can run the CUDA suite
and has the packages.

`make bench-cuda` checks $(PYTHON) this way before it creates a venv: machines with GPUs often have
their own torch and no network. This module imports only the standard library until torch is found.
"""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import re
import sys
from collections.abc import Sequence
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "setup.cfg"


def main(packages: Sequence[str] = ()) -> int:
    """Return 0 if this Python can run the suite and has the packages.

    Otherwise print the reason and return 1.
    """
    why = _why_not(packages)
    if why is not None:
        print(f"{sys.executable} cannot run the CUDA suite: {why}", file=sys.stderr)
    return 0 if why is None else 1


def _why_not(packages: Sequence[str]) -> str | None:
    lacks = lacking([*requirements(), *packages])
    if lacks:
        return (
            f"it lacks {', '.join(lacks)}. Install them to measure its torch. Without a network, "
            "copy wheels: pip install --no-index --no-deps --target FOLDER *.whl, then "
            "PYTHONPATH=FOLDER make bench-cuda"
        )
    from benchmarks.cuda_target import missing

    return missing()


def requirements() -> list[str]:
    """Return parawrap's requirements from setup.cfg."""
    project = configparser.ConfigParser()
    project.read(PROJECT, encoding="utf-8")
    return project["options"]["install_requires"].split()


def lacking(required: list[str]) -> list[str]:
    """Return the requirements, each ``name>=version``, that are not met."""
    lacks = []
    for requirement in required:
        name, _, least = requirement.partition(">=")
        try:
            found = importlib.metadata.version(name)
            importlib.import_module(name.replace("-", "_"))
        except ImportError:  # PackageNotFoundError is one
            lacks.append(requirement)
            continue
        if _numbers(found) < _numbers(least):
            lacks.append(f"{requirement} (has {found})")
    return lacks


def _numbers(version: str) -> tuple[int, ...]:
    release = re.match(r"[\d.]+", version)
    return tuple(int(part) for part in release[0].split(".") if part) if release else ()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""``python -m benchmarks.cuda_python``: whether the Python that runs this can run the CUDA suite, or what it lacks.

`make bench-cuda` asks it of $(PYTHON) before it makes a venv, since machines with GPUs often bring a torch that fits them
and have no network. Needs nothing but the standard library.
"""

from __future__ import annotations

import configparser
import importlib
import importlib.metadata
import re
import sys
from pathlib import Path

SETUP = Path(__file__).parents[1] / "setup.cfg"


def main() -> int:
    """0 where it can; else 1 and a line on what it lacks."""
    why = _why_not()
    if why is not None:
        print(f"{sys.executable} is passed over: {why}", file=sys.stderr)
    return 0 if why is None else 1


def _why_not() -> str | None:
    lacks = lacking(requirements())
    if lacks:
        return (
            f"it lacks {', '.join(lacks)}. Where its torch is the one to measure, install them there; without a network, "
            "bring wheels: pip install --no-index --no-deps --target FOLDER *.whl, then PYTHONPATH=FOLDER make bench-cuda"
        )
    from benchmarks.cuda_target import missing

    return missing()


def requirements() -> list[str]:
    """What parawrap itself requires, as setup.cfg has it."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    return setup["options"]["install_requires"].split()


def lacking(wanted: list[str]) -> list[str]:
    """Those of the requirements, each ``name>=version``, that are not met here."""
    lacks = []
    for requirement in wanted:
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
    raise SystemExit(main())

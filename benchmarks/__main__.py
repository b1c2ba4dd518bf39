"""``python -m benchmarks [name ...]``: measure, print a table, and write it with the pictures into benchmarks/results/."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
import platform
import sys
from pathlib import Path

NAMES = ("overhead", "growth", "collate", "importing", "replicas")
RESULTS = Path(__file__).parent / "results"
# The same allocator and the same threads for every arm: glibc returns large buffers to the kernel unless told not to, and
# the comparison would then be one of page faults.
FIXED = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Run the named benchmarks, or all."""
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **FIXED})
    names = sys.argv[1:] or NAMES
    RESULTS.mkdir(exist_ok=True)
    rows = []
    for name in names:
        print(f"measuring {name} ...", flush=True)
        module = importlib.import_module(f"benchmarks.{name}")
        rows += module.rows(RESULTS) if name == "growth" else module.rows()
    machine = _machine()
    table = _table(rows)
    print(f"\n{machine}\n\n{table}")
    if len(names) == len(NAMES):
        head = (
            f"# Engine and faces\n\n{machine}\n\nCommand: `make bench`. Median and middle half of the times, in turn.\n\n"
        )
        picture = "\n![growth](growth.png)\n"
        (RESULTS / "engine.md").write_text(head + table + picture)
        document = {"machine": machine, "rows": [row.as_json() for row in rows]}
        (RESULTS / "engine.json").write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(row.held for row in rows) else 1


def _machine() -> str:
    import torch

    from parawrap.backends.cpu import usable_cores

    today = dt.datetime.now(dt.UTC).date()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{today}, {platform.machine()}, {usable_cores()} cores, {gpu}, {versions}"


def _table(rows: list[object]) -> str:
    lines = ["| what | measured | result | wanted | held |", "|---|---|---|---|---|"]
    for row in rows:
        arms = "<br>".join(f"{name}: {arm}" for name, arm in row.arms.items())
        arms = arms or "<br>".join(f"{key}: {value}" for key, value in row.extra.get("us", {}).items())
        held = "yes" if row.held else "**no**"
        lines.append(f"| {row.name} | {arms} | {row.verdict} | {row.wanted} | {held} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())

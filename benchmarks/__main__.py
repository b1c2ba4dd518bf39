"""``python -m benchmarks [suite or name ...]``: measure, print tables, write whole suites into benchmarks/results/."""

from __future__ import annotations

import datetime as dt
import importlib
import json
import os
import platform
import sys
from pathlib import Path

from benchmarks._measure import Row

SUITES = {
    "engine": ("overhead", "growth", "collate", "importing", "replicas"),
    "launching": ("launching",),
}
TITLES = {"engine": "Engine and faces", "launching": "Launching on one machine"}
RESULTS = Path(__file__).parent / "results"
# The same allocator and the same threads for every arm: glibc returns large buffers to the kernel unless told not to, and
# the comparison would then be one of page faults.
FIXED = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Run the named benchmarks, or all."""
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], {**os.environ, **FIXED})
    asked = sys.argv[1:] or list(SUITES)
    RESULTS.mkdir(exist_ok=True)
    held = True
    for suite, names in SUITES.items():
        wanted = [name for name in names if suite in asked or name in asked]
        if wanted:
            rows = [row for name in wanted for row in _rows(name)]
            held &= all(row.held for row in rows)
            _show(suite, rows, keep=len(wanted) == len(names))
    return 0 if held else 1


def _rows(name: str) -> list[Row]:
    print(f"measuring {name} ...", flush=True)
    module = importlib.import_module(f"benchmarks.{name}")
    rows: list[Row] = module.rows(RESULTS) if name == "growth" else module.rows()
    return rows


def _show(suite: str, rows: list[Row], *, keep: bool) -> None:
    """Print a suite's table; write it too, where the whole suite was measured."""
    machine = _machine()
    table = "\n".join([_table(rows), *(f"{row.extra['markdown']}\n" for row in rows if "markdown" in row.extra)])
    print(f"\n{machine}\n\n{table}", flush=True)
    if keep:
        command = f"Command: `make bench` (`python -m benchmarks {suite}`). Median and middle half of the times, in turn."
        picture = "\n![growth](growth.png)\n" if suite == "engine" else ""
        (RESULTS / f"{suite}.md").write_text(f"# {TITLES[suite]}\n\n{machine}\n\n{command}\n\n{table}{picture}")
        document = {"machine": machine, "rows": [row.as_json() for row in rows]}
        (RESULTS / f"{suite}.json").write_text(json.dumps(document, indent=1) + "\n")


def _machine() -> str:
    import torch

    from parawrap.backends.cpu import usable_cores

    today = dt.datetime.now(dt.UTC).date()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{today}, {platform.machine()}, {usable_cores()} cores, {gpu}, {versions}"


def _table(rows: list[Row]) -> str:
    lines = ["| what | measured | result | wanted | held |", "|---|---|---|---|---|"]
    for row in rows:
        arms = "<br>".join(f"{name}: {arm}" for name, arm in row.arms.items())
        arms = arms or "<br>".join(f"{key}: {value}" for key, value in row.extra.get("us", {}).items())
        held = "yes" if row.held else "**no**"
        lines.append(f"| {row.name} | {arms} | {row.verdict} | {row.wanted} | {held} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())

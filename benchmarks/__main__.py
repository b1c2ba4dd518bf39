"""``python -m benchmarks [suite or name ...]``: measure, print tables, and write complete suites
into benchmarks/results/.

Each suite runs in its own process, with allocator and threads fixed before torch is loaded. A
complete suite also updates the summary.
"""

from __future__ import annotations

import datetime as dt
import importlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import summary
from benchmarks._measure import Row
from benchmarks._neighbours import Neighbours, cores_of_others
from benchmarks._process import ALLOCATOR
from benchmarks._python import build


class Suite(NamedTuple):
    """Benchmarks that run together and share one pair of result files."""

    title: str
    names: tuple[str, ...]
    command: str = "make bench"
    time_unit: str = "us"  # of the times on the page
    on_every_core: bool = False  # torch's own threads are an arm
    needs_gpu: bool = False
    per_build: bool = False  # one pair of files for each build of Python, with its name

    def file_of(self, suite: str) -> str:
        """Return the name of the suite's files, without a suffix."""
        return f"{suite}_{build()}" if self.per_build else suite


SUITES = {
    "engine": Suite(
        "Engine and public classes",
        ("overhead", "growth", "collate", "importing", "replicas", "memory", "memory_kept"),
    ),
    "launching": Suite(
        "Launching on one machine", ("launching", "relaunching", "staying"), time_unit="ms"
    ),
    "neuron": Suite("NeuronCores, emulated", ("neuron",)),
    "cpu_lanes": Suite(
        "Lanes on the CPU",
        ("cpu_lanes", "training", "mapping", "submitting"),
        time_unit="ms",
        on_every_core=True,
    ),
    "lanes": Suite(
        "Lanes and the interpreter lock",
        ("lanes",),
        time_unit="ms",
        on_every_core=True,
        per_build=True,
    ),
    "workers": Suite("Worker processes", ("workers",), time_unit="ms", on_every_core=True),
    "cuda": Suite(
        "On one GPU",
        ("cuda", "cpu_lanes"),
        command="make bench-cuda",
        on_every_core=True,
        needs_gpu=True,
    ),
}
RESULTS = Path(os.environ.get("PARAWRAP_BENCHMARK_RESULTS") or Path(__file__).parent / "results")


def main(words: Sequence[str]) -> int:
    """Run the named suites and benchmarks, or all suites.

    Return 1 if a row misses its goal or a suite cannot run.
    """
    jobs = _jobs(words)
    codes = [0]
    for suite in [suite for suite in jobs if SUITES[suite].needs_gpu]:
        why = _missing_gpu()
        if why is not None:
            del jobs[suite]
            print(f"{suite} {'cannot run' if words else 'is skipped'}: {why}", flush=True)
            codes.append(1 if words else 0)
    for suite, names in jobs.items():
        fixed = _fixed(SUITES[suite])
        if len(jobs) == 1 and all(os.environ.get(name) == value for name, value in fixed.items()):
            codes.append(_measure(suite, names))
        else:
            codes.append(_in_a_process(suite, names, fixed))
    return max(codes)


def _jobs(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the benchmarks to run in each suite.

    A word that is the name of a suite and of a benchmark means the suite.
    """
    jobs: dict[str, tuple[str, ...]] = {}
    for word in words or SUITES:
        suite = (
            word
            if word in SUITES
            else next((suite for suite in SUITES if word in SUITES[suite].names), None)
        )
        if suite is None:
            every = sorted({*SUITES, *(name for suite in SUITES.values() for name in suite.names)})
            msg = (
                f"{word!r} is not a suite or benchmark. Use one of {', '.join(every)}, or no word "
                "for all suites"
            )
            raise SystemExit(msg)
        whole = SUITES[suite].names
        named = whole if word == suite else (*jobs.get(suite, ()), word)
        jobs[suite] = tuple(name for name in whole if name in named)
    return jobs


def _missing_gpu() -> str | None:
    from benchmarks.cuda_target import missing

    return missing()


def _fixed(suite: Suite) -> dict[str, str]:
    """Return the environment of all arms of the suite."""
    from parawrap.backends.cores import usable_cores

    threads = usable_cores() if suite.on_every_core else 1
    return {**ALLOCATOR, "OMP_NUM_THREADS": str(threads)}


def _in_a_process(suite: str, names: Sequence[str], fixed: Mapping[str, str]) -> int:
    words = [suite] if names == SUITES[suite].names else names
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", *words], env={**os.environ, **fixed}, check=False
    ).returncode


def _measure(suite: str, names: Sequence[str]) -> int:
    logging.basicConfig(format="%(message)s", stream=sys.stdout)
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    RESULTS.mkdir(parents=True, exist_ok=True)
    before = Neighbours.now()
    keep = len(names) == len(SUITES[suite].names)
    rows = [row for name in names for row in _rows(name)]
    others = cores_of_others(before, Neighbours.now())
    _show(suite, rows, keep=keep, others=others)
    return 0 if all(row.met for row in rows) else 1


def _rows(name: str) -> list[Row]:
    print(f"measuring {name} ...", flush=True)
    rows: list[Row] = importlib.import_module(f"benchmarks.{name}").rows()
    return rows


def _show(suite: str, rows: list[Row], *, keep: bool, others: float | None = None) -> None:
    """Print a suite's tables. If `keep` is true, write its files and the summary."""
    unit = SUITES[suite].time_unit
    machine = hardware()
    if others is not None:
        machine["others"] = f"other processes on {others:.2f} cores"
    document: dict[str, Any] = {
        "date": str(dt.datetime.now(dt.UTC).date()),
        "command": f"{SUITES[suite].command} (python -m benchmarks {suite})",
        "hardware": machine,
        "versions": versions(),
        "rows": [row.as_json() for row in rows],
    }
    print(
        f"\n{summary.machine_of(document)}\n\n{summary.tables(document['rows'], unit)}\n",
        flush=True,
    )
    if keep:
        name = SUITES[suite].file_of(suite)
        (RESULTS / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        summary.write_suite(RESULTS, name, title_of(name), unit)
        summary.write(RESULTS, titles())


def suite_of(name: str) -> str:
    """Return the suite of a file."""
    return name if name in SUITES else name.rpartition("_")[0]


def title_of(name: str) -> str:
    """Return the title of the suite that has written a file."""
    title = SUITES[suite_of(name)].title
    return title if name in SUITES else f"{title}, Python {name.rpartition('_')[2]}"


def titles() -> dict[str, str]:
    """Return the titles of all files that suites have written, or would write."""
    names: list[str] = []
    for suite, each in SUITES.items():
        found = (
            sorted(path.stem for path in RESULTS.glob(f"{suite}_*.json"))
            if each.per_build
            else [suite]
        )
        names += found
    return {name: title_of(name) for name in names}


def hardware() -> dict[str, str]:
    """Return the architecture, the cores, and the GPU of this machine."""
    import torch

    from parawrap.backends.cores import usable_cores

    gpu = (
        f"{torch.cuda.get_device_name()}, driver {_driver()}"
        if torch.cuda.is_available()
        else "no GPU"
    )
    return {"machine": platform.machine(), "cores": f"{usable_cores()} cores", "gpu": gpu}


def _driver() -> str:
    question = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            question, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.partition("\n")[0].strip() or "unknown"


def versions() -> dict[str, str]:
    """Return the versions of torch, CUDA, Python, and parawrap."""
    import torch

    import parawrap

    cuda = {"CUDA": str(torch.version.cuda)} if torch.version.cuda else {}
    return {
        "torch": torch.__version__,
        **cuda,
        "Python": platform.python_version(),
        "parawrap": parawrap.__version__,
    }


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

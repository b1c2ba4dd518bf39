"""``python -m benchmarks.device [SECONDS]``: run the tests and benchmarks of a borrowed GPU
machine, in ten minutes.

The parts run one after another. A part that needs longer than its share of the time is ended, and
the next one runs. The pages of the suites and the logs of all parts go into one folder, with a
summary that names hardware, versions, and date.
"""

from __future__ import annotations

import datetime as dt
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.__main__ import hardware, versions

_ROOT = Path(__file__).parents[1]
FOLDER = _ROOT / "benchmarks" / "results" / "device"
LIMIT_S = 580.0


class Part(NamedTuple):
    """One command. `share` is its part of the time that is left when it begins."""

    name: str
    arguments: tuple[str, ...]
    share: float


class Outcome(NamedTuple):
    """The result of a part: its exit code, or None if it was ended."""

    name: str
    code: int | None
    seconds: float

    def __str__(self) -> str:
        said = (
            "ended, out of time"
            if self.code is None
            else "passed"
            if self.code == 0
            else f"exit code {self.code}"
        )
        return f"| {self.name} | {said} | {self.seconds:.0f} | `{self.name}.log` |"


PARTS = (
    Part("tests", ("-m", "pytest", "tests/cuda", "-rA"), 0.35),
    Part("cuda", ("-m", "benchmarks", "cuda"), 0.7),
    Part("workers", ("-m", "benchmarks", "workers"), 1.0),
)


def run(parts: Sequence[Part], folder: Path, limit_s: float) -> list[Outcome]:
    """Run the parts in order, and return the result of each.

    All of them together take at most `limit_s`.
    """
    end = time.monotonic() + limit_s
    return [_run(part, folder, part.share * max(1.0, end - time.monotonic())) for part in parts]


def _run(part: Part, folder: Path, limit_s: float) -> Outcome:
    print(f"{part.name}: python {' '.join(part.arguments)}, at most {limit_s:.0f} s", flush=True)
    variables = {
        **os.environ,
        "PARAWRAP_TEST_REQUIRE": "cuda",
        "PARAWRAP_BENCHMARK_RESULTS": str(folder),
    }
    # For the scripts that tests start, if parawrap is not installed
    path = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    began = time.monotonic()
    with (folder / f"{part.name}.log").open("wb") as log:
        command = [sys.executable, *part.arguments]
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the ranks and workers that it started
                process.wait()
    return Outcome(part.name, code, time.monotonic() - began)


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the page that names the machine, the versions, the date, and the
    result of each part.
    """
    machine = ", ".join(hardware().values())
    packages = ", ".join(f"{name} {version}" for name, version in versions().items())
    rows = "\n".join(map(str, outcomes))
    return (
        f"# On a machine with a GPU\n\n`make device` on {dt.datetime.now(dt.UTC).date()}: "
        f"{machine}. {packages}.\n\n| part | result | time (s) | output "
        f"|\n|---|---|---:|---|\n{rows}\n"
    )


def main(words: Sequence[str]) -> int:
    """Run all parts in at most that many seconds; return 1 if one did not pass."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    outcomes = run(PARTS, FOLDER, float(words[0]) if words else LIMIT_S)
    page = summary(outcomes)
    (FOLDER / "device.md").write_text(page)
    print(page, flush=True)
    return int(any(outcome.code != 0 for outcome in outcomes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

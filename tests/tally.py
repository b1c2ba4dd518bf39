"""Run tiers of tests again and again while other processes compute: ``python -m tests.tally TIER
... [--runs N]``.

A tier is a target of the Makefile, such as test-core. Each run adds a line to .tally/tally.jsonl,
so that a tally can grow over days; the logs of failed runs stay in .tally/. Without a tier, the
command prints the table of all runs so far.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOGS = ROOT / ".tally"
TALLY = LOGS / "tally.jsonl"
FAILURE = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
COUNT = re.compile(r"(\d+) passed")
COMPUTING = "while True: sum(range(10**6))"


@contextmanager
def computing(processes: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", COMPUTING]) for _ in range(processes)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def run(tier: str, load: int) -> dict[str, Any]:
    LOGS.mkdir(exist_ok=True)
    log = LOGS / f"{tier}-{time.time():.0f}.log"
    commit = subprocess.check_output(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True
    ).strip()
    began = time.monotonic()
    with computing(load), log.open("wb") as output:
        code = subprocess.run(
            ["make", tier], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
    text = log.read_text(errors="replace")
    if code == 0:
        log.unlink()
    return {
        "date": dt.date.today().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "torch": version("torch"),
        "tier": tier,
        "load": load,
        "load_average": round(os.getloadavg()[2], 1),  # of the last 15 minutes
        "cores": len(os.sched_getaffinity(0)),
        "seconds": round(time.monotonic() - began),
        "passed": sum(map(int, COUNT.findall(text))),
        "failed": failures(code, text),
    }


def failures(code: int, text: str) -> list[str]:
    """Return the tests that failed; without one, the end of the log."""
    if code == 0:
        return []
    return sorted(set(FAILURE.findall(text))) or [f"not finished: {text.rstrip()[-200:]}"]


def table(runs: Iterable[dict[str, Any]]) -> str:
    by_tier: dict[str, list[dict[str, Any]]] = {}
    for each in runs:
        by_tier.setdefault(each["tier"], []).append(each)
    lines = [
        "| tier | runs | runs that failed | tests in a run | failed tests |",
        "|---|---:|---:|---:|---|",
    ]
    for tier, of_tier in sorted(by_tier.items()):
        failed = Counter(test for each in of_tier for test in each["failed"])
        names = "<br>".join(
            f"{count} x {' '.join(test.split())}" for test, count in failed.most_common()
        ).replace("|", "\\|")
        with_failures = sum(bool(each["failed"]) for each in of_tier)
        lines.append(
            f"| {tier} | {len(of_tier)} | {with_failures} | "
            f"{max(e['passed'] for e in of_tier)} | {names} |"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the tiers in turn; return 1 if a test failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tiers", nargs="*", metavar="TIER", help="targets of the Makefile")
    parser.add_argument("--runs", type=int, default=1, help="runs of each tier (default: 1)")
    parser.add_argument(
        "--load", type=int, default=1, help="other processes that compute meanwhile (default: 1)"
    )
    options = parser.parse_args()
    has_failures = False
    for _ in range(options.runs):
        for tier in options.tiers:
            outcome = run(tier, options.load)
            has_failures = has_failures or bool(outcome["failed"])
            with TALLY.open("a") as file:
                print(json.dumps(outcome), file=file)
            print(
                f"{tier}: {outcome['passed']} passed, failed: {outcome['failed'] or 'none'}",
                flush=True,
            )
    print(table(map(json.loads, TALLY.read_text().splitlines() if TALLY.exists() else ())))
    return int(has_failures)


if __name__ == "__main__":
    raise SystemExit(main())

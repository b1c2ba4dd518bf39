"""``parawrap doctor``: what a machine has, and what works on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack

from parawrap import __version__
from parawrap.cli._check import Check

__all__ = ["EXAMPLES", "HELP", "add_options", "run"]

HELP = "Check what this machine has, and run a block, a launch, and workers on it"
EXAMPLES = """exit code 1 means that something that should work does not.

examples:
  parawrap doctor
  parawrap doctor --json > machine.json
  parawrap doctor --verbose        # with the traceback of each problem
"""
_LONGEST_S = 1_000_000  # poll(2) counts milliseconds in 32 bits
_COLORS = {"ok": "32", "missing": "2", "warning": "33", "problem": "31"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of each problem")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="for each trial (default: %(default)g)"
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        msg = f"{text} is not a number of seconds above 0, and at most {_LONGEST_S}"
        raise argparse.ArgumentTypeError(msg)
    return seconds


def run(given: argparse.Namespace) -> int:
    """Print one line per check. Return 1 if there is a problem."""
    checks = _checks(given.timeout)
    if given.json:
        listed = list(checks)
        print(json.dumps({"parawrap": __version__, "machine": _machine(), "checks": [each._asdict() for each in listed]}))
    else:
        listed = list(_shown(checks, verbose=given.verbose))
    return int(any(each.state == "problem" for each in listed))


def _checks(limit_s: float) -> Iterator[Check]:
    """Yield the facts of the machine, then one check per trial."""
    from parawrap.cli._machine import machine_checks
    from parawrap.cli._trials import ON_ACCELERATORS, ON_CPU, Trial

    with ExitStack() as running:
        trials = [running.enter_context(Trial(name)) for name in ON_CPU]
        try:
            import torch
        except ImportError as error:
            yield Check("torch", "problem", str(error), "Install torch: https://pytorch.org/get-started/locally")
            return
        if torch.accelerator.is_available():
            trials += [running.enter_context(Trial(name)) for name in ON_ACCELERATORS]
        yield from machine_checks()
        for trial in trials:
            yield trial.check(limit_s)


def _shown(checks: Iterable[Check], *, verbose: bool) -> Iterator[Check]:
    """Print each check when it is done, and a summary. Yield the checks."""
    print(f"parawrap {__version__} on {_machine()}\n")
    counts: Counter[str] = Counter()
    for check in checks:
        counts[check.state] += 1
        took = "" if check.milliseconds is None else f", {check.milliseconds:.0f} ms"
        print(f"{_colored(f'{check.state:>8}', check.state)}  {check.name:<25}  {check.detail}{took}", flush=True)
        if check.cure:
            print(textwrap.indent(check.cure, " " * 37))
        if verbose and check.traceback:
            print(textwrap.indent(check.traceback, " " * 10))
        yield check
    problems, warnings = (f"{counts[state]} {state}{'s' * (counts[state] != 1)}" for state in ("problem", "warning"))
    print(f"\n{problems}, {warnings}, {counts['ok']} ok, {counts['missing']} missing")


def _machine() -> str:
    return f"{platform.node()}, {platform.system()} {platform.release()} {platform.machine()}"


def _colored(text: str, state: str) -> str:
    """Return the text in the color of a state, if standard output is a terminal that may show colors."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: standard output is closed
    shows_colors = is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\033[{_COLORS[state]}m{text}\033[0m" if shows_colors else text

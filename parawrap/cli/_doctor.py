"""``parawrap doctor``: facts about a machine, and the parts that work on it."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

from parawrap import __version__
from parawrap.cli._check import Check
from parawrap.cli._trials import TRIALS, describe_machine, run_trial

__all__ = ["EXAMPLES", "HELP", "add_options", "run"]

HELP = "Check what this machine has, and run a block, a launch, and workers on it"
EXAMPLES = """exit code 1 means that something that should work does not.

examples:
  parawrap doctor
  parawrap doctor --json > machine.json
  parawrap doctor --verbose        # with the traceback of each problem
"""
_LONGEST_S = 1_000_000  # poll(2) counts milliseconds in 32 bits
_SHOWN = ("os", "python_version", "torch_version", "cuda_compiled_version", "nvidia_driver_version", "nvidia_gpu_models")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this subcommand."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all of torch.utils.collect_env")
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
    """Print facts, and one line per check. Return 1 if there is a problem."""
    if not given.json:
        print(f"parawrap {__version__}", flush=True)
    facts, found = describe_machine(given.timeout)
    trials = TRIALS if facts else ()  # without torch, there is nothing to try
    checks = chain(found, (run_trial(name, given.timeout) for name in trials))
    if given.json:
        listed = list(checks)
        print(json.dumps({"parawrap": __version__, "machine": facts, "checks": [each._asdict() for each in listed]}))
    else:
        for name in _SHOWN:
            if facts.get(name):
                print(f"{name.replace('_', ' ')}: {', '.join(facts[name].splitlines())}")
        listed = list(_show(checks, verbose=given.verbose))
    return int(any(each.state == "problem" for each in listed))


def _show(checks: Iterable[Check], *, verbose: bool) -> Iterator[Check]:
    """Print each check when it is done, and a summary. Yield the checks."""
    print()
    counts: Counter[str] = Counter()
    for check in checks:
        counts[check.state] += 1
        print(f"{check.state:>8}  {check.name:<25}  {check.detail}", flush=True)
        if check.cure:
            print(textwrap.indent(check.cure, " " * 37))
        if verbose and check.traceback:
            print(textwrap.indent(check.traceback, " " * 10))
        yield check
    problems, warnings = (f"{counts[state]} {state}{'s' * (counts[state] != 1)}" for state in ("problem", "warning"))
    print(f"\n{problems}, {warnings}, {counts['ok']} ok, {counts['missing']} missing")

"""Run many cases: ``python -m tests.fuzz --cases 10000 [--devices cpu|sim] [--seed N]``.

``--case "Case(...)"`` runs one case again, as a summary prints it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from random import Random
from types import FrameType
from typing import NoReturn

import torch

from tests import simdevice
from tests.fuzz.cases import Case, Outcome, drawn_case, run

_LONGEST_S = 120
_LEAST_ANSWERED = 0.6  # 0.7 are answered on several devices, and more on the CPU


class Hang(BaseException):
    """A case took too long."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang


def outcome_in_time(case: Case) -> Outcome:
    """Run a case; one that takes too long is wrong."""
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    try:
        outcome = run(case)
    except Hang:
        return Outcome("wrong", f"hang of more than {_LONGEST_S} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    races = simdevice.stats().races if case.devices[0].startswith("sim") else ()
    if races:
        simdevice.reset_stats()
        return Outcome("wrong", f"race: {races[0]}")
    return outcome


def fuzz(cases: int, seed: int, devices: str) -> int:
    """Run that many cases, print how they ended and one case per kind of wrong outcome, and return the exit status."""
    ends: Counter[str] = Counter()
    wrong: dict[str, str] = {}
    began = time.monotonic()
    for index in range(cases):
        case = drawn_case(Random(f"{seed} {index}"), devices)
        outcome = outcome_in_time(case)
        ends[outcome.end] += 1
        if outcome.end == "wrong" and outcome.kind not in wrong:
            wrong[outcome.kind] = f"{outcome.detail}\n  {case!r}"
            print(f"wrong: {wrong[outcome.kind]}", flush=True)
    print(dict(ends))
    print(f"{time.monotonic() - began:.0f} s; kinds of wrong outcomes: {len(wrong)}")
    return int(bool(wrong) or ends["answered"] < _LEAST_ANSWERED * (ends["answered"] + ends["refused"]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--devices", choices=("cpu", "sim"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default=None, help="the repr of one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _stop)
    if options.devices == "sim" or "'sim:" in str(options.case):
        simdevice.install(4)
    if options.case is not None:
        outcome = outcome_in_time(eval(options.case, {"Case": Case}))
        print(outcome)
        return int(outcome.end == "wrong")
    return fuzz(options.cases, options.seed, options.devices)


if __name__ == "__main__":
    sys.exit(main())

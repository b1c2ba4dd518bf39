"""Run many cases: ``python -m tests.fuzz --cases 10000 [--devices cpu|sim] [--seed N]``.

``--kind rowwise`` compares row-wise models, ``--kind contract`` what a call owns, borrows, and
hands over; both by default. ``--case "..."`` runs one case again, as a summary prints it.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import FrameType
from typing import NoReturn, TypeAlias

import torch

from tests import simdevice
from tests.fuzz.cases import Case, Outcome, drawn_case, run
from tests.fuzz.contract_cases import (
    ContractCase,
    drawn_contract_case,
    has_races,
    run_contract,
    smaller,
)
from tests.fuzz.contract_targets import Step, source_of

AnyCase: TypeAlias = Case | ContractCase

DRAWS = {"rowwise": drawn_case, "contract": drawn_contract_case}

_LONGEST_S = 120
_LAST = Path(tempfile.gettempdir()) / f"fuzz_case_of_{os.getpid()}"  # left by a case that crashes
_LEAST_ANSWERED = 0.6  # 0.7 are answered on several devices, and more on the CPU


class Hang(BaseException):
    """A case took too long."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang


def outcome_in_time(case: AnyCase) -> Outcome:
    """Run a case; one that takes too long is wrong."""
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    try:
        outcome = run_contract(case) if isinstance(case, ContractCase) else run(case)
    except Hang:
        return Outcome("wrong", f"hang of more than {_LONGEST_S} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    races = simdevice.stats().races if case.devices[0].startswith("sim") else ()
    if races:
        simdevice.reset_stats()
    if races and not (isinstance(case, ContractCase) and has_races(case)):
        return Outcome("wrong", f"race: {races[0]}")
    return outcome


def shrunk(case: ContractCase, outcome: Outcome) -> tuple[ContractCase, Outcome]:
    """Leave out parts of a wrong case as long as it stays wrong in the same way."""
    for other in smaller(case):
        found = outcome_in_time(other)
        if found.kind == outcome.kind:
            return shrunk(other, found)
    return case, outcome


def fuzz(cases: int, seed: int, devices: str, kinds: Sequence[str]) -> int:
    """Run that many cases, print how they ended and one case per kind of wrong outcome.

    Return the exit status.
    """
    ends: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    began = time.monotonic()
    for index in range(cases):
        case: AnyCase = DRAWS[kinds[index % len(kinds)]](Random(f"{seed} {index}"), devices)
        _LAST.write_text(repr(case))
        outcome = outcome_in_time(case)
        ends[outcome.end] += 1
        if outcome.end == "wrong":
            wrong[outcome.kind] += 1
            if wrong[outcome.kind] == 1:
                show(case, outcome)
    _LAST.unlink(missing_ok=True)
    for kind, count in wrong.most_common():
        print(f"{count:6d} {kind}")
    print(dict(ends))
    print(f"{time.monotonic() - began:.0f} s; kinds of wrong outcomes: {len(wrong)}")
    least = _LEAST_ANSWERED * (ends["answered"] + ends["refused"])
    return int(bool(wrong) or ends["answered"] < least)


def show(case: AnyCase, outcome: Outcome) -> None:
    """Print a case, the smallest that was found, and its source."""
    if isinstance(case, ContractCase):
        case, outcome = shrunk(case, outcome) if outcome.end == "wrong" else (case, outcome)
        print(source_of(case), end="")
    print(f"{outcome.end}: {outcome.detail}\n  {case!r}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--kind", choices=(*DRAWS, "both"), default="both")
    parser.add_argument("--devices", choices=("cpu", "sim"), default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", default=None, help="the repr of one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _stop)
    if options.devices == "sim" or "'sim:" in str(options.case):
        simdevice.install(4)
    if options.case is not None:
        case = eval(options.case, {"Case": Case, "ContractCase": ContractCase, "Step": Step})
        outcome = outcome_in_time(case)
        show(case, outcome)
        return int(outcome.end == "wrong")
    kinds = tuple(DRAWS) if options.kind == "both" else (options.kind,)
    return fuzz(options.cases, options.seed, options.devices, kinds)


if __name__ == "__main__":
    sys.exit(main())

"""Run many cases: ``python -m tests.fuzz --cases 10000 [--devices cpu|sim] [--seed N]``.

``--case "Case(...)"`` runs one case again, as a summary prints it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from functools import partial
from random import Random
from types import FrameType
from typing import Any, NoReturn

import torch

from tests import simdevice
from tests.fuzz.cases import Case, Outcome, drawn_case, drawn_devices, reduced, run, run_seeded
from tests.fuzz.mixing import MixingCase, drawn_mixing_case, run_mixing

_LONGEST_S = 20
_LEAST_ANSWERED = 0.7
_SHOWN = 12


class Hang(BaseException):
    """A case took too long."""


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise Hang


def outcome_in_time(generator: str, case: Any) -> Outcome:
    """Run a case; one that takes too long is wrong."""
    run_case = {"row-wise": run, "mixing": run_mixing, "seeded": run_seeded}[generator]
    signal.setitimer(signal.ITIMER_REAL, _LONGEST_S)
    try:
        outcome = run_case(case)
    except Hang:
        return Outcome("wrong", f"hang of more than {_LONGEST_S} s")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    races = simdevice.stats().races if case.devices[0].startswith("sim") else ()
    if races:
        simdevice.reset_stats()
        return Outcome("wrong", f"race: {races[0]}", outcome.warnings)
    return outcome


def drawn(seed: int, index: int, devices: str) -> tuple[str, Any]:
    """Draw a case: 16 of 20 are row-wise, 3 mix rows, 1 is seeded."""
    random = Random(f"{seed} {index}")
    which = index % 20
    if which % 6 == 5:
        return "mixing", drawn_mixing_case(random, *drawn_devices(random, devices))
    return "seeded" if which == 19 else "row-wise", drawn_case(random, devices)


class Summary:
    """Counts of outcomes, and the wrong cases."""

    def __init__(self) -> None:
        self.ends: Counter[tuple[str, str]] = Counter()
        self.refusals: Counter[str] = Counter()
        self.warnings: Counter[str] = Counter()
        self.wrong: list[tuple[str, Any, Outcome]] = []
        self._started = time.monotonic()

    def add(self, generator: str, case: Any, outcome: Outcome) -> None:
        """Count one outcome."""
        self.ends[generator, outcome.end] += 1
        self.warnings.update(_start(warning) for warning in outcome.warnings)
        if outcome.end == "refused":
            self.refusals[f"{generator}: {_start(outcome.detail)}"] += 1
        if outcome.end == "wrong":
            self.wrong.append((generator, case, outcome))

    @property
    def answered(self) -> float:
        """The share of answered cases among those that parawrap should answer."""
        wanted = sum(count for (generator, _), count in self.ends.items() if generator != "mixing")
        right = sum(count for (generator, end), count in self.ends.items() if generator != "mixing" and end == "answered")
        return right / wanted if wanted else 1.0

    def show(self) -> None:
        """Print the counts, and one reduced case per kind of wrong outcome."""
        print(f"{'':10}{'cases':>8}{'answered':>10}{'refused':>9}{'wrong':>7}")
        for generator in ("row-wise", "mixing", "seeded"):
            counts = [self.ends[generator, end] for end in ("answered", "refused", "wrong")]
            print(f"{generator:10}{sum(counts):8}{counts[0]:10}{counts[1]:9}{counts[2]:7}")
        print(f"{self.answered:.1%} of row-wise and seeded cases answered, {time.monotonic() - self._started:.0f} s")
        for title, counter in (("refusals", self.refusals), ("warnings", self.warnings)):
            print(f"{title}: {counter.total()}")
            for text, count in counter.most_common(_SHOWN):
                print(f"{count:8}  {text}")
        self._show_wrong()

    def _show_wrong(self) -> None:
        first = {outcome.kind: (generator, case, outcome) for generator, case, outcome in reversed(self.wrong)}
        for kind, (generator, case, outcome) in first.items():
            count = sum(each.kind == kind for _, _, each in self.wrong)
            is_reducible = generator == "row-wise" and "hang" not in outcome.detail
            print(f"\n{count} wrong, such as\n  {outcome.detail}")
            print(f"  {reduced(case, partial(outcome_in_time, generator)) if is_reducible else case!r}", flush=True)


def _start(text: str) -> str:
    words = ["'...'" if word[0] in "'\"" else word for word in text.split()[:14]]
    return " ".join("N" if any(letter.isdigit() for letter in word) else word for word in words)


def fuzz(cases: int, seed: int, devices: str) -> int:
    """Run that many cases, print a summary, and return the exit status."""
    summary = Summary()
    for index in range(cases):
        generator, case = drawn(seed, index, devices)
        summary.add(generator, case, outcome_in_time(generator, case))
    summary.show()
    return int(bool(summary.wrong) or summary.answered < _LEAST_ANSWERED)


def main() -> int:
    """Read the options, and run."""
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
        case = eval(options.case, {"Case": Case, "MixingCase": MixingCase})
        generators = ["mixing"] if isinstance(case, MixingCase) else ["row-wise", "seeded"]
        outcomes = [outcome_in_time(generator, case) for generator in generators]
        print(*outcomes, sep="\n")
        return int(any(outcome.end == "wrong" for outcome in outcomes))
    return fuzz(options.cases, options.seed, options.devices)


if __name__ == "__main__":
    sys.exit(main())

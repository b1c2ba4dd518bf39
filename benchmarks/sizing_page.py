"""docs/launch_sizing.md, computed from benchmarks/results/sizing.json.

``python -m benchmarks.sizing_page`` and the suite itself write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizing_model import COSTS, CURES, LIMITS, PER_NODE, SIZES, Constants, constants_of, cost, most_ranks

__all__ = ["PAGE", "RESULTS", "page", "write"]

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "sizing.json"
PAGE = _ROOT / "docs" / "launch_sizing.md"

_COUNTED = """\
Counted in the code: inside torchrun, every rank asks four things about every other (whether it is done, whether one has
failed, how it ended, and what it returned, up to 4 MiB); every rank enters every group of `ipc_groups`, at each of which
torch's `new_group` has it ask the store three things. The group over all ranks is made in any case, also with `ipc_groups`.
A node's start counts the imports twice: for the task, and for the warm process that it starts."""

_MEASURED = """\
Names that end in `_s` are seconds; a pair is one rank and another, of N^2. How each was measured, and the spread:
[the results](../benchmarks/results/sizing.md), [the probes](../benchmarks/sizing_probes.py)."""

_UNMEASURED = """\
- The network. Times at the store and at the first node are processor times; what its link carries takes time too: the
  addresses' gigabytes, divided by the link's gigabytes a second.
- The file system. What it delivers a second is yours to put in: nodes x megabytes / (megabytes a second). A cold start
  reads at least what is touched, and up to whole files where it reads far ahead.
- Slurm's and Ray's own time to start a task a node.
- NCCL, whose own start was not measured.
- Names. For every rank's line to the store, torch asks the resolver for the name of an address; where none answers, that
  line takes as long as the resolver waits.
- Other processors, kernels and releases of torch: this machine was a virtual one, whose system calls may cost more
  than a bare one's. `python -m benchmarks sizing` measures and writes this page anew."""


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def page(document: Mapping[str, Any]) -> str:
    """Return the page for a results document."""
    constants = constants_of(document["rows"])
    where = ", ".join([document["date"], *document["hardware"].values(), *_named(document["versions"])])
    said = (
        f"Computed from constants that were measured on one machine ({where}), with {PER_NODE} ranks a node. Nothing here "
        "was seen at such sizes: the largest that were measured stand in [the results](../benchmarks/results/sizing.md). "
        "`python -m benchmarks sizing` measures, and writes this page."
    )
    parts = [
        "# What a launch's size costs",
        said,
        "## What breaks first",
        _breaks(constants),
        "## What to use",
        _advice(constants),
        "## Computed",
        "N ranks on N / 8 nodes, rounded up. Seconds are of one processor, GB are 10^9 bytes.",
        _totals(constants),
        "## Formulae",
        _table(["", "formula"], [[each.what, f"`{each.formula}`"] for each in COSTS.values()]),
        _COUNTED,
        "## Measured",
        _table(["constant", "value"], [[f"`{name}`", _figure(value)] for name, value in constants._asdict().items()]),
        _MEASURED,
        "## Not in here",
        _UNMEASURED,
    ]
    return "\n\n".join(parts) + "\n"


def _breaks(constants: Constants) -> str:
    found = sorted(((most_ranks(limit, constants), limit) for limit in LIMITS), key=lambda each: each[0])
    rows = [
        [
            f"{_rounded(ranks):,}",
            COSTS[limit.cost].what,
            f"{limit.value:,g} {_unit(limit.cost)}: {limit.whose}",
            limit.beyond,
        ]
        for ranks, limit in found
    ]
    ranks, first = next(each for each in found if each[1].ends)
    slow_ranks, slow = next(each for each in found if not each[1].ends)
    said = (
        f"What first ends a launch, beyond {_rounded(ranks):,} ranks: the {COSTS[first.cost].what}. What first makes one "
        f"slow, beyond {_rounded(slow_ranks):,}: {COSTS[slow.cost].what}. Minutes and shares that are called chosen are "
        "this page's own measure of what is too slow."
    )
    return said + "\n\n" + _table(["up to (ranks)", "what", "limit", "beyond it"], rows)


def _advice(constants: Constants) -> str:
    """List for each size the cures of the limits that it exceeds."""
    lines, before = [], set[str]()
    for size in SIZES:
        names = [name for limit in LIMITS if most_ranks(limit, constants) < size for name in limit.cures]
        more = [CURES[name] for name in dict.fromkeys(names) if name not in before]
        before |= set(names)
        told = "nothing beside the defaults." if not names else "nothing more." if not more else ""
        lines.append(f"**{size:,} ranks**: {told}".rstrip() + "".join(f"\n- {each}." for each in more))
    return "\n\n".join(lines)


def _totals(constants: Constants) -> str:
    head = ["", *(f"{size:,} ranks" for size in SIZES)]
    rows = [
        [each.what, *(f"{_figure(cost(name, constants, size))} {each.unit}".strip() for size in SIZES)]
        for name, each in COSTS.items()
    ]
    return _table(head, rows)


def _unit(name: str) -> str:
    return COSTS[name].unit or "files"


def _named(versions: Mapping[str, str]) -> list[str]:
    return [f"{name} {version}" for name, version in versions.items()]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _rounded(value: float) -> int:
    """Round to two figures, the precision of the model."""
    return int(float(f"{value:.1e}"))


def _figure(value: float) -> str:
    """Format three figures, without exponents down to a thousandth."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    write()

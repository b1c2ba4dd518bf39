"""docs/launch_sizing.md, computed from benchmarks/results/sizing.json.

The sizing suite writes the page, and so does ``python -m benchmarks.sizing_page``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sizing_model import COSTS, CURES, LIMITS, PER_NODE, SIZES, Constants, constants_of, cost, most_ranks
from benchmarks.summary import machine_of

__all__ = ["PAGE", "RESULTS", "page", "write"]

_ROOT = Path(__file__).parent.parent
RESULTS = _ROOT / "benchmarks" / "results" / "sizing.json"
PAGE = _ROOT / "docs" / "launch_sizing.md"

_COUNTED = """\
- Inside torchrun, each rank requests four values of every other rank from the store: whether it is done, whether a rank has
  failed, how it ended, and its result of up to 4 MiB.
- Each rank enters every group of `ipc_groups`. torch's `new_group` makes three requests to the store per rank and group.
  The group over all ranks is always created.
- The start of a node counts the imports twice: for the task, and for the warm process that the task starts."""

_MEASURED = """\
A pair of ranks is one of N^2. [The results](../benchmarks/results/sizing.md) show the range of each measurement, and
[the probes](../benchmarks/sizing_probes.py) show its method."""

_UNMEASURED = """\
- The network. The times of the store and of the first node are processor times. Add the gigabytes of addresses, divided by
  the gigabytes per second of the link.
- The file system. Divide nodes x megabytes by its megabytes per second. A cold start reads at least the touched pages, and
  at most whole files if the file system reads ahead.
- The time of Slurm and Ray to start one task per node.
- The start of NCCL.
- Name resolution. torch resolves an address for each connection of a rank to the store. If no resolver answers, the
  connection takes as long as the resolver's timeout.
- Other processors, kernels, and versions of torch. This machine was virtual, and its system calls may cost more than those
  of real hardware. Measure your own with `python -m benchmarks sizing`, which also writes this page."""


def write() -> None:
    """Write the page."""
    PAGE.write_text(page(json.loads(RESULTS.read_text())))


def page(document: Mapping[str, Any]) -> str:
    """Return the page for a results document."""
    constants = constants_of(document["rows"])
    introduction = (
        "These costs are computed, not measured: no launch of these sizes was run. The constants come from small launches "
        f"on one machine ({machine_of(document)}), with {PER_NODE} ranks per node. "
        "[The results](../benchmarks/results/sizing.md) show the sizes that were measured. "
        "`python -m benchmarks sizing` measures and writes this page."
    )
    parts = [
        "# The cost of a launch by size",
        introduction,
        "## Limits",
        _limits(constants),
        "## Advice",
        _advice(constants),
        "## Costs",
        "N ranks run on N / 8 nodes, rounded up. Seconds are processor time, and a GB is 10^9 bytes.",
        _totals(constants),
        "## Formulae",
        _table(["cost", "unit", "formula"], [[each.label, each.unit, f"`{each.formula}`"] for each in COSTS.values()]),
        "Three formulae count operations in the code:",
        _COUNTED,
        "## Constants",
        _table(
            ["constant", "unit", "value"],
            [[f"`{name}`", _unit(name), _figure(value)] for name, value in constants._asdict().items()],
        ),
        _MEASURED,
        "## Not included",
        _UNMEASURED,
    ]
    return "\n\n".join(parts) + "\n"


def _limits(constants: Constants) -> str:
    found = sorted(((most_ranks(limit, constants), limit) for limit in LIMITS), key=lambda each: each[0])
    rows = [
        [
            f"{_rounded(ranks):,}",
            COSTS[limit.cost].label,
            f"{limit.value:,g}",
            COSTS[limit.cost].unit,
            limit.reason,
            limit.effect,
        ]
        for ranks, limit in found
    ]
    ranks, first = next(each for each in found if each[1].fatal)
    slow_ranks, slow = next(each for each in found if not each[1].fatal)
    text = (
        f"A launch first fails beyond {_rounded(ranks):,} ranks ({COSTS[first.cost].label}). It is first slow beyond "
        f"{_rounded(slow_ranks):,} ranks ({COSTS[slow.cost].label}). Limits marked as chosen "
        "are this page's own definition of slow."
    )
    return text + "\n\n" + _table(["largest launch (ranks)", "cost", "limit", "unit", "reason", "effect beyond it"], rows)


def _advice(constants: Constants) -> str:
    """List for each size the cures of the limits that it exceeds."""
    lines, before = [], set[str]()
    for size in SIZES:
        names = [name for limit in LIMITS if most_ranks(limit, constants) < size for name in limit.cures]
        more = [CURES[name] for name in dict.fromkeys(names) if name not in before]
        before |= set(names)
        remark = "the defaults suffice." if not names else "nothing more." if not more else ""
        lines.append(f"**{size:,} ranks**: {remark}".rstrip() + "".join(f"\n- {each}." for each in more))
    return "\n\n".join(lines)


def _totals(constants: Constants) -> str:
    head = ["cost", "unit", *(f"{size:,} ranks" for size in SIZES)]
    rows = [
        [each.label, each.unit, *(_figure(cost(name, constants, size)) for size in SIZES)] for name, each in COSTS.items()
    ]
    return _table(head, rows)


def _unit(name: str) -> str:
    """Return the unit of a constant, by its name."""
    if name.endswith("_s"):
        return "s per MB" if "_mb_" in name else "s"
    return next((unit for word, unit in (("_mb", "MB"), ("_kb", "kB"), ("_bytes", "bytes")) if word in name), "count")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(line)} |" for line in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines])


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

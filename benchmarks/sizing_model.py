"""The cost of a launch of any size, computed from measurements of small launches, and the limits by size.

Only formulae and constants: `sizing_probes` measures, and `sizing_page` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

__all__ = [
    "COSTS",
    "CURES",
    "LIMITS",
    "PER_NODE",
    "SIZES",
    "Constants",
    "Cost",
    "Limit",
    "constants_of",
    "cost",
    "fit",
    "most_ranks",
]

PER_NODE = 8
SIZES = (10, 100, 1_000, 10_000)
_MOST = 10_000_000
_MINUTE, _CHOSEN = 60, "a minute of one processor (chosen)"


class Constants(NamedTuple):
    """Measured constants. Seconds are of one processor, megabytes are 10^6 bytes."""

    import_s: float
    import_files: float
    import_touched_mb: float
    import_whole_mb: float
    fork_s: float
    rank_s: float
    rank_own_mb: float
    watch_rank_s: float
    watch_pair_s: float
    watch_files_a_rank: float
    watch_files_a_node: float
    watch_kb_a_rank: float
    output_line_s: float
    result_mb_s: float
    store_line_s: float
    store_files_a_line: float
    store_question_s: float
    store_mb_s: float
    gloo_store_pair_s: float
    gloo_key_bytes: float
    gloo_key_bytes_a_rank: float
    gloo_rank_s: float
    gloo_pair_s: float
    gloo_files: float
    lazy_store_rank_s: float
    lazy_rank_s: float
    lazy_files: float


class Cost(NamedTuple):
    """One cost of a launch on N ranks: its formula as text and as code."""

    what: str
    unit: str
    formula: str
    of: Callable[[Constants, int], float]


class Limit(NamedTuple):
    """The largest acceptable value of a cost, the consequence of a larger one, and its cures (keys of `CURES`)."""

    cost: str
    value: float
    whose: str
    beyond: str
    cures: tuple[str, ...]
    ends: bool = False  # True if the launch fails; otherwise it is slow


def constants_of(rows: Iterable[Mapping[str, object]]) -> Constants:
    """Return the constants in the rows of a results file."""
    found: dict[str, float] = {}
    for row in rows:
        extra = row["extra"]
        assert isinstance(extra, dict)
        found |= extra.get("constants", {})
    return Constants(**found)


def fit(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Fit t = a n + b n^2 to sizes n and times t by least squares of relative deviations, with b >= 0."""
    scaled = [(1 / time * size, 1 / time * size * size) for size, time in points]
    xx, xy, yy = (sum(x * x for x, _ in scaled), sum(x * y for x, y in scaled), sum(y * y for _, y in scaled))
    x1, y1 = sum(x for x, _ in scaled), sum(y for _, y in scaled)
    determinant = xx * yy - xy * xy
    if math.isclose(determinant, 0, abs_tol=1e-12 * xx * yy):
        return x1 / xx, 0.0
    a, b = (x1 * yy - y1 * xy) / determinant, (xx * y1 - xy * x1) / determinant
    return (a, b) if b >= 0 else (x1 / xx, 0.0)


def _nodes(ranks: int) -> int:
    return math.ceil(ranks / PER_NODE)


def _store_mb(constants: Constants, ranks: int) -> float:
    """Return the megabytes of addresses: every rank reads every other's, and they grow with the world."""
    return ranks**2 * (constants.gloo_key_bytes + constants.gloo_key_bytes_a_rank * ranks) / 1e6


def _gloo_store_s(constants: Constants, ranks: int) -> float:
    return ranks**2 * constants.gloo_store_pair_s + _store_mb(constants, ranks) * constants.store_mb_s


COSTS = {
    "files": Cost(
        "files opened on the shared file system", "", "nodes x import_files", lambda c, n: _nodes(n) * c.import_files
    ),
    "touched": Cost(
        "read from it, if only what is touched is read", "GB", "nodes x import_touched_mb",
        lambda c, n: _nodes(n) * c.import_touched_mb / 1e3,
    ),
    "whole": Cost(
        "read from it, if whole files are read", "GB", "nodes x import_whole_mb",
        lambda c, n: _nodes(n) * c.import_whole_mb / 1e3,
    ),
    "node": Cost(
        "a node's start, its files being there", "s", f"2 import_s + {PER_NODE} fork_s + rank_s",
        lambda c, _: 2 * c.import_s + PER_NODE * c.fork_s + c.rank_s,
    ),
    "watch": Cost(
        "processor of the side that watches, start to end", "s", "N watch_rank_s + N^2 watch_pair_s",
        lambda c, n: n * c.watch_rank_s + n**2 * c.watch_pair_s,
    ),
    "head_files": Cost(
        "open files of the side that watches, on Ray", "",
        "N (watch_files_a_rank + store_files_a_line) + nodes x watch_files_a_node",
        lambda c, n: n * (c.watch_files_a_rank + c.store_files_a_line) + _nodes(n) * c.watch_files_a_node,
    ),
    "head_memory": Cost(
        "memory of the side that watches, without results", "MB", "N watch_kb_a_rank",
        lambda c, n: n * c.watch_kb_a_rank / 1e3,
    ),
    "output": Cost(
        "processor there, if each rank writes a line a second", "s/s", "N output_line_s", lambda c, n: n * c.output_line_s
    ),
    "results": Cost(
        "processor there, if each rank returns 1 MB, on Ray", "s", "N result_mb_s", lambda c, n: n * c.result_mb_s
    ),
    "lines": Cost("the store: lines to it", "s", "N store_line_s", lambda c, n: n * c.store_line_s),
    "gloo_mb": Cost(
        "the store: addresses that gloo reads", "GB", "N^2 (gloo_key_bytes + N gloo_key_bytes_a_rank)",
        lambda c, n: _store_mb(c, n) / 1e3,
    ),
    "gloo_store": Cost(
        "the store: processor for gloo", "s", "N^2 gloo_store_pair_s + the addresses' MB x store_mb_s", _gloo_store_s
    ),
    "gloo_rank": Cost(
        "gloo, in each rank", "s", "gloo_rank_s + N gloo_pair_s", lambda c, n: c.gloo_rank_s + n * c.gloo_pair_s
    ),
    "gloo_files": Cost("open files of each rank", "", "N + gloo_files", lambda c, n: n + c.gloo_files),
    "lazy_store": Cost(
        "with TORCH_GLOO_LAZY_INIT=1, the store: processor for gloo", "s", "N lazy_store_rank_s",
        lambda c, n: n * c.lazy_store_rank_s,
    ),
    "groups": Cost(
        "the store: processor for ipc_groups of 8 ranks each", "s", "3 N (N / 8) store_question_s",
        lambda c, n: 3 * n * _nodes(n) * c.store_question_s,
    ),
    "results_memory": Cost(
        "memory of the side that watches, if each rank returns 1 MB, on Ray", "GB", "N x 1 MB", lambda _, n: n / 1e3
    ),
    "exchange": Cost(
        "inside torchrun, the store: processor for the results of one call", "s", "4 N^2 store_question_s",
        lambda c, n: 4 * n**2 * c.store_question_s,
    ),
}  # fmt: skip

CURES = {
    "files": "`ulimit -n 65536` in Ray's driver, and, on Slurm, where the job is submitted: it takes limits along",
    "lazy": "TORCH_GLOO_LAZY_INIT=1 in the environment of the ranks: gloo then connects only those that talk to each other",
    "nccl": 'on GPUs `backend="nccl"`, where no collective has CPU tensors: no gloo group is made then',
    "image": "Python and torch on the nodes' own disks, or in a container image that a node fetches as one file",
    "groups": "groups that the function makes itself, by `new_group(..., use_local_synchronization=True)`",
    "slurm": 'a launch by `launcher="slurm"` instead of one inside torchrun or srun: its ranks send results to one place',
    "several": "several launches of a smaller size",
    "quiet": "output of rank 0 alone, or a file for each rank that it opens itself",
    "numbers": "results that are numbers; tensors saved by the ranks",
}

LIMITS = (
    Limit(
        "head_files", 1024, "`ulimit -n`, as many systems set it",
        "no file can be opened for a rank's result: when the ranks return, the launch ends in an error",
        ("files",), ends=True,
    ),
    Limit(
        "gloo_files", 1024, "`ulimit -n`, in each rank", "gloo cannot connect every rank to every other",
        ("lazy", "files"), ends=True,
    ),
    Limit(
        "gloo_store", _MINUTE, _CHOSEN, "ranks wait that long before their function begins", ("lazy", "nccl"),
    ),
    Limit(
        "groups", _MINUTE, _CHOSEN, "ranks wait that long before their function begins", ("groups",),
    ),
    Limit(
        "touched", 300, "nodes have 300 s to call, at 1 GB/s (assumed)",
        "nodes that still import torch are given up, and no rank begins", ("image",), ends=True,
    ),
    Limit(
        "whole", 300, "nodes have 300 s to call, at 1 GB/s (assumed)",
        "nodes that still import torch are given up, and no rank begins", ("image",), ends=True,
    ),
    Limit("watch", _MINUTE, _CHOSEN, "to start and to end takes that long", ("several",)),
    Limit("output", 0.5, "half of one processor (chosen)", "output, and all else that is said, comes late", ("quiet",)),
    Limit("results", _MINUTE, _CHOSEN, "results take that long", ("numbers",)),
    Limit("exchange", _MINUTE, _CHOSEN, "each call takes that long to return", ("slurm",)),
)  # fmt: skip


def cost(name: str, constants: Constants, ranks: int) -> float:
    """Return a cost of a launch on `ranks` ranks, in its unit."""
    return COSTS[name].of(constants, ranks)


def most_ranks(limit: Limit, constants: Constants) -> int:
    """Return the largest number of ranks within a limit. Costs grow with ranks."""
    low, high = 0, _MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cost(limit.cost, constants, middle) <= limit.value else (low, middle - 1)
    return low

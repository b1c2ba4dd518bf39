"""The cost of a launch of any size and the largest size within each limit, computed from measurements of small launches.

This module has only formulae and limits: `sizing_probes` measures, and `sizing_page` writes the page.
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
    """Measured constants. Seconds are processor time, and a megabyte is 10^6 bytes."""

    import_s: float
    import_files: float
    import_touched_mb: float
    import_whole_mb: float
    fork_s: float
    rank_s: float
    rank_own_mb: float
    watch_rank_s: float
    watch_pair_s: float
    watch_files_per_rank: float
    watch_files_per_node: float
    watch_kb_per_rank: float
    output_line_s: float
    result_mb_s: float
    store_connection_s: float
    store_files_per_connection: float
    store_request_s: float
    store_mb_s: float
    gloo_store_pair_s: float
    gloo_key_bytes: float
    gloo_key_bytes_per_rank: float
    gloo_rank_s: float
    gloo_pair_s: float
    gloo_files: float
    lazy_store_rank_s: float
    lazy_rank_s: float
    lazy_files: float


class Cost(NamedTuple):
    """One cost of a launch on N ranks, with its formula as text and as code."""

    label: str
    unit: str
    formula: str
    of: Callable[[Constants, int], float]


class Limit(NamedTuple):
    """The largest acceptable value of a cost, the effect of a larger value, and its cures (keys of `CURES`)."""

    cost: str
    value: float
    reason: str
    effect: str
    cures: tuple[str, ...]
    fatal: bool = False  # True if the launch fails beyond the limit; otherwise it is slow


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
    """Return the megabytes of addresses. Every rank reads every other's, and each grows with the number of ranks."""
    return ranks**2 * (constants.gloo_key_bytes + constants.gloo_key_bytes_per_rank * ranks) / 1e6


def _gloo_store_s(constants: Constants, ranks: int) -> float:
    return ranks**2 * constants.gloo_store_pair_s + _store_mb(constants, ranks) * constants.store_mb_s


COSTS = {
    "files": Cost(
        "shared file system: files opened", "count", "nodes x import_files", lambda c, n: _nodes(n) * c.import_files
    ),
    "touched": Cost(
        "shared file system: data read, touched pages only", "GB", "nodes x import_touched_mb",
        lambda c, n: _nodes(n) * c.import_touched_mb / 1e3,
    ),
    "whole": Cost(
        "shared file system: data read, whole files", "GB", "nodes x import_whole_mb",
        lambda c, n: _nodes(n) * c.import_whole_mb / 1e3,
    ),
    "node": Cost(
        "node: start, with its files cached", "s", f"2 import_s + {PER_NODE} fork_s + rank_s",
        lambda c, _: 2 * c.import_s + PER_NODE * c.fork_s + c.rank_s,
    ),
    "watch": Cost(
        "watching process: processor time, start to end", "s", "N watch_rank_s + N^2 watch_pair_s",
        lambda c, n: n * c.watch_rank_s + n**2 * c.watch_pair_s,
    ),
    "head_files": Cost(
        "watching process: open files, on Ray", "count",
        "N (watch_files_per_rank + store_files_per_connection) + nodes x watch_files_per_node",
        lambda c, n: n * (c.watch_files_per_rank + c.store_files_per_connection) + _nodes(n) * c.watch_files_per_node,
    ),
    "head_memory": Cost(
        "watching process: memory without results", "MB", "N watch_kb_per_rank",
        lambda c, n: n * c.watch_kb_per_rank / 1e3,
    ),
    "output": Cost(
        "watching process: processor time per second, if each rank writes a line per second", "s/s", "N output_line_s",
        lambda c, n: n * c.output_line_s,
    ),
    "results": Cost(
        "watching process: processor time, if each rank returns 1 MB, on Ray", "s", "N result_mb_s",
        lambda c, n: n * c.result_mb_s,
    ),
    "lines": Cost(
        "store: processor time for connections", "s", "N store_connection_s",
        lambda c, n: n * c.store_connection_s,
    ),
    "gloo_mb": Cost(
        "store: addresses that gloo reads", "GB", "N^2 (gloo_key_bytes + N gloo_key_bytes_per_rank)",
        lambda c, n: _store_mb(c, n) / 1e3,
    ),
    "gloo_store": Cost(
        "store: processor time for gloo", "s", "N^2 gloo_store_pair_s + the addresses' MB x store_mb_s", _gloo_store_s
    ),
    "gloo_rank": Cost(
        "rank: processor time for gloo", "s", "gloo_rank_s + N gloo_pair_s", lambda c, n: c.gloo_rank_s + n * c.gloo_pair_s
    ),
    "gloo_files": Cost("rank: open files", "count", "N + gloo_files", lambda c, n: n + c.gloo_files),
    "lazy_store": Cost(
        "store: processor time for gloo, with TORCH_GLOO_LAZY_INIT=1", "s", "N lazy_store_rank_s",
        lambda c, n: n * c.lazy_store_rank_s,
    ),
    "groups": Cost(
        "store: processor time for ipc_groups of 8 ranks each", "s", "3 N (N / 8) store_request_s",
        lambda c, n: 3 * n * _nodes(n) * c.store_request_s,
    ),
    "results_memory": Cost(
        "watching process: memory, if each rank returns 1 MB, on Ray", "GB", "N x 1 MB", lambda _, n: n / 1e3
    ),
    "exchange": Cost(
        "store: processor time for the results of one call, inside torchrun", "s", "4 N^2 store_request_s",
        lambda c, n: 4 * n**2 * c.store_request_s,
    ),
}  # fmt: skip

CURES = {
    "files": "Run `ulimit -n 65536` before Ray's driver starts. On Slurm, run it in the shell that submits the job",
    "lazy": "Set TORCH_GLOO_LAZY_INIT=1 in the environment of the ranks: gloo connects only ranks that exchange messages",
    "nccl": 'On GPUs, use `backend="nccl"` if no collective has CPU tensors: torch then creates no gloo group',
    "image": "Install Python and torch on the disks of the nodes, or in a container image that a node fetches as one file",
    "groups": "Create groups in the function, with `new_group(..., use_local_synchronization=True)`",
    "slurm": 'Launch with `launcher="slurm"`, not inside torchrun or srun: its ranks send their results to one process',
    "several": "Use several smaller launches",
    "quiet": "Write output in rank 0 only, or write to one file per rank",
    "numbers": "Return numbers, and save tensors in the ranks",
}

LIMITS = (
    Limit(
        "head_files", 1024, "`ulimit -n` on many systems",
        "The watching process cannot open a file per result. The launch fails when the ranks return.",
        ("files",), fatal=True,
    ),
    Limit(
        "gloo_files", 1024, "`ulimit -n` on many systems, per rank",
        "gloo cannot connect every rank to every other. The launch fails.",
        ("lazy", "files"), fatal=True,
    ),
    Limit(
        "gloo_store", _MINUTE, _CHOSEN, "The ranks wait before their function begins.", ("lazy", "nccl"),
    ),
    Limit(
        "groups", _MINUTE, _CHOSEN, "The ranks wait before their function begins.", ("groups",),
    ),
    Limit(
        "touched", 300, "A node must connect within 300 s; 1 GB/s is assumed.",
        "The launch gives up nodes that still import torch, and no rank starts.", ("image",), fatal=True,
    ),
    Limit(
        "whole", 300, "A node must connect within 300 s; 1 GB/s is assumed.",
        "The launch gives up nodes that still import torch, and no rank starts.", ("image",), fatal=True,
    ),
    Limit("watch", _MINUTE, _CHOSEN, "The launch starts and ends slowly.", ("several",)),
    Limit("output", 0.5, "half of one processor (chosen)", "Output and all other messages arrive late.", ("quiet",)),
    Limit("results", _MINUTE, _CHOSEN, "The results arrive late.", ("numbers",)),
    Limit("exchange", _MINUTE, _CHOSEN, "Each call returns late.", ("slurm",)),
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

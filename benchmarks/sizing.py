"""The constants of the cost of a launch. docs/launch_sizing.md computes the cost of other sizes from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks._measure import Arm, Result, Row, arm_of
from benchmarks.sizing_model import fit
from benchmarks.sizing_probes import Report, found

__all__ = ["rows"]


def rows() -> list[Row]:
    """Measure imports, ranks, the process that watches them, the store, and gloo's two ways to connect ranks."""
    watching, meeting = found("watching"), found("meeting")
    return [
        imports(found("imports")),
        *ranks(found("ranks")),
        watch(watching),
        words(watching),
        store(meeting),
        gloo(meeting["full"]),
        lazy_gloo(meeting["lazy"]),
    ]


def imports(report: Report) -> Row:
    """Return the files and the processor time of a node's imports."""
    constants = {f"import_{word}": report[word] for word in ("files", "touched_mb", "whole_mb")}
    return _row(
        "imports of a node's Python",
        {"processor time": _arm(report["cpu_s"])},
        [
            Result("files read", report["files"], "count"),
            Result("pages read", report["touched_mb"], "MB"),
            Result("size of the files", report["whole_mb"], "MB"),
        ],
        constants | {"import_s": statistics.median(report["cpu_s"])},
    )


def ranks(report: Report) -> list[Row]:
    """Return the cost of a forked rank and of a rank in a fresh interpreter."""
    own_mb = statistics.median(report["forkserver_own_mb"])
    constants = {
        "fork_s": statistics.median(report["fork_s"]),
        "rank_s": statistics.median(report["forkserver_cpu_s"]),
        "rank_own_mb": own_mb,
    }
    arms = {"fork": _arm(report["fork_s"]), "processor time until its function begins": _arm(report["forkserver_cpu_s"])}
    fresh = {"processor time until its function begins": _arm(report["spawn_cpu_s"])}
    return [
        _row("a rank forked from a warm process", arms, _memory(report, "forkserver"), constants),
        _row("a rank in a fresh interpreter", fresh, _memory(report, "spawn"), {}),
    ]


def _memory(report: Report, method: str) -> list[Result]:
    own, proportional, resident = (statistics.median(report[f"{method}_{word}_mb"]) for word in ("own", "pss", "rss"))
    return [
        Result("private memory (USS)", own, "MB"),
        Result("proportional set size (PSS), 4 ranks", proportional, "MB"),
        Result("resident memory (RSS)", resident, "MB"),
    ]


def watch(report: Report) -> Row:
    """Return the cost of watching from the start of the first rank to the end of the last rank."""
    runs = report["runs"]
    a, b = fit([(run["n_ranks"], run["watch_s"]) for run in runs])
    largest = [run for run in runs if run["n_ranks"] == runs[-1]["n_ranks"]]
    constants = {"watch_rank_s": a, "watch_pair_s": b} | {
        f"watch_{name}": statistics.median(run[word] for run in largest)
        for name, word in (
            ("files_per_rank", "files_per_rank"),
            ("files_per_node", "files_per_node"),
            ("kb_per_rank", "memory_kb_per_rank"),
        )
    }
    return _row(
        "watching a launch through a store",
        _arms(runs, "watch_s"),
        [
            Result("processor time, per rank", 1e6 * a, "us"),
            Result("processor time, per pair of ranks", 1e6 * b, "us"),
            Result("open files, per rank", constants["watch_files_per_rank"], "count"),
            Result("open files, per node", constants["watch_files_per_node"], "count"),
        ],
        constants,
    )


def words(report: Report) -> Row:
    """Return the cost of output and results in the process that watches the ranks."""
    put = [taken + kept for taken, kept in zip(report["mb_s"], report["mb_put_s"], strict=True)]
    line, megabyte = statistics.median(report["line_s"]), statistics.median(put)
    return _row(
        "receiving output and results of ranks",
        {
            "processor time, a line of 80 bytes": _arm(report["line_s"]),
            "processor time, 1 MB of a result, written to its file": _arm(put),
        },
        [],
        {"output_line_s": line, "result_mb_s": megabyte},
    )


def store(report: Report) -> Row:
    """Return the cost of the launch's store, which has one thread."""
    constants = {
        "store_connection_s": report["connection_s"],
        "store_files_per_connection": round(report["files_per_connection"]),
        "store_request_s": statistics.median(report["busy_request_s"]),
        "store_mb_s": statistics.median(report["mb_s"]),
    }
    return _row(
        "the store",
        {
            "processor time, a request, one client": _arm(report["request_s"]),
            "processor time, a request, eight clients": _arm(report["busy_request_s"]),
            "processor time, 1 MB of answers": _arm(report["mb_s"]),
        },
        [
            Result("rate, eight clients", statistics.median(report["requests_per_second"]), "requests per second"),
            Result("processor time, per connection", 1e6 * report["connection_s"], "us"),
            Result("memory, per connection", 1e3 * report["connection_kb"], "bytes"),
        ],
        constants,
    )


def gloo(runs: Sequence[Report]) -> Row:
    """Return the cost of a group that connects every rank to every other."""
    small, large = runs[0], runs[-1]
    sizes = [each["bytes"] / each["keys"] for each in (small, large)]
    per_rank = (sizes[1] - sizes[0]) / (large["n_ranks"] - small["n_ranks"])
    rank_s, pair_s = fit([(run["n_ranks"], run["cpu_s"]) for run in runs])
    constants = {
        "gloo_key_bytes": sizes[0] - per_rank * small["n_ranks"],
        "gloo_key_bytes_per_rank": per_rank,
        "gloo_store_pair_s": fit([(run["n_ranks"], run["store_s"]) for run in runs])[1],
        "gloo_rank_s": rank_s,
        "gloo_pair_s": pair_s,
        "gloo_files": large["files_per_rank"] - large["n_ranks"],
    }
    return _row(
        "gloo: connections between all ranks, and one all_reduce (ranks are threads)",
        _arms(runs, "cpu_s") | _arms(runs, "store_s", "processor time of the store"),
        [
            Result("processor time, per rank", 1e6 * rank_s, "us"),
            Result("processor time, per pair of ranks", 1e6 * pair_s, "us"),
            Result(f"addresses read by a rank, per other rank, {large['n_ranks']} ranks", sizes[1], "bytes"),
            Result(f"open files of a rank, {large['n_ranks']} ranks", large["files_per_rank"], "count"),
        ],
        constants,
    )


def lazy_gloo(runs: Sequence[Report]) -> Row:
    """Return the cost of a group that connects two ranks at their first message."""
    largest = [run for run in runs if run["n_ranks"] == runs[-1]["n_ranks"]]
    constants = {
        f"lazy_{name}": statistics.median(run[word] / run["n_ranks"] for run in largest)
        for name, word in (("store_rank_s", "store_s"), ("rank_s", "cpu_s"))
    }
    files = largest[0]["files_per_rank"]
    return _row(
        "gloo with TORCH_GLOO_LAZY_INIT=1: one all_reduce (ranks are threads)",
        _arms(runs, "cpu_s") | _arms(runs, "store_s", "processor time of the store"),
        [
            Result("processor time, per rank", 1e6 * constants["lazy_rank_s"], "us"),
            Result("open files of a rank", files, "count"),
        ],
        constants | {"lazy_files": files},
    )


def _row(name: str, arms: dict[str, Arm], results: Sequence[Result], constants: dict[str, Any]) -> Row:
    return Row(name, arms, results, extra={"constants": constants})


def _arm(seconds: Sequence[float]) -> Arm:
    return arm_of([1e6 * each for each in seconds])


def _arms(runs: Sequence[Report], word: str, measured: str = "processor time") -> dict[str, Arm]:
    sizes = sorted({run["n_ranks"] for run in runs})
    return {f"{measured}, {size:,} ranks": _arm([run[word] for run in runs if run["n_ranks"] == size]) for size in sizes}

"""The constants of a launch's cost. docs/launch_sizing.md computes the cost of other sizes from them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks._measure import Arm, Row, arm_of
from benchmarks.sizing_model import fit
from benchmarks.sizing_probes import Report, found

__all__ = ["rows"]

_REPORTED = "reported"


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
        "what a node's Python imports",
        {"processor time": _arm(report["cpu_s"])},
        f"{report['files']:.0f} files: {report['touched_mb']:.0f} MB touched, of {report['whole_mb']:.0f} MB",
        constants | {"import_s": statistics.median(report["cpu_s"])},
    )


def ranks(report: Report) -> list[Row]:
    """Return the cost of a forked rank and of a rank in a fresh interpreter."""
    own = {method: statistics.median(report[f"{method}_own_mb"]) for method in ("forkserver", "spawn")}
    told = {
        method: f"{own[method]:.1f} MB private, {statistics.median(report[f'{method}_pss_mb']):.0f} MB with its share "
        f"of what 4 such ranks have in common, {statistics.median(report[f'{method}_rss_mb']):.0f} MB with all of that"
        for method in own
    }
    constants = {
        "fork_s": statistics.median(report["fork_s"]),
        "rank_s": statistics.median(report["forkserver_cpu_s"]),
        "rank_own_mb": own["forkserver"],
    }
    arms = {"fork": _arm(report["fork_s"]), "processor time until its function begins": _arm(report["forkserver_cpu_s"])}
    fresh = {"processor time until its function begins": _arm(report["spawn_cpu_s"])}
    return [
        _row("a rank forked from a warm process", arms, told["forkserver"], constants),
        _row("a rank that is a fresh interpreter", fresh, told["spawn"], {}),
    ]


def watch(report: Report) -> Row:
    """Return the cost of watching, from the first rank's start to the last rank's end."""
    runs = report["runs"]
    a, b = fit([(run["n_ranks"], run["watch_s"]) for run in runs])
    largest = [run for run in runs if run["n_ranks"] == runs[-1]["n_ranks"]]
    constants = {"watch_rank_s": a, "watch_pair_s": b} | {
        f"watch_{name}": statistics.median(run[word] for run in largest)
        for name, word in (
            ("files_a_rank", "files_a_rank"), ("files_a_node", "files_a_node"), ("kb_a_rank", "memory_kb_a_rank"),
        )
    }  # fmt: skip
    return _row(
        "processor time to watch a launch over one connection per node",
        _arms(runs, "watch_s"),
        f"{_us(a)} per rank and {_us(b)} per pair of ranks; an open file for each rank's result, and one for each node",
        constants,
    )


def words(report: Report) -> Row:
    """Return the cost of the ranks' output and results in the process that watches."""
    put = [taken + kept for taken, kept in zip(report["mb_s"], report["mb_put_s"], strict=True)]
    line, megabyte = statistics.median(report["line_s"]), statistics.median(put)
    return _row(
        "processor time to take what ranks write and return",
        {"a line of 80 bytes": _arm(report["line_s"]), "a MB of a result, into its file": _arm(put)},
        f"{_us(line)} per line, {_us(megabyte)} per MB",
        {"output_line_s": line, "result_mb_s": megabyte},
    )


def store(report: Report) -> Row:
    """Return the cost of the launch's store, which has one thread."""
    constants = {
        "store_line_s": report["line_s"],
        "store_files_a_line": round(report["files_a_line"]),
        "store_question_s": statistics.median(report["busy_question_s"]),
        "store_mb_s": statistics.median(report["mb_s"]),
    }
    return _row(
        "processor time of the store",
        {
            "a question, of one client": _arm(report["question_s"]),
            "a question, of eight at once": _arm(report["busy_question_s"]),
            "a MB of answers": _arm(report["mb_s"]),
        },
        f"{statistics.median(report['questions_a_second']):,.0f} questions a second of eight; {_us(report['line_s'])} and "
        f"{report['line_kb']:.1f} kB for a rank's line to it",
        constants,
    )


def gloo(runs: Sequence[Report]) -> Row:
    """Return the cost of a group that connects every rank to every other."""
    small, large = runs[0], runs[-1]
    sizes = [each["bytes"] / each["keys"] for each in (small, large)]
    a_rank = (sizes[1] - sizes[0]) / (large["n_ranks"] - small["n_ranks"])
    rank_s, pair_s = fit([(run["n_ranks"], run["cpu_s"]) for run in runs])
    constants = {
        "gloo_key_bytes": sizes[0] - a_rank * small["n_ranks"],
        "gloo_key_bytes_a_rank": a_rank,
        "gloo_store_pair_s": fit([(run["n_ranks"], run["store_s"]) for run in runs])[1],
        "gloo_rank_s": rank_s,
        "gloo_pair_s": pair_s,
        "gloo_files": large["files_a_rank"] - large["n_ranks"],
    }
    return _row(
        "gloo, its ranks threads: to connect all with all, and a first all_reduce",
        _arms(runs, "cpu_s") | {f"the store, {name}": arm for name, arm in _arms(runs, "store_s").items()},
        f"{_us(rank_s)} per rank and {_us(pair_s)} per pair; each rank reads {sizes[1]:,.0f} bytes of each of "
        f"{large['n_ranks']}, and has {large['files_a_rank']:.0f} files open",
        constants,
    )


def lazy_gloo(runs: Sequence[Report]) -> Row:
    """Return the cost of a group that connects two ranks at their first message."""
    largest = [run for run in runs if run["n_ranks"] == runs[-1]["n_ranks"]]
    constants = {
        f"lazy_{name}": statistics.median(run[word] / run["n_ranks"] for run in largest)
        for name, word in (("store_rank_s", "store_s"), ("rank_s", "cpu_s"))
    }
    files = largest[0]["files_a_rank"]
    return _row(
        "the same with TORCH_GLOO_LAZY_INIT=1",
        _arms(runs, "cpu_s") | {f"the store, {name}": arm for name, arm in _arms(runs, "store_s").items()},
        f"{_us(constants['lazy_rank_s'])} per rank at every size; {files:.0f} open files",
        constants | {"lazy_files": files},
    )


def _row(name: str, arms: dict[str, Arm], verdict: str, constants: dict[str, Any]) -> Row:
    return Row(name, arms, verdict, _REPORTED, held=True, extra={"constants": constants})


def _arm(seconds: Sequence[float]) -> Arm:
    return arm_of([1e6 * each for each in seconds])


def _arms(runs: Sequence[Report], word: str) -> dict[str, Arm]:
    sizes = sorted({run["n_ranks"] for run in runs})
    return {f"{size:,} ranks": _arm([run[word] for run in runs if run["n_ranks"] == size]) for size in sizes}


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f} us" if seconds < 1e-4 else f"{1e3 * seconds:,.2f} ms"

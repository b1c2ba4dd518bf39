"""The page on the cost of a launch: its formulae, limits, and constants. No test depends on a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import sizing, sizing_page, sizing_probes
from benchmarks.sizing_model import COSTS, CURES, LIMITS, Constants, Limit, constants_of, cost, fit, most_ranks

ONES = Constants(*[1.0] * len(Constants._fields))


def report_of_meshes(kind):
    """Return runs of 2 ms per rank, plus 1 ms per pair if all ranks are connected."""
    full = kind == "full"
    return [
        {
            "n_ranks": n,
            "cpu_s": 0.002 * n + full * 0.001 * n**2,
            "store_s": 0.002 * n + full * 0.001 * n**2,
            "files_per_rank": n + 3 if full else 6,
            "keys": n,
            "bytes": n * (154 + 8 * n),
        }
        for n in (8, 16)
    ]


@pytest.mark.parametrize(
    ("name", "ranks", "expected"),
    [
        ("files", 10, 2 * 1232.0),
        ("touched", 10_000, 1250 * 0.1),
        ("node", 10_000, 2 * 1.5 + 8 * 0.25 + 0.5),
        ("watch", 100, 100 * 2.0 + 100**2 * 0.5),
        ("head_files", 17, 17 * (1 + 1) + 3 * 1),
        ("gloo_mb", 1000, 1000**2 * (154 + 8 * 1000) / 1e9),
        ("gloo_store", 1000, 1000**2 * 0.25 + 1000**2 * (154 + 8 * 1000) / 1e6 * 4),
        ("gloo_rank", 10, 3.0 + 10 * 5.0),
        ("gloo_files", 10, 13),
        ("groups", 80, 3 * 80 * 10 * 0.125),
        ("exchange", 10, 4 * 100 * 0.125),
    ],
)
def test_costs_follow_their_formulae(name, ranks, expected):
    """The number of nodes is rounded up. Work between all pairs of ranks grows with the square of their number."""
    constants = ONES._replace(
        import_files=1232, import_touched_mb=100, import_s=1.5, fork_s=0.25, rank_s=0.5, watch_rank_s=2, watch_pair_s=0.5,
        gloo_key_bytes=154, gloo_key_bytes_per_rank=8, gloo_store_pair_s=0.25, store_mb_s=4, gloo_rank_s=3, gloo_pair_s=5,
        gloo_files=3, store_request_s=0.125,
    )  # fmt: skip
    assert cost(name, constants, ranks) == pytest.approx(expected)


@pytest.mark.parametrize("name", COSTS)
def test_a_cost_never_falls_as_ranks_are_added(name):
    """Each limit therefore has a largest number of ranks."""
    costs = [cost(name, ONES, ranks) for ranks in (1, 8, 9, 10, 100, 1_000, 10_000)]
    assert costs == sorted(costs)


def test_the_most_ranks_reach_the_limit_exactly():
    """The limit itself is allowed; one more rank is too many."""
    limit = Limit("gloo_files", 1024, "", "", ())
    assert most_ranks(limit, ONES._replace(gloo_files=3)) == 1021
    assert most_ranks(limit, ONES._replace(gloo_files=2000)) == 0


def test_every_limit_has_a_cost_and_a_cure():
    """Each cure belongs to a limit."""
    assert {limit.cost for limit in LIMITS} <= set(COSTS)
    assert {cure for limit in LIMITS for cure in limit.cures} == set(CURES)
    assert all(limit.cures for limit in LIMITS)


def test_a_fit_finds_the_linear_and_the_quadratic_part():
    """Exact data give exact parts. The quadratic part is never negative."""
    assert fit([(n, 3 * n + 0.5 * n**2) for n in (8, 64, 512)]) == pytest.approx((3, 0.5))
    assert fit([(n, 3 * n) for n in (8, 64, 512)]) == pytest.approx((3, 0), abs=1e-9)
    assert fit([(8, 8.0), (64, 60.0)])[1] == 0
    assert fit([(8, 24.0)]) == (3, 0)


def test_rows_have_the_constants_of_the_probes():
    """The rows have all constants of the page, in its units."""
    held = {"files_per_rank": 1, "files_per_node": 1, "memory_kb_per_rank": 0.5}
    words = ("cpu_s", "rss_mb", "pss_mb", "own_mb")
    watching = {
        "runs": [{"n_ranks": n, "watch_s": 2e-4 * n} | held for n in (8, 16)],
        "line_s": [1e-5],
        "mb_s": [1e-3],
        "mb_put_s": [2e-3],
    }
    store = {
        "connection_s": 1e-4,
        "connection_kb": 1.5,
        "files_per_connection": 0.99,
        "request_s": [5e-5],
        "busy_request_s": [4e-5],
        "mb_s": [2e-4],
    }
    found = [
        sizing.imports({"cpu_s": [1.0, 3.0, 2.0], "files": 10, "touched_mb": 1.0, "whole_mb": 2.0}),
        *sizing.ranks(
            {"fork_s": [0.003]} | {f"{method}_{word}": [4.0] for method in ("forkserver", "spawn") for word in words}
        ),
        sizing.watch(watching),
        sizing.words(watching),
        sizing.store(store | {"requests_per_second": [20_000]}),
        sizing.gloo(report_of_meshes("full")),
        sizing.lazy_gloo(report_of_meshes("lazy")),
    ]
    constants = constants_of([row.as_json() for row in found])
    assert constants.import_s == 2.0
    assert (constants.watch_rank_s, constants.watch_pair_s) == pytest.approx((2e-4, 0), abs=1e-12)
    assert constants.result_mb_s == pytest.approx(3e-3)
    assert constants.store_request_s == pytest.approx(4e-5)
    assert constants.store_files_per_connection == 1
    assert (constants.gloo_key_bytes, constants.gloo_key_bytes_per_rank) == (154, 8)
    assert (constants.gloo_store_pair_s, constants.gloo_pair_s) == pytest.approx((1e-3, 1e-3))
    assert (constants.gloo_files, constants.lazy_files) == (3, 6)
    assert constants.lazy_store_rank_s == pytest.approx(2e-3)


def test_the_page_matches_the_results():
    """`python -m benchmarks.sizing_page` updates the page."""
    assert sizing_page.PAGE.read_text() == sizing_page.page(json.loads(sizing_page.RESULTS.read_text()))


def test_the_page_lists_the_smallest_limit_first():
    """Its row names the cost and the consequence."""
    document = json.loads(sizing_page.RESULTS.read_text())
    text = sizing_page.page(document)
    constants = constants_of(document["rows"])
    first = min(LIMITS, key=lambda limit: most_ranks(limit, constants))
    row = text.split("|---|", 1)[1].splitlines()[1]
    assert COSTS[first.cost].label in row
    assert first.effect in row


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the probes read /proc, which is Linux's")
def test_a_probe_counts_every_rank_of_a_small_launch():
    """A launch on two nodes runs to its end, with two connections per rank."""
    code = "import json; from benchmarks.sizing_probes import coordinate; print(json.dumps(coordinate(16)))"
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    report = json.loads(
        subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=sizing_page.PAGE.parent.parent).stdout
    )
    assert report["n_ranks"] == 16
    assert report["files_per_rank"] >= 2
    assert report["watch_s"] > 0


def test_a_failing_probe_raises():
    """The error has the name and the exit code of the probe."""
    with pytest.raises(RuntimeError, match="the probe 'nonsense' ended with exit code 1"):
        sizing_probes.found("nonsense")

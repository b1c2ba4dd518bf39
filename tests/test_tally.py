"""The tally of repeated test runs."""

from tests.tally import failures, table

LOG = """\
............F.E
=========================== short test summary info ============================
FAILED tests/core/test_a.py::test_one[x - y] - assert 1 == 2
ERROR tests/core/test_a.py::test_two - OSError: gone
2 failed, 12 passed in 1.00s
FAILED tests/core/test_b.py::test_three
make: *** [Makefile:36: test-core] Error 1
"""


def test_failed_tests_are_named_once():
    """Tests that failed, and tests whose fixtures failed, are in the tally with their parameters."""
    names = ["tests/core/test_a.py::test_one[x - y]", "tests/core/test_a.py::test_two", "tests/core/test_b.py::test_three"]
    assert failures(2, LOG + LOG) == names


def test_a_run_without_a_summary_has_its_end_in_the_tally():
    """A run that a timeout ended counts as failed, even if no test is named."""
    assert failures(1, "....\n~~~~ Timeout ~~~~\n") == ["not finished: ....\n~~~~ Timeout ~~~~"]
    assert failures(0, LOG) == []


def test_a_target_without_a_failed_test_is_named():
    """A process that ends itself without a summary of pytest has its targets in the tally, the innermost first."""
    log = "== 12 passed in 1.00s ==\nmake[1]: *** [Makefile:45: test-api] Killed\nmake: *** [Makefile:30: test] Error 2\n"
    assert failures(2, log) == ["test-api without a failed test: Killed", "test without a failed test: Error 2"]


def test_table_counts_runs_and_failures_per_tier():
    """A test that failed in two runs stands in one row, with its count."""
    runs = [
        {"tier": "test-core", "passed": passed, "failed": failed} for passed, failed in [(9, ["a"]), (8, ["a"]), (9, [])]
    ]
    assert table(runs).splitlines()[2:] == ["| test-core | 3 | 2 | 9 | 2 x a |"]

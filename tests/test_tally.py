"""The tally of repeated test runs."""

from tests.tally import failures, table

LOG = """\
FAILED tests/core/test_a.py::test_one[x - y] - assert 1 == 2
ERROR tests/core/test_a.py::test_two - OSError: gone
2 failed, 12 passed in 1.00s
make: *** [Makefile:36: test-core] Error 1
"""


def test_failed_tests_are_named_once():
    """With their parameters, also those whose fixtures failed. Else the targets that failed, or the end of the log."""
    assert failures(2, LOG + LOG) == ["tests/core/test_a.py::test_one[x - y]", "tests/core/test_a.py::test_two"]
    assert failures(2, LOG.splitlines()[-1]) == ["test-core without a failed test: Error 1"]
    assert failures(1, "....\n~~~~ Timeout ~~~~\n") == ["not finished: ....\n~~~~ Timeout ~~~~"]
    assert failures(0, LOG) == []


def test_table_counts_runs_and_failures():
    runs = [{"tier": "test", "passed": passed, "failed": failed} for passed, failed in [(9, ["a"]), (8, ["a"]), (9, [])]]
    assert table(runs).splitlines()[2:] == ["| test | 3 | 2 | 9 | 2 x a |"]

"""The matrix of Python and torch, and the tally of repeated test runs."""

import subprocess
from pathlib import Path

import pytest

from tests import matrix
from tests.tally import failures, table


def test_names_of_interpreters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A version stands for its newest release, with the interpreter lock unless it ends with a t."""
    found = {"3.12.9": "old", "3.12.10": "new", "3.14.0": "lock", "3.14.0t": "free"}
    monkeypatch.setattr(matrix, "pythons", lambda: found)
    names = ["3.12", "./python", "3.14", "3.14t", "3.13"]
    assert list(matrix.chosen(names, skip_missing=True)) == ["new", "./python", "lock", "free"]
    assert capsys.readouterr().out == "Python 3.13 is skipped: this machine does not have it.\n"
    with pytest.raises(SystemExit, match=r"no Python 3\.13\. It has 3\.12\.9, 3\.12\.10, 3\.14\.0, 3\.14\.0t"):
        list(matrix.chosen(names, skip_missing=False))


@pytest.mark.parametrize(
    ("script", "said", "is_green"),
    [
        ("echo 3 passed in 1s", "3 passed", True),
        ("echo 1 failed, 2 passed in 1s; exit 1", "1 failed, 2 passed", False),
        ("echo 3 passed in 1s; exit 139", "3 passed, error: exit code 139", False),
        ("exit 2", "not finished: exit code 2", False),
    ],
)
def test_only_passed_runs_are_green(tmp_path: Path, script: str, said: str, is_green: bool) -> None:
    """The exit code counts too: an interpreter may crash after the summary."""
    log = tmp_path / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(["sh", "-c", script], stdout=file)
    row = matrix.Row("3.12", "2.13", "pinned", "", matrix.outcome(process, log), "1 passed", "1", "2026-01-01")
    assert (row.examples, row.is_green) == (said, is_green)


LOG = """\
FAILED tests/core/test_a.py::test_one[x - y] - assert 1 == 2
ERROR tests/core/test_a.py::test_two - OSError: gone
2 failed, 12 passed in 1.00s
make: *** [Makefile:36: test-core] Error 1
"""


def test_failed_tests_are_named_once():
    """With their parameters, also after failed fixtures. Else the end of the log is shown."""
    assert failures(2, LOG + LOG) == ["tests/core/test_a.py::test_one[x - y]", "tests/core/test_a.py::test_two"]
    assert failures(1, "....\n~~~~ Timeout ~~~~\n") == ["not finished: ....\n~~~~ Timeout ~~~~"]
    assert failures(0, LOG) == []

    runs = [{"tier": "test", "passed": passed, "failed": failed} for passed, failed in [(9, ["a"]), (8, ["a"]), (9, [])]]
    assert table(runs).splitlines()[2:] == ["| test | 3 | 2 | 9 | 2 x a |"]

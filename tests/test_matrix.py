"""The matrix of Python and torch."""

import subprocess
from pathlib import Path

import pytest

from tests import matrix


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
    found = matrix.outcome(process, log)
    assert found == said
    for examples, tests in ((found, "1 passed"), ("1 passed", found)):
        assert matrix.Row("3.12", "2.13", "pinned", "", examples, tests, "1", "2026-01-01").is_green == is_green

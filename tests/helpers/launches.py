"""Wait for launches with ranks that report to files."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from pathlib import Path

from tests.helpers.waiting import PATIENCE_S, eventually


def results_of(launch, while_waiting=lambda: None):
    """Return the results of a launch, or raise its error.

    A launch that hangs fails with its stacks.
    """

    def ended():
        while_waiting()
        with suppress(TimeoutError):
            launch.results(timeout=0.3)
            return True
        return launch.done()

    try:
        eventually(ended, "the end of the launch", 2 * PATIENCE_S)
    except AssertionError as error:
        error.add_note(f"its stacks: {launch.stacks()}")
        raise
    return launch.results()


def wait_for_reports(folder, topic, count):
    """Wait until `count` ranks have reported on a topic; return the reports in rank order."""
    paths = [Path(folder, f"{topic}-{rank}") for rank in range(count)]
    eventually(lambda: all(path.exists() for path in paths), f"{count} reports on {topic}")
    return [path.read_text() for path in paths]


def assert_no_survivors(folder, count):
    """Wait until every process that called `scenarios.hold_lock` has ended."""

    def is_free(path):
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    paths = [Path(folder, f"life-{rank}") for rank in range(count)]
    assert all(path.exists() for path in paths)
    eventually(lambda: all(map(is_free, paths)), "the end of every rank")

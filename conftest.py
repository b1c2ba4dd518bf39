"""What every test and every example shares: nothing is left behind."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# The clusters are for more than one folder of tests.
pytest_plugins = ["tests.clusters.fixtures"]

# A simulated accelerator becomes torch's accelerator for the whole process: those tests run in a process of their own.
_ON_DEVICES = ["tests/simdevice", "tests/devices"]
collect_ignore = [] if any(folder in arg for arg in sys.argv for folder in _ON_DEVICES) else _ON_DEVICES


_PATIENCE_S = 30.0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A process that does not end soon after its last test says where every thread hangs, and fails."""

    def end() -> None:
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        os._exit(exitstatus or 1)

    guard = threading.Timer(_PATIENCE_S, end)
    guard.daemon = True
    guard.start()


def pytest_collection_finish() -> None:
    """What was loaded before the tests is not searched for garbage after each of them: that takes longer than most."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No lane outlives its test, and no test writes into the folder it was started from."""
    monkeypatch.chdir(tmp_path)
    yield
    if _lanes():
        gc.collect()  # only then: over thousands of tests it takes minutes
    assert not _lanes(), "lanes left behind"


def _lanes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("parawrap-")]

"""Hooks and fixtures for all tests and examples: no test leaves a thread or a file behind."""

from __future__ import annotations

import doctest
import faulthandler
import gc
import inspect
import os
import re
import signal
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Several folders of tests use the clusters and the browser.
pytest_plugins = ["tests.helpers.clusters", "tests.helpers.browser"]

# For each connection to a store, torch looks up the name of 127.0.0.1 as an IPv6 address, which
# /etc/hosts does not have. Where a DNS server drops queries, each lost answer would cost a rank 5
# s.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# Tests start hundreds of processes. Each of them would compile the package, which takes a third of
# its start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A simulated accelerator becomes torch's accelerator for the whole process, so its tests need a
# separate process.
_ON_DEVICES = ["tests/simdevice", "tests/devices", "tests/neuron_devices"]
collect_ignore = (
    [] if any(folder in arg for arg in sys.argv for folder in _ON_DEVICES) else _ON_DEVICES
)


_PATIENCE_S = 120.0


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail, and print the stack of each thread, if the process does not end after its last test."""

    def end() -> None:
        print(
            f"the process did not end within {_PATIENCE_S:g} s after its last test",
            file=sys.__stderr__,
        )
        faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
        sys.__stdout__.flush()  # the summary of the tests
        os._exit(exitstatus or 1)

    guard = threading.Timer(_PATIENCE_S, end)
    guard.daemon = True
    guard.start()


_GLOO = re.compile(r"^(\[rank \d+\] )?\[Gloo\] Rank .*\n", re.MULTILINE)


def pytest_configure() -> None:
    """Find the examples of public names, which report ``parawrap`` as their module.

    Let examples pass with torch before 2.11, whose ranks print a line whenever a process group
    starts. Let Ctrl-C work in tests: a shell ignores SIGINT in background jobs.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "free-threaded" in os.environ.get("PARAWRAP_TEST_REQUIRE", "").split(","):
        has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
        if has_lock:
            pytest.exit(
                "the free-threaded tier is required, and the interpreter lock is on", returncode=1
            )
    is_of = doctest.DocTestFinder._from_module  # type: ignore[attr-defined]
    doctest.DocTestFinder._from_module = lambda self, module, value: (  # type: ignore[attr-defined]
        is_of(self, module, value)
        if _home_of(value) is None
        else _home_of(value) == module.__name__
    )
    check = doctest.OutputChecker.check_output

    def check_without_gloo(
        self: doctest.OutputChecker, want: str, got: str, optionflags: int
    ) -> bool:
        return check(self, want, _GLOO.sub("", got), optionflags)

    doctest.OutputChecker.check_output = check_without_gloo  # type: ignore[method-assign]


def _home_of(value: object) -> str | None:
    """Return the name of the module that defines a public class or function.

    None for any other object.
    """
    if getattr(value, "__module__", None) != "parawrap":
        return None
    functions = vars(value).values() if isinstance(value, type) else (value,)
    return next(
        (each.__globals__["__name__"] for each in functions if inspect.isfunction(each)), None
    )


_LONG_S = 900


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give long tests a longer limit, because they may run beside others."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(_LONG_S))


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection, which takes longer than most tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Let each test and example draw the same numbers at each run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _examples_of_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the names of an example with ranks that stay globals of ``__main__``, as in a script."""
    test = getattr(request.node, "dtest", None)
    if test is not None and any(".open()" in each.source for each in test.examples):
        main = types.ModuleType("__main__")
        vars(main).update(test.globs, __name__="__main__")
        test.globs = vars(main)
        monkeypatch.setitem(sys.modules, "__main__", main)


@pytest.fixture(autouse=True)
def _nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that leaves a thread running, and run it in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    before = {*threading.enumerate()}  # of fixtures with a larger scope
    yield
    for thread in threading.enumerate():
        if (
            thread.name.startswith(("parawrap-launch", "parawrap-ranks", "parawrap-lanes"))
            and thread not in before
        ):
            # A launch, or a future, has its outcome a moment before its thread ends
            thread.join(30)
    for thread in _new_threads(before):
        gc.collect()  # only here, because a collection per test takes minutes
        # A lane's own thread may hold the last reference to its lanes, and ends shortly after the
        # test
        thread.join(5)
    assert not _new_threads(before), "threads still run after the test"


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        each
        for each in threading.enumerate()
        if each.name.startswith("parawrap-") and each not in before
    ]

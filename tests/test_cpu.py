"""`keep_freed_memory`: freed buffers stay inside the block, and return to the kernel after it."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import parawrap.cpu
from parawrap.cpu import keep_freed_memory
from tests.helpers.scripts import read_script

KEPT = 1 << 30
THRESHOLDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in THRESHOLDS}
LIBRARY, VERSION = platform.libc_ver()
ON_GLIBC = pytest.mark.skipif(
    LIBRARY != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35),
    reason="the C library is not glibc 2.35 or later",
)


@pytest.fixture
def calls(monkeypatch):
    """Replace mallopt and malloc_trim with functions that record their calls, and return the list
    of calls.
    """
    made = []
    library = SimpleNamespace(
        gnu_get_libc_version=None,
        mallopt=lambda name, value: made.append((name, value)) or 1,
        malloc_trim=lambda pad: made.append("trim") or 1,
    )
    monkeypatch.setattr(parawrap.cpu, "_libc", library)
    for name in THRESHOLDS:
        monkeypatch.delenv(name, raising=False)
    return made


OPENED, CLOSED = [(-1, KEPT), (-3, KEPT)], [(-1, 64 << 20), (-3, 32 << 20), "trim"]


@ON_GLIBC
def test_blocks_avoid_page_faults():
    """Reusing freed buffers causes few page faults until the last of nested blocks ends; outside,
    it causes many.
    """
    command = [sys.executable, "-W", "error", "-c", read_script("count_page_faults")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    before, inside, nested, after = map(int, done.stdout.split())
    assert 10 * max(inside, nested) < min(before, after)


def test_first_sets_and_last_resets(calls, caplog):
    """Nested blocks, also of other threads and with exceptions, only change a counter.

    The logger reports start and end.
    """

    def nested():
        with keep_freed_memory():
            raise KeyError

    with caplog.at_level(logging.INFO, logger="parawrap.cpu"), keep_freed_memory():
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(nested) for _ in range(100)]
        assert all(isinstance(future.exception(), KeyError) for future in futures)
        assert calls == OPENED
    assert calls == OPENED + CLOSED
    assert caplog.messages == [
        "this process keeps freed memory",
        "this process returns freed memory to the kernel again",
    ]


def test_older_glibc_has_a_limit(calls, monkeypatch):
    """Before 2.35, mallopt refuses a larger M_MMAP_THRESHOLD, and the block sets the largest."""
    monkeypatch.setattr(parawrap.cpu._libc, "mallopt", lambda *call: calls.append(call))
    with keep_freed_memory():
        assert calls == [*OPENED, (-3, 32 << 20)]


def test_reason_for_nothing_is_logged(calls, caplog, monkeypatch):
    """Without glibc, or if the environment sets a threshold, the block only logs the reason."""
    with caplog.at_level(logging.INFO, logger="parawrap.cpu"):
        for name, value in (
            ("MALLOC_MMAP_THRESHOLD_", "1"),
            ("GLIBC_TUNABLES", "a.b=0:glibc.malloc.trim_threshold=1"),
        ):
            monkeypatch.setenv(name, value)
            with keep_freed_memory():
                pass
            monkeypatch.delenv(name)
        monkeypatch.setattr(parawrap.cpu, "_libc", None)
        with keep_freed_memory():
            pass
    assert calls == []
    assert caplog.messages == [
        "freed memory is not kept: the environment sets MALLOC_MMAP_THRESHOLD_",
        "freed memory is not kept: the environment sets glibc.malloc.trim_threshold",
        "freed memory is not kept: the C library is not glibc",
    ]

"""`keep_freed_memory`: freed buffers stay inside the block, and return to the kernel after it."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import parawrap.cpu
from parawrap.cpu import keep_freed_memory

KEPT, RESET = 1 << 30, (64 << 20, 32 << 20)
THRESHOLDS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in THRESHOLDS}
LIBRARY, VERSION = platform.libc_ver()
ON_GLIBC = pytest.mark.skipif(
    LIBRARY != "glibc" or tuple(map(int, VERSION.split("."))) < (2, 35), reason="the C library is not glibc 2.35 or later"
)

# 64 MiB is more than the largest M_MMAP_THRESHOLD that glibc chooses on its own, so each buffer has new pages.
COUNT_FAULTS = '''
import resource, torch
from parawrap.cpu import keep_freed_memory
torch.set_num_threads(1)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def settle():
    """Let the heap grow: the first buffers of a block may have new pages."""
    for _ in range(4):
        faults()
'''


def run(script: str, **environment: str) -> list[int]:
    """Run the script in a new process and return the numbers that it prints."""
    command = [sys.executable, "-W", "error", "-c", COUNT_FAULTS + script]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT | environment, check=False)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.fixture
def calls(monkeypatch):
    """Replace mallopt and malloc_trim with functions that record their calls, and return the list of calls."""
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


def settings(trim, mmap):
    return [(-1, trim), (-3, mmap)]


OPENED, CLOSED = settings(KEPT, KEPT), [*settings(*RESET), "trim"]


@ON_GLIBC
def test_the_block_avoids_page_faults():
    """Inside the block, reusing freed buffers causes few page faults; before and after it, it causes many."""
    before, inside, after = run("""
print(faults())
with keep_freed_memory():
    settle()
    print(faults())
print(faults())
""")
    assert inside * 10 < before
    assert inside * 10 < after


@ON_GLIBC
def test_memory_is_kept_until_the_last_of_nested_blocks_ends():
    """The end of an inner block does not reset the thresholds."""
    inside, after = run("""
with keep_freed_memory():
    with keep_freed_memory():
        settle()
    print(faults())
print(faults())
""")
    assert inside * 10 < after


@ON_GLIBC
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.trim_threshold=131072")],
)
def test_thresholds_from_the_environment_are_kept(name, value):
    """If the environment sets a threshold, the block does not reduce page faults."""
    outside, inside = run("print(faults())\nwith keep_freed_memory():\n    print(faults())\n", **{name: value})
    assert inside * 2 > outside > 0


def test_the_first_block_sets_the_thresholds_and_the_last_resets_them(calls):
    """Nested blocks only change a counter."""
    with keep_freed_memory():
        with keep_freed_memory():
            assert calls == OPENED
        assert calls == OPENED
    assert calls == OPENED + CLOSED


def test_an_exception_ends_the_block(calls):
    """The thresholds are reset, and the exception is raised."""
    with pytest.raises(KeyError), keep_freed_memory():
        raise KeyError
    assert calls == OPENED + CLOSED


def test_blocks_of_several_threads_are_counted(calls):
    """The thresholds stay set while any thread's block is open."""
    opened, close = threading.Event(), threading.Event()

    def hold():
        with keep_freed_memory():
            opened.set()
            close.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    assert opened.wait(30)
    with keep_freed_memory():
        pass
    assert calls == OPENED
    close.set()
    other.join()
    assert calls == OPENED + CLOSED


@pytest.mark.stress
def test_many_overlapping_blocks_reset_the_thresholds(calls):
    """After many overlapping blocks in several threads, each setting of the thresholds was followed by a reset."""

    def repeat():
        for _ in range(200):
            with keep_freed_memory():
                pass

    threads = [threading.Thread(target=repeat) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert calls == (OPENED + CLOSED) * (len(calls) // 5)
    assert calls


def test_an_older_glibc_gets_the_largest_allowed_value(calls, monkeypatch):
    """If glibc refuses a larger M_MMAP_THRESHOLD, as before version 2.35, the block sets 32 MiB."""

    def refuse(name, value):
        calls.append((name, value))
        return int(name != -3 or value <= 32 << 20)

    monkeypatch.setattr(parawrap.cpu._libc, "mallopt", refuse)
    with keep_freed_memory():
        assert calls == [*OPENED, (-3, 32 << 20)]


def test_the_block_is_logged(calls, caplog):
    """The logger parawrap.cpu reports the start and the end, once for all blocks."""
    with caplog.at_level(logging.INFO, logger="parawrap.cpu"), keep_freed_memory(), keep_freed_memory():
        pass
    assert caplog.messages == ["this process keeps freed memory", "this process returns freed memory to the kernel again"]


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "1", "MALLOC_MMAP_THRESHOLD_"),
        ("MALLOC_TRIM_THRESHOLD_", "1", "MALLOC_TRIM_THRESHOLD_"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1", "glibc.malloc.mmap_threshold"),
    ],
)
def test_a_threshold_of_the_user_is_not_changed(calls, caplog, monkeypatch, name, value, named):
    """The block only logs the setting that it found."""
    monkeypatch.setenv(name, value)
    with caplog.at_level(logging.INFO, logger="parawrap.cpu"), keep_freed_memory():
        pass
    assert calls == []
    assert caplog.messages == [f"freed memory is not kept: the environment sets {named}"]


def test_other_tunables_are_ignored(calls, monkeypatch):
    """If GLIBC_TUNABLES sets no threshold, the block sets the thresholds."""
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    with keep_freed_memory():
        assert calls == OPENED


def test_without_glibc_the_block_does_nothing(calls, caplog, monkeypatch):
    """On macOS, Windows, and musl, the block only logs the reason."""
    monkeypatch.setattr(parawrap.cpu, "_libc", None)
    with caplog.at_level(logging.INFO, logger="parawrap.cpu"), keep_freed_memory():
        pass
    assert calls == []
    assert caplog.messages == ["freed memory is not kept: the C library is not glibc"]

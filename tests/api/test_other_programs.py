"""The CPU time of other programs: which processes and cores count, and when a sentence says so."""

from __future__ import annotations

import os

import pytest

from parawrap.api.other_programs import CoreTimes, describe_other_programs, read_core_times

ME = os.getpid()
MEASURE_AGAIN = "meanwhile: measure again on an idle machine."
SECOND = os.sysconf("SC_CLK_TCK")  # ticks


def write_process(proc, pid, parent, ticks):
    """Write the file of a process whose times are user, system, and those of its ended children."""
    (proc / str(pid)).mkdir()
    fields = ["S", parent, 1, 1, 0, -1, 4194304, 100, 200, 3, 4, *ticks, 20, 0, 1]
    (proc / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(map(str, fields))}\n")


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A folder like /proc of a machine with three cores, of which this process may use two."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    (tmp_path / "stat").write_text(
        "cpu  999 999 999 999 999 999 999 999 999 999\n"
        "cpu0 1 2 4 1000 1000 8 16 1000 1 1\n"
        "cpu1 999 999 999 999 999 999 999 999 999 999\n"
        "cpu2 100 200 400 1000 1000 800 1600 1000 1 1\n"
        "intr 5 5\n"
    )
    (tmp_path / "self").mkdir()
    write_process(tmp_path, ME, 1, (1, 2, 4, 8))
    return tmp_path


def test_cores_and_processes_that_count(proc):
    """Busy time is that of the usable cores, without idle and waiting.

    Own time is that of this process and all processes that descend from it.
    """
    write_process(proc, 1, 0, (9, 9, 9, 9))
    write_process(proc, ME + 1, ME, (10, 0, 0, 0))
    write_process(proc, ME + 2, ME + 1, (0, 20, 0, 0))
    write_process(proc, ME + 3, 1, (9, 9, 9, 9))
    (proc / str(ME + 4)).mkdir()  # a process that has ended meanwhile
    read = read_core_times(proc)
    assert read.cores == 2
    assert read.busy == 31 + 3100
    assert read.own == {ME: 15, ME + 1: 10, ME + 2: 20}


def test_systems_that_do_not_report(proc, tmp_path, monkeypatch):
    """Without /proc, or without one of the cores in it, there is no reading, and no sentence."""
    assert read_core_times(tmp_path / "gone") is None
    read = read_core_times(proc)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 7}, raising=False)
    assert read_core_times(proc) is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert read_core_times(proc) is None
    for start, end in (None, read), (read, None):
        assert describe_other_programs(start, end, needs_all_cores=True) == ""


def test_this_process_is_in_the_reading():
    first, second = read_core_times(), read_core_times()
    if first is not None:  # a system with /proc
        assert first.own[ME] <= second.own[ME]
        assert first.busy <= second.busy


def describe(busy, own, *, cores=2, seconds=100.0, needs_all_cores=True):
    """Describe 100 s: the cores worked for `busy` seconds, and our processes for `own` of these."""
    start = CoreTimes(50.0, cores, 7 * SECOND, {1: 3 * SECOND, 2: SECOND})
    ticks = {process: int(used * SECOND) for process, used in own.items()}
    end = CoreTimes(50.0 + seconds, cores, 7 * SECOND + int(busy * SECOND), ticks)
    return describe_other_programs(start, end, needs_all_cores=needs_all_cores)


@pytest.mark.parametrize(
    ("busy", "own", "said"),
    [
        (200, {1: 73}, f"Other programs used 1.3 of 2 cores {MEASURE_AGAIN}"),
        (200, {1: 73, 2: 1, 3: 130}, ""),  # the workers used the rest
        (20, {1: 3}, ""),  # a fifth of a core
        (30, {1: 3}, f"Other programs used 0.3 of 2 cores {MEASURE_AGAIN}"),
        (0, {1: 93}, ""),  # more than the cores counted
    ],
)
def test_others_are_what_is_left(busy, own, said):
    """Workers are no other programs, also those that start during the measurement."""
    assert describe(busy, own) == said


def test_short_measurements_need_clear_signs():
    """Counters are rounded to ticks, so a tick per counter is not taken for another program."""
    tick = 1 / SECOND
    assert describe(3 * tick, {1: 3}, seconds=8 * tick) == ""
    assert "used 1.0 of 2 cores" in describe(8 * tick, {1: 3}, seconds=8 * tick)


def test_accelerators_need_few_cores():
    """Calls to accelerators are slowed if few cores are idle, and not by one busy core of 16."""
    assert describe(700, {}, cores=16, needs_all_cores=False) == ""
    assert "9.0 of 16 cores" in describe(900, {}, cores=16, needs_all_cores=False)
    assert "1.0 of 16 cores" in describe(100, {}, cores=16)

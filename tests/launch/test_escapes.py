"""Promise 4: a launch ends processes that left their rank's process group, but no unrelated process."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import psutil
import pytest

from parawrap import LaunchCancelledError, RankDiedError, wrapper
from parawrap.launch.guard import _orphan_processes
from tests.helpers.processes import REPORT_PID, assert_gone, is_gone, pids_in, ranks, running_scripts
from tests.helpers.waiting import PATIENCE_S, eventually

METHODS = ["forkserver", "spawn", "fork"]
ESCAPES = 3

ESCAPING = '''
import os, pathlib, signal, subprocess, sys, time

def escape(folder):
    """Start three processes outside this process group, and wait until each has reported its process id."""
    report_pid(folder, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if os.fork() == 0:  # a daemon that runs this program, and whose parent exits
        os.setsid()
        if os.fork() == 0:
            report_pid(folder)
            while True:
                time.sleep(600)
        os._exit(0)
    os.wait()
    child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    report_pid(folder, int(child.stdout.readline()))
    child.kill()
    child.wait()
    while len(list(pathlib.Path(folder).glob("*.pid"))) < 3:
        time.sleep(0.01)

def run(folder, end):
    """Call `escape`, then end in the given way."""
    escape(folder)
    if end == "raises":
        raise ValueError
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end in ("cancelled", "parent"):
        time.sleep(600)
'''
"""Source of ``run(folder, end)``, as a string, so that ranks do not need to import this module."""


def run_function():
    """Return `run` as a function that is pickled by value."""
    namespace = {}
    exec(REPORT_PID + ESCAPING, namespace)
    return namespace["run"]


@contextlib.contextmanager
def killing_survivors(folder):
    """At the end of the block, kill the processes that reported their ids in this folder or its subfolders."""
    try:
        yield
    finally:
        for path in folder.rglob("*.pid"):
            if not is_gone(int(path.stem)):
                os.kill(int(path.stem), signal.SIGKILL)


@contextlib.contextmanager
def unrelated_processes():
    """Start a process in a new session and a daemon; fail if either ends within the block."""
    daemon = "setsid sleep 600 > /dev/null & echo $!"
    (orphan,) = map(int, subprocess.run(["sh", "-c", daemon], stdout=subprocess.PIPE, check=True).stdout.split())
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as child:
        try:
            yield
            assert [is_gone(pid) for pid in (child.pid, orphan)] == [False, False]
        finally:
            child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, signal.SIGKILL)


@pytest.mark.parametrize("method", METHODS)
def test_no_process_that_left_the_group_outlives_the_launch(method, tmp_path):
    """All processes that a rank started have ended once the results arrive, however the rank ends."""
    run, survivors = run_function(), {}
    expected = {"returns": (), "raises": ValueError, "killed": RankDiedError, "cancelled": LaunchCancelledError}
    with contextlib.ExitStack() as around:
        around.enter_context(killing_survivors(tmp_path))
        around.enter_context(unrelated_processes())
        for end in expected:
            (tmp_path / end).mkdir()
        launches = {end: wrapper(ranks(1, spawn_method=method))(run).submit(tmp_path / end, end) for end in expected}
        around.enter_context(unrelated_processes())
        for end, launch in launches.items():
            escaped = pids_in(tmp_path / end, ESCAPES)
            if end == "cancelled":
                launch.cancel()
            with contextlib.suppress(expected[end]):
                launch.results(timeout=PATIENCE_S)
            survivors[end] = sum(not is_gone(pid) for pid in escaped)
    assert survivors == dict.fromkeys(expected, 0)


def test_an_orphan_of_a_rank_that_ends_while_processes_are_listed_is_waited_for(monkeypatch):
    """A rank may end after the list of processes was begun and before its end is noticed. It waits for its orphan too."""
    with (
        subprocess.Popen(["true"]) as earlier,
        subprocess.Popen(["true"]) as ending,
        subprocess.Popen(["sleep", "600"]) as orphan,
    ):
        for rank in earlier, ending:
            os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        listed = [_orphan_processes._Process(orphan.pid, os.getpid(), os.getpgrp())]
        monkeypatch.setattr(_orphan_processes, "_processes", lambda: iter(listed))
        leftovers = _orphan_processes.Leftovers()
        leftovers.end(earlier.pid)
        assert leftovers.gone({ending.pid}) == []
        leftovers.end(ending.pid)
        assert leftovers.gone(()) == []
        listed.clear()
        assert leftovers.gone(()) == [earlier.pid, ending.pid]


PARENT = f"""
{ESCAPING}
from parawrap import Platform, wrapper

method, folder, own = sys.argv[1:]
report_pid(own, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
wrapper(Platform(device="cpu", n_cpus=1, spawn_method=method, grace_s=0.5))(run)(folder, "parent")
"""


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Running parents of such ranks, by spawn method."""

    def parent(folder, method):
        own, launched = folder / "own", folder / "launched"
        own.mkdir()
        launched.mkdir()
        return PARENT, method, launched, own

    root = tmp_path_factory.mktemp("parents")
    cases = {method: lambda folder, method=method: parent(folder, method) for method in METHODS}
    with killing_survivors(root), running_scripts(root, cases) as started:
        yield started


@pytest.mark.parametrize("method", METHODS)
def test_no_process_that_left_the_group_outlives_a_killed_parent(method, parents):
    """After SIGKILL to the parent, all processes of its launch end; processes that the parent itself started survive."""
    parent, folder = parents[method]
    escaped = pids_in(folder / "launched", ESCAPES)
    (unrelated,) = pids_in(folder / "own", 1)
    parent.kill()
    parent.wait()
    assert_gone(escaped)
    assert not is_gone(unrelated)


def test_a_launch_does_not_end_processes_of_another_launch(tmp_path):
    """When one of two concurrent launches ends, only its own processes end."""
    run = run_function()
    (tmp_path / "ends").mkdir()
    (tmp_path / "runs").mkdir()
    with killing_survivors(tmp_path), unrelated_processes():
        running = wrapper(ranks(1))(run).submit(tmp_path / "runs", "cancelled")
        try:
            others = pids_in(tmp_path / "runs", ESCAPES)
            wrapper(ranks(1))(run)(tmp_path / "ends", "returns")
            ended = pids_in(tmp_path / "ends", ESCAPES)
            survivors = [pid for pid in ended if not is_gone(pid)]
            assert not any(map(is_gone, others))
        finally:
            running.cancel()
        assert survivors == []
        assert all(map(is_gone, others))


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = bytearray(400 << 20)  # the kernel needs a moment to free it
print("up", flush=True)
time.sleep(600)
"""


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
    """A process that ignores SIGTERM gets SIGKILL, and has ended once the results arrive."""
    monkeypatch.setattr("parawrap.launch.guard._orphan_processes._PATIENCE_S", 0.5)

    def starts():
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        child.stdout.readline()
        return child.pid

    (pid,) = wrapper(ranks(1, spawn_method="fork"))(starts)()  # with fork, this process itself ends the ranks' leftovers
    assert is_gone(pid)


def test_a_launch_does_not_wait_for_leftovers_of_another_launch(tmp_path):
    """A process that ignores SIGTERM delays only the end of its own launch.

    It is killed after ten seconds. On a busy machine, the other launch may need longer than that, so there are 3 trials.
    """

    def leaves(report):
        script = f"trap '' TERM; echo $$ > {report}.part; mv {report}.part {report}; while :; do sleep 0.1; done"
        return subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True).pid

    def overtakes(report):
        launch = wrapper(ranks(1))(leaves).submit(report)
        eventually(report.exists, "the start of the leftover")
        assert wrapper(ranks(1))(lambda: 1)() == (1,)
        is_first = not launch.done()
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(report.read_text()), signal.SIGKILL)
        (pid,) = launch.results(timeout=PATIENCE_S)
        assert not psutil.pid_exists(pid)
        return is_first

    assert any(overtakes(tmp_path / str(trial)) for trial in range(3))

"""Promise 4: processes that left their rank's process group end with the launch, and no other process does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from parawrap import LaunchCancelledError, RankDiedError, wrapper
from tests.launch.processes import (
    PATIENCE_S,
    SAY,
    assert_gone,
    is_gone,
    ranks,
    running_scripts,
    said_in,
)

METHODS = ["forkserver", "spawn", "fork"]
ESCAPES = 3

ESCAPING = '''
import os, pathlib, signal, subprocess, sys, time

def escape(folder):
    """Start three processes that leave this one's process group, and wait until each has told its process id."""
    say(folder, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if os.fork() == 0:  # a daemon: its parent is gone, and it is the same program
        os.setsid()
        if os.fork() == 0:
            say(folder)
            while True:
                time.sleep(600)
        os._exit(0)
    os.wait()
    child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    say(folder, int(child.stdout.readline()))
    child.kill()
    child.wait()
    while len(list(pathlib.Path(folder).glob("*.pid"))) < 3:
        time.sleep(0.01)

def run(folder, end):
    """Escape, and end in this way."""
    escape(folder)
    if end == "raises":
        raise ValueError
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end in ("cancelled", "parent"):
        time.sleep(600)
'''
"""Source of ``run(folder, end)``: in a string, so that ranks need not import this module."""


def escaping():
    """`run`, as a function that travels by value."""
    place = {}
    exec(SAY + ESCAPING, place)
    return place["run"]


@contextlib.contextmanager
def cleaned_up(folder):
    """Kill whatever is left of the processes that told of themselves in this folder or below."""
    try:
        yield
    finally:
        for path in folder.rglob("*.pid"):
            if not is_gone(int(path.stem)):
                os.kill(int(path.stem), signal.SIGKILL)


@contextlib.contextmanager
def users_own_processes():
    """A process in a session of its own, and a daemon, that this script started; both must outlive the block."""
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
    """A new session, a daemon, and the child of a killed child: gone when the results are there, however ranks end."""
    run, survivors = escaping(), {}
    expected = {"returns": (), "raises": ValueError, "killed": RankDiedError, "cancelled": LaunchCancelledError}
    with contextlib.ExitStack() as around:
        around.enter_context(cleaned_up(tmp_path))
        around.enter_context(users_own_processes())
        for end in expected:
            (tmp_path / end).mkdir()
        launches = {end: wrapper(ranks(1, spawn_method=method))(run).submit(tmp_path / end, end) for end in expected}
        around.enter_context(users_own_processes())
        for end, launch in launches.items():
            said = said_in(tmp_path / end, ESCAPES)
            if end == "cancelled":
                launch.cancel()
            with contextlib.suppress(expected[end]):
                launch.results(timeout=PATIENCE_S)
            survivors[end] = sum(not is_gone(pid) for pid in said)
    assert survivors == dict.fromkeys(expected, 0)


PARENT = f"""
{ESCAPING}
from parawrap import Platform, wrapper

method, folder, own = sys.argv[1:]
say(own, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
wrapper(Platform(device="cpu", n_cpus=1, spawn_method=method, grace_s=0.5))(run)(folder, "parent")
"""


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Parents of ranks with such processes, by spawn method."""

    def parent(folder, method):
        own, launched = folder / "own", folder / "launched"
        own.mkdir()
        launched.mkdir()
        return PARENT, method, launched, own

    root = tmp_path_factory.mktemp("parents")
    cases = {method: lambda folder, method=method: parent(folder, method) for method in METHODS}
    with cleaned_up(root), running_scripts(root, cases) as started:
        yield started


@pytest.mark.parametrize("method", METHODS)
def test_no_process_that_left_the_group_outlives_a_killed_parent(method, parents):
    """The parent is killed by SIGKILL: nothing of its launch lives soon after; what it had started itself lives on."""
    parent, folder = parents[method]
    said = said_in(folder / "launched", ESCAPES)
    (users,) = said_in(folder / "own", 1)
    parent.kill()
    parent.wait()
    assert_gone(said)
    assert not is_gone(users)


def test_a_launch_that_ends_leaves_the_processes_of_another_one_alone(tmp_path):
    """Two launches at once: what a rank of one has started lives as long as that launch."""
    run = escaping()
    (tmp_path / "ends").mkdir()
    (tmp_path / "runs").mkdir()
    with cleaned_up(tmp_path), users_own_processes():
        running = wrapper(ranks(1))(run).submit(tmp_path / "runs", "cancelled")
        try:
            others = said_in(tmp_path / "runs", ESCAPES)
            wrapper(ranks(1))(run)(tmp_path / "ends", "returns")
            ended = said_in(tmp_path / "ends", ESCAPES)
            survivors = [pid for pid in ended if not is_gone(pid)]
            assert not any(map(is_gone, others))
        finally:
            running.cancel()
        assert survivors == []
        assert all(map(is_gone, others))


STUBBORN = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
memory = bytearray(400 << 20)  # takes the kernel a moment to free
print("up", flush=True)
time.sleep(600)
"""


def test_a_process_that_had_to_be_killed_is_gone_when_the_results_are_there(monkeypatch):
    """One that ignores SIGTERM gets SIGKILL, and the launch waits until it has ended."""
    monkeypatch.setattr("parawrap.launch._leftovers._PATIENCE_S", 0.5)

    def starts():
        child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
        child.stdout.readline()
        return child.pid

    (pid,) = wrapper(ranks(1, spawn_method="fork"))(starts)()  # where this process itself ends what ranks have left
    assert is_gone(pid)


def test_a_launch_does_not_wait_for_what_an_earlier_one_left():
    """A process that ignores SIGTERM delays the end of its own launch only."""

    def leaves():
        script = "trap '' TERM; while :; do sleep 0.1; done"
        return subprocess.Popen(["/bin/sh", "-c", script], start_new_session=True).pid

    launch = wrapper(ranks(1))(leaves).submit()
    began = time.monotonic()
    for _ in range(3):
        assert wrapper(ranks(1))(lambda: 1)() == (1,)
    assert time.monotonic() - began < 5
    assert not launch.done()
    (pid,) = launch.results(timeout=PATIENCE_S)
    assert not psutil.pid_exists(pid)

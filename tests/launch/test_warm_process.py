"""A fault of the warm process that ranks are forked from costs one launch at most, and the launch names it."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from parawrap import LaunchCancelledError, LaunchError, LaunchTimeoutError, current_rank, wrapper
from tests.launch.processes import (
    PATIENCE_S,
    SOON_S,
    assert_gone,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    report_pid_function,
    running_scripts,
    warm_processes,
)

BOUND_S = 8.0
"""Longer than a launch of these tests takes to end. A stopped process goes on after this time, so that no test hangs."""


def warm_process():
    """The process id of the warm process, which is started if there is none."""
    (pid,) = wrapper(ranks(1))(os.getppid)()
    return pid


@contextmanager
def rescued(pid):
    """Resume a process, if it was stopped, after BOUND_S or at the end of the block."""

    def resume():
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)

    rescue = threading.Timer(BOUND_S, resume)
    rescue.start()
    try:
        yield
    finally:
        rescue.cancel()
        rescue.join()
        resume()


def sleeping():
    """A function that says that its rank runs, and takes long."""
    report_pid = report_pid_function()

    def sleeps(folder):
        report_pid(folder)
        time.sleep(600)

    return sleeps


def run_out_of_time(submit):
    with pytest.raises(LaunchTimeoutError):
        submit(timeout_min=0.02).results(timeout=PATIENCE_S)


def cancel(submit):
    launch = submit()
    launch.cancel()
    assert launch.state == "cancelled"
    with pytest.raises(LaunchCancelledError):
        launch.results()


def interrupt(submit):
    """Ctrl-C while the launch starts, or while the caller waits for its results."""

    def called():
        launch = submit()
        try:
            return launch.results(timeout=PATIENCE_S)
        finally:
            launch.cancel()

    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            called()
    finally:
        timer.join()


@pytest.mark.parametrize("end", [run_out_of_time, cancel, interrupt])
@pytest.mark.parametrize("moment", ["before", "while_ranks_run"])
def test_a_stopped_warm_process_keeps_no_launch_from_ending(moment, end, tmp_path):
    """A time limit, ``cancel`` and Ctrl-C end the launch in seconds, and the next launch works."""
    warm, sleeps = warm_process(), sleeping()
    before = moment == "before"

    def submit(**limit):
        launch = wrapper(ranks(grace_s=0.3, **limit))(sleeps).submit(tmp_path)
        if not before:
            pids_in(tmp_path, 2)
            os.kill(warm, signal.SIGSTOP)
        return launch

    with rescued(warm):
        if before:
            os.kill(warm, signal.SIGSTOP)
        began = time.monotonic()
        end(submit)
        assert all(is_gone(int(path.stem)) for path in tmp_path.glob("*.pid"))
        assert time.monotonic() - began < BOUND_S
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


STOPPING = """
import os, signal, sys, time
from parawrap import Platform, wrapper

(warm,) = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(os.getppid)()
os.kill(warm, signal.SIGSTOP)
report_pid(sys.argv[1], warm)
time.sleep(600 if sys.argv[2] == "killed" else 0)
"""


@pytest.fixture(scope="module")
def stopping(tmp_path_factory):
    """Parents of a stopped warm process, by how they end."""
    cases = {end: lambda folder, end=end: (STOPPING, folder, end) for end in ("exits", "killed")}
    with running_scripts(tmp_path_factory.mktemp("stopping"), cases) as started:
        yield started


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_a_stopped_warm_process_does_not_survive_its_parent(end, stopping):
    """The interpreter's end is not held up, and the stopped process is gone after it, also if the parent was killed."""
    parent, folder = stopping[end]
    (warm,) = pids_in(folder, 1)
    try:
        if end == "killed":
            parent.kill()
        parent.wait(SOON_S)
        assert_gone([warm], BOUND_S)
    finally:
        if not is_gone(warm):
            os.kill(warm, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_warm_process_that_dies_while_ranks_run_is_named(number):
    """The error says that the warm process has died, and of which signal; the next launch works."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), number)
        time.sleep(600)

    with pytest.raises(LaunchError) as caught:
        wrapper(ranks(timeout_min=0.2))(kills)()
    said = f"{caught.value}\n{notes_of(caught.value)}"
    assert "warm process" in said
    assert number.name in said
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_a_warm_process_that_dies_while_a_rank_is_asked_for_is_named():
    """The launch starts another one, or its error says how the warm process ended; the next launch works."""
    warm = warm_process()
    with rescued(warm):
        os.kill(warm, signal.SIGSTOP)
        death = threading.Timer(0.2, os.kill, [warm, signal.SIGKILL])
        death.start()
        try:
            assert wrapper(ranks())(lambda: 1)() == (1, 1)
        except LaunchError as error:
            said = f"{error}\n{notes_of(error)}"
            assert "warm process" in said
            assert "SIGKILL" in said
        finally:
            death.join()
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def end_warm_process():
    """Kill the warm process, if there is one: the next launch starts another one, in the working folder of then."""
    for process in warm_processes():
        process.kill()
        assert_gone([process.pid])


def place():
    """The working folder of a rank; None if it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_launch_from_a_folder_that_is_gone_works(method, tmp_path, monkeypatch):
    """Ranks run though the working folder was deleted, also in the launch after that."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if method == "forkserver":
        end_warm_process()
    folder.rmdir()
    launchable = wrapper(ranks(1, spawn_method=method))(lambda: (place(), "ran")[1])
    for _ in range(2):
        assert launchable() == ("ran",)


def test_a_folder_may_be_deleted_between_launches(tmp_path, monkeypatch):
    """The warm process, which was started there, serves the next launch; ranks of a later one find the new folder."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    monkeypatch.chdir(folder)
    end_warm_process()
    launchable = wrapper(ranks(1))(place)
    assert launchable() == (folder,)
    folder.rmdir()
    assert launchable() != (folder,)
    monkeypatch.chdir(other)
    assert launchable() == (other,)

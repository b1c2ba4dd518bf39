"""A fault of the warm process, which forks the ranks, fails at most one launch and is named in the error."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from parawrap import LaunchCancelledError, LaunchError, LaunchTimeoutError, current_rank, wrapper
from tests.helpers.processes import (
    assert_gone,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    report_pid_function,
    running_scripts,
    warm_processes,
)
from tests.helpers.waiting import PATIENCE_S

BOUND_S = 20.0
"""Longer than a launch of these tests takes to end. Stopped processes resume after this time, so no test hangs."""


def warm_pid():
    """Return the process id of the warm process; start a warm process if there is none."""
    (pid,) = wrapper(ranks(1))(os.getppid)()
    return pid


@contextmanager
def resumed_later(pid):
    """Resume a stopped process after BOUND_S seconds or at the end of the block."""

    def resume():
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)

    timer = threading.Timer(BOUND_S, resume)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        resume()


def sleeping_function():
    """Return a function that reports its process id and then sleeps."""
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
    """Send Ctrl-C while the launch starts or while the caller waits for results."""

    def wait_for_results():
        launch = submit()
        try:
            return launch.results(timeout=PATIENCE_S)
        finally:
            launch.cancel()

    timer = threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT])
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            wait_for_results()
    finally:
        timer.join()


@pytest.mark.parametrize("end", [run_out_of_time, cancel, interrupt])
@pytest.mark.parametrize("moment", ["before", "while_ranks_run"])
def test_a_launch_with_a_stopped_warm_process_can_end(moment, end, tmp_path):
    """A timeout, ``cancel``, or Ctrl-C ends the launch in seconds, and the next launch works."""
    warm, sleeps = warm_pid(), sleeping_function()
    before = moment == "before"

    def submit(**limit):
        launch = wrapper(ranks(grace_s=0.3, **limit))(sleeps).submit(tmp_path)
        try:
            if not before:
                pids_in(tmp_path, 2)
                os.kill(warm, signal.SIGSTOP)
        except KeyboardInterrupt:
            launch.cancel()
            raise
        return launch

    with resumed_later(warm):
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
    """Parents of a stopped warm process, by the way they end."""
    cases = {end: lambda folder, end=end: (STOPPING, folder, end) for end in ("exits", "killed")}
    with running_scripts(tmp_path_factory.mktemp("stopping"), cases) as started:
        yield started


@pytest.mark.parametrize("end", ["exits", "killed"])
def test_a_stopped_warm_process_does_not_survive_its_parent(end, stopping):
    """The stopped process ends after its parent exits or is killed, and the parent's exit is not delayed."""
    parent, folder = stopping[end]
    (warm,) = pids_in(folder, 1)
    try:
        if end == "killed":
            parent.kill()
        parent.wait(PATIENCE_S)
        assert_gone([warm], BOUND_S)
    finally:
        if not is_gone(warm):
            os.kill(warm, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_warm_process_that_dies_while_ranks_run_is_named(number):
    """The error names the warm process and the signal that killed it, and the next launch works."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), number)
        time.sleep(600)

    with pytest.raises(LaunchError) as caught:
        wrapper(ranks(timeout_min=0.2))(kills)()
    text = f"{caught.value}\n{notes_of(caught.value)}"
    assert "warm process" in text
    assert number.name in text
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_a_warm_process_that_dies_while_ranks_start_is_replaced_or_named():
    """The launch starts another warm process, or its error names the signal; the next launch works."""
    warm = warm_pid()
    with resumed_later(warm):
        os.kill(warm, signal.SIGSTOP)
        death = threading.Timer(0.2, os.kill, [warm, signal.SIGKILL])
        death.start()
        try:
            assert wrapper(ranks())(lambda: 1)() == (1, 1)
        except LaunchError as error:
            text = f"{error}\n{notes_of(error)}"
            assert "warm process" in text
            assert "SIGKILL" in text
        finally:
            death.join()
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def end_warm_process():
    """Kill the warm process; the next launch starts another in the current working directory."""
    for process in warm_processes():
        process.kill()
        assert_gone([process.pid])


def working_folder():
    """Return the working directory of a rank, or None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_launch_from_a_removed_folder_works(method, tmp_path, monkeypatch):
    """Two launches run ranks although the working directory was removed."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if method == "forkserver":
        end_warm_process()
    folder.rmdir()
    launchable = wrapper(ranks(1, spawn_method=method))(lambda: (working_folder(), "ran")[1])
    for _ in range(2):
        assert launchable() == ("ran",)


def test_the_working_directory_can_be_removed_between_launches(tmp_path, monkeypatch):
    """A warm process in a removed directory serves the next launch; later ranks use the parent's new directory."""
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    monkeypatch.chdir(folder)
    end_warm_process()
    launchable = wrapper(ranks(1))(working_folder)
    assert launchable() == (folder,)
    folder.rmdir()
    assert launchable() != (folder,)
    monkeypatch.chdir(other)
    assert launchable() == (other,)

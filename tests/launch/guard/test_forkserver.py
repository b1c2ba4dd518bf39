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


def warm_pid():
    """Return the process id of the warm process; start a warm process if there is none."""
    (pid,) = wrapper(ranks(1))(os.getppid)()
    return pid


@contextmanager
def resumed(pid):
    """Resume a stopped process at the end of the block."""
    try:
        yield
    finally:
        if not is_gone(pid):
            os.kill(pid, signal.SIGCONT)


def run_out_of_time(submit):
    with pytest.raises(LaunchTimeoutError):
        submit(timeout_min=0.02).results(timeout=PATIENCE_S)


def cancel(submit):
    launch = submit()
    launch.cancel()
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
@pytest.mark.parametrize("moment", ["before", "while ranks run"])
def test_a_stopped_process_does_not_block_an_end(moment, end, tmp_path):
    """A timeout, ``cancel``, or Ctrl-C ends the launch and its ranks, and the next launch works."""
    warm, report_pid = warm_pid(), report_pid_function()

    def sleeps():
        report_pid(tmp_path)
        time.sleep(600)

    def submit(**limit):
        launch = wrapper(ranks(grace_s=0.3, **limit))(sleeps).submit()
        try:
            if moment != "before":
                pids_in(tmp_path, 2)
                os.kill(warm, signal.SIGSTOP)
        except KeyboardInterrupt:
            launch.cancel()
            raise
        return launch

    with resumed(warm):
        if moment == "before":
            os.kill(warm, signal.SIGSTOP)
        end(submit)
        assert all(is_gone(int(path.stem)) for path in tmp_path.glob("*.pid"))
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


STOPPING = """
import os, signal, sys, time
from parawrap import Platform, wrapper

(warm,) = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(os.getppid)()
os.kill(warm, signal.SIGSTOP)
report_pid(sys.argv[1], warm)
time.sleep(600 if sys.argv[2] == "killed" else 0)
"""


def test_a_stopped_process_ends_with_its_parent(tmp_path):
    """After its parent exits or is killed. The parent's exit is not delayed."""
    cases = {end: lambda folder, end=end: (STOPPING, folder, end) for end in ("exits", "killed")}
    with running_scripts(tmp_path, cases) as started:
        for end, (parent, folder) in started.items():
            (warm,) = pids_in(folder, 1)
            try:
                if end == "killed":
                    parent.kill()
                parent.wait(PATIENCE_S)
                assert_gone([warm])
            finally:
                if not is_gone(warm):
                    os.kill(warm, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_death_while_ranks_run_is_named(number):
    """The error names the warm process and the signal that killed it, and the next launch works."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), number)
        time.sleep(600)

    with pytest.raises(LaunchError) as caught:
        wrapper(ranks())(kills)()
    text = f"{caught.value}\n{notes_of(caught.value)}"
    assert "warm process" in text
    assert number.name in text
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_a_death_while_ranks_start_is_survived():
    """The launch starts another warm process, or its error names the signal; the next launch works."""
    warm = warm_pid()
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


def working_folder():
    """Return the working directory of a rank, or None if it was removed."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def end_warm_process():
    for process in warm_processes():
        process.kill()
        assert_gone([process.pid])


def test_the_working_folder_may_be_removed(tmp_path, monkeypatch):
    """Before the warm process starts, and while it is there; later ranks use the parent's new folder."""
    end_warm_process()
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    launched = wrapper(ranks(1))(working_folder)
    assert launched() == (folder,)
    folder.rmdir()
    assert launched() != (folder,)
    end_warm_process()
    for method in "forkserver", "spawn":
        assert wrapper(ranks(1, spawn_method=method))(working_folder)() != (folder,)
    monkeypatch.chdir(tmp_path)
    assert launched() == (tmp_path,)

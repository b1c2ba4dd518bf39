"""A fault of the warm process, which forks the ranks, fails at most one launch and is named in the error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from parawrap import LaunchCancelledError, LaunchError, LaunchTimeoutError, current_rank, wrapper
from tests.helpers.processes import (
    assert_gone,
    failure_of,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    report_pid_function,
    run_script,
    warm_processes,
)
from tests.helpers.waiting import PATIENCE_S


def warm_pid():
    """Return the process id of the warm process; start a warm process if there is none."""
    (pid,) = wrapper(ranks(1))(os.getppid)()
    return pid


@pytest.mark.parametrize("runs", [False, True], ids=["before", "while ranks run"])
@pytest.mark.parametrize(("limit", "kind"), [({"timeout_min": 0.02}, LaunchTimeoutError), ({}, LaunchCancelledError)])
def test_stopped_process_and_an_end(runs, limit, kind, tmp_path):
    """A timeout or ``cancel`` ends the launch and its ranks, and the next launch works."""
    warm, report_pid = warm_pid(), report_pid_function()

    def sleeps():
        report_pid(tmp_path)
        time.sleep(600)

    try:
        if not runs:
            os.kill(warm, signal.SIGSTOP)
        launch = wrapper(ranks(grace_s=0.3, **limit))(sleeps).submit()
        if runs:
            pids_in(tmp_path, 2)
            os.kill(warm, signal.SIGSTOP)
        if not limit:
            launch.cancel()
        with pytest.raises(kind):
            launch.results(timeout=PATIENCE_S)
        assert all(is_gone(int(path.stem)) for path in tmp_path.glob("*.pid"))
    finally:
        if not is_gone(warm):
            os.kill(warm, signal.SIGCONT)
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


STOPPING = """
import os, signal, sys
from parawrap import Platform, wrapper

(warm,) = wrapper(Platform(device="cpu", n_cpus=1, verbose=False))(os.getppid)()
os.kill(warm, signal.SIGSTOP)
print(warm)
"""


def test_stopped_process_and_exit(tmp_path):
    assert_gone([int(run_script(tmp_path, STOPPING))])


def test_killed_process_is_named():
    """The error names the signal, and the next launch works. A launch with ranks that start may survive."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error, _ = failure_of(kills)
    errors = [error]
    warm = warm_pid()
    os.kill(warm, signal.SIGSTOP)
    launch = wrapper(ranks())(lambda: 1).submit()
    os.kill(warm, signal.SIGKILL)
    try:
        assert launch.results() == (1, 1)
    except LaunchError as error:
        errors.append(error)
    for error in errors:
        text = f"{error}\n{notes_of(error)}"
        assert "warm process" in text
        assert "SIGKILL" in text
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_folder_may_be_removed(tmp_path, monkeypatch):
    """While the warm process runs, and before it starts; later ranks use the parent's new folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    launched = wrapper(ranks(1))(lambda: Path("/proc/self/cwd").readlink())
    assert launched() == (folder,)
    folder.rmdir()
    assert launched() != (folder,)
    for warm in warm_processes():
        warm.kill()
        assert_gone([warm.pid])
    assert launched() != (folder,)
    monkeypatch.chdir(tmp_path)
    assert launched() == (tmp_path,)

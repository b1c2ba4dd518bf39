"""The process that forks ranks: a fault of it fails at most one launch, and no process outlives its
launch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from parawrap import LaunchCancelledError, LaunchError, RankDiedError, current_rank, wrapper
from parawrap.processes import fork_server
from tests.helpers.processes import (
    assert_gone,
    failure_of,
    is_gone,
    notes_of,
    pids_in,
    ranks,
    running_script,
)
from tests.helpers.waiting import PATIENCE_S, eventually


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The error of a launch whose rank killed the process that forks ranks, and the ids of its
    ranks and of processes that these had started.
    """
    folder = tmp_path_factory.mktemp("killed")

    def starts_and_kills():
        (folder / f"{subprocess.Popen(['sleep', '600']).pid}.pid").touch()
        (folder / f"{os.getpid()}.pid").touch()
        if current_rank().global_rank == 0:
            pids_in(folder, 4)
            os.kill(psutil.Process(os.getppid()).ppid(), signal.SIGKILL)
        time.sleep(600)

    return failure_of(starts_and_kills), pids_in(folder, 4)


def test_killed_process_is_named(killed):
    """The error names the signal, and the next launch works."""
    error, _ = killed
    text = f"{error}\n{notes_of(error)}"
    assert "the process that forks ranks" in text
    assert "SIGKILL" in text
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_killed_process_leaves_nothing(killed):
    """Processes that a rank has started end with it."""
    _, pids = killed
    assert_gone(pids)


KILLED = """
import os, sys, time
from pathlib import Path
from parawrap import Platform, wrapper

def wait():
    Path(sys.argv[1], f"{os.getpid()}.pid").touch()
    time.sleep(600)

wrapper(Platform(device="cpu", n_cpus=2))(wait)()
"""


def test_killed_script_leaves_no_folder(tmp_path, monkeypatch):
    """The process that forks ranks removes the folder of the store."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    with running_script(tmp_path, KILLED, tmp_path) as script:
        pids_in(tmp_path, 2)
        assert [*folder.glob("parawrap-store-*")]
        script.kill()
    eventually(lambda: not [*folder.glob("parawrap-store-*")], "the end of the folder")


def test_a_killed_parent_ends_its_rank(tmp_path):
    """The parent of a rank ends what the rank leaves.

    Without it, the rank ends, and is reported.
    """

    def kills():
        if current_rank().global_rank == 0:
            left = subprocess.Popen(["sleep", "600"], start_new_session=True)
            (tmp_path / f"{left.pid}.pid").touch()
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error = failure_of(kills)
    assert type(error) is RankDiedError
    assert "its parent process, which was killed" in str(error)
    assert_gone(pids_in(tmp_path, 1))
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_killed_keepers_are_replaced():
    """The next launch takes others. No rank is lost with them."""
    launch = wrapper(ranks())
    for _ in range(3):
        assert launch(lambda: 1)() == (1, 1)
        for keeper in psutil.Process(fork_server.fork_server()._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has waited long enough
                keeper.kill()
                keeper.wait(PATIENCE_S)
    assert launch(lambda: 1)() == (1, 1)


def test_a_frozen_application_is_refused(monkeypatch):
    """A frozen application is refused, since its executable is the application itself, which would
    start again without an end.
    """
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(LaunchError, match="frozen application"):
        fork_server.ForkServer()


# -- what ranks leave behind


def test_group_that_is_gone_gets_no_signal(monkeypatch):
    """While an orphan ends, another group may get the number of the rank's group."""
    sent, group = [], 4321
    is_a_group = iter([True, True, True, False])  # at each signal; at later ones it is another
    has_children = iter([True, True, True, True, False])  # at each look

    def killpg(pid, number):
        sent.append((pid, number))
        if not next(is_a_group, True):
            raise ProcessLookupError

    keeper = fork_server._Keeper(None, -1)
    monkeypatch.setattr(keeper, "_has_children", lambda: next(has_children))
    monkeypatch.setattr(fork_server, "children_of", lambda _: set())
    monkeypatch.setattr(fork_server, "_TERMINATE_S", 0)
    monkeypatch.setattr(os, "killpg", killpg)
    keeper._end_leftovers(group)
    assert sent == [(group, signal.SIGTERM), (group, 0), (group, signal.SIGKILL), (group, 0)]


def test_no_zombies_of_background_commands():
    """A rank can wait for all of its children, and only for these."""

    def children():
        os.system("true & sleep 0.1 &")  # orphans of a shell that exits
        own = subprocess.Popen(["true"])
        time.sleep(0.5)
        states = [each.status() for each in psutil.Process().children()]
        return len(states), own.wait()

    assert wrapper(ranks(1))(children)() == ((1, 0),)


def test_processes_of_other_ranks_go_on():
    """A daemon of a rank ends with this rank, while others of the same script go on."""

    def start():
        return subprocess.Popen(["sleep", "600"], start_new_session=True).pid

    with ranks(1).open() as opened:
        (kept,) = opened(start)
        (ended,) = wrapper(ranks(1))(start)()
        assert (is_gone(ended), is_gone(kept)) == (True, False)
    assert is_gone(kept)


ENDS = {
    "returns": (),
    "raises": ValueError,
    "killed": RankDiedError,
    "cancelled": LaunchCancelledError,
}


ESCAPES = 5
"""The number of processes of `run_and_end` that write their ids."""


def run_and_end(folder, end):
    """Start processes in and outside this process group, wait until all have written their ids, and
    end in this way.
    """

    def write(pid):
        (folder / f"{pid}.pid").touch()

    write(os.getpid())
    write(subprocess.Popen(["sleep", "600"]).pid)
    write(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    if os.fork() == 0:  # a daemon that runs this program, and whose parent exits
        os.setsid()
        if os.fork() == 0:
            write(os.getpid())
            while True:
                time.sleep(600)
        os._exit(0)
    os.wait()
    child = subprocess.Popen(
        ["sh", "-c", "setsid sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    write(int(child.stdout.readline()))
    child.kill()
    child.wait()
    pids_in(folder, ESCAPES)
    if end == "raises":
        raise ValueError
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "cancelled":
        time.sleep(600)


def test_no_process_outlives_launch(tmp_path):
    survivors = {}
    try:
        for end in ENDS:
            (tmp_path / end).mkdir()
        launches = {end: wrapper(ranks(1))(run_and_end).submit(tmp_path / end, end) for end in ENDS}
        for end, launch in launches.items():
            escaped = pids_in(tmp_path / end, ESCAPES)
            if end == "cancelled":
                assert not any(map(is_gone, escaped))  # the other launches have ended
                launch.cancel()
            with contextlib.suppress(ENDS[end]):
                launch.results(timeout=PATIENCE_S)
            survivors[end] = [pid for pid in escaped if not is_gone(pid)]
    finally:
        for pid in [int(path.stem) for path in tmp_path.rglob("*.pid")]:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)
    assert survivors == {end: [] for end in ENDS}


def test_stubborn_process_ends():
    def starts():
        ignores = "trap '' TERM; echo up; while :; do sleep 0.1; done"
        child = subprocess.Popen(
            ["sh", "-c", ignores], stdout=subprocess.PIPE, start_new_session=True
        )
        child.stdout.readline()
        return child.pid

    (pid,) = wrapper(ranks(1))(starts)()
    assert is_gone(pid)

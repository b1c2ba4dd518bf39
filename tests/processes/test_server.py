"""The process that forks ranks: a fault of it fails at most one launch, and no process outlives its launch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchError, RankDiedError, current_rank, wrapper
from tests.helpers.processes import (
    ESCAPES,
    failure_of,
    is_gone,
    killing_survivors,
    notes_of,
    pids_in,
    ranks,
    run_and_end_function,
)
from tests.helpers.waiting import PATIENCE_S, eventually


def warm_pid():
    """Return the process id of the warm process; start a warm process if there is none."""
    (pid,) = wrapper(ranks(1))(os.getppid)()
    return pid


def test_killed_process_is_named():
    """The error names the signal, and the next launch works. A launch with ranks that start may survive."""

    def kills():
        if current_rank().global_rank == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    error = failure_of(kills)
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
        assert "the process that forks ranks" in text
        assert "SIGKILL" in text
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


# -- what ranks leave behind

ENDS = {"returns": (), "raises": ValueError, "killed": RankDiedError, "cancelled": LaunchCancelledError}


def test_no_process_outlives_launch(tmp_path):
    run, survivors = run_and_end_function(), {}
    with killing_survivors(tmp_path):
        for end in ENDS:
            (tmp_path / end).mkdir()
        launches = {end: wrapper(ranks(1))(run).submit(tmp_path / end, end) for end in ENDS}
        for end, launch in launches.items():
            escaped = pids_in(tmp_path / end, ESCAPES)
            if end == "cancelled":
                assert not any(map(is_gone, escaped))  # the other launches have ended
                launch.cancel()
            with contextlib.suppress(ENDS[end]):
                launch.results(timeout=PATIENCE_S)
            survivors[end] = [pid for pid in escaped if not is_gone(pid)]
    assert survivors == {end: [] for end in ENDS}


def test_stubborn_process_ends():
    def starts():
        ignores = "trap '' TERM; echo up; while :; do sleep 0.1; done"
        child = subprocess.Popen(["sh", "-c", ignores], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        return child.pid

    (pid,) = wrapper(ranks(1))(starts)()
    assert is_gone(pid)


def test_leaked_memory_is_freed():
    """Python's resource tracker frees the memory at the end of a rank, also of one that dies."""

    def forgets():
        from multiprocessing import shared_memory

        print(*(shared_memory.SharedMemory(create=True, size=100).name for _ in range(3)), flush=True)
        dist.barrier()  # the first rank to die ends the other, after its tracker has registered the memory
        os._exit(3)

    launch = wrapper(ranks())(forgets).submit()
    eventually(launch.done, "the end of the launch")
    names = [name for rank in range(2) for name in launch.logs(rank).splitlines()[0].split()]
    assert len(names) == 6
    eventually(lambda: not any(Path("/dev/shm", name).exists() for name in names), "the removal of the shared memory")

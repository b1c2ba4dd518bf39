"""A launch ends every process that its ranks started."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import LaunchCancelledError, RankDiedError, wrapper
from parawrap.launch.guard import _orphan_processes
from tests.helpers.processes import ESCAPES, is_gone, killing_survivors, pids_in, ranks, run_and_end_function
from tests.helpers.waiting import PATIENCE_S, eventually

ENDS = {"returns": (), "raises": ValueError, "killed": RankDiedError, "cancelled": LaunchCancelledError}


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_no_process_outlives_launch(method, tmp_path):
    run, survivors = run_and_end_function(), {}
    ends = ENDS if method == "forkserver" else ["killed"]
    with killing_survivors(tmp_path):
        for end in ends:
            (tmp_path / end).mkdir()
        launches = {end: wrapper(ranks(1, spawn_method=method))(run).submit(tmp_path / end, end) for end in ends}
        for end, launch in launches.items():
            escaped = pids_in(tmp_path / end, ESCAPES)
            if end == "cancelled":
                assert not any(map(is_gone, escaped))  # the other launches have ended
                launch.cancel()
            with contextlib.suppress(ENDS[end]):
                launch.results(timeout=PATIENCE_S)
            survivors[end] = [pid for pid in escaped if not is_gone(pid)]
    assert survivors == {end: [] for end in ends}


def test_stubborn_process_ends(monkeypatch):
    monkeypatch.setattr(_orphan_processes, "_PATIENCE_S", 0.5)

    def starts():
        ignores = "trap '' TERM; echo up; while :; do sleep 0.1; done"
        child = subprocess.Popen(["sh", "-c", ignores], stdout=subprocess.PIPE, start_new_session=True)
        child.stdout.readline()
        return child.pid

    (pid,) = wrapper(ranks(1, spawn_method="fork"))(starts)()  # with fork, this process itself ends the ranks' leftovers
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

"""Promise 4 in the long run: many launches leave no processes, files, threads, or memory behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from parawrap import wrapper
from tests.helpers.processes import assert_gone, is_gone, pids_in, ranks, run_script, running_scripts
from tests.helpers.waiting import PATIENCE_S, eventually

COUNT = int(os.environ.get("PARAWRAP_LAUNCHES", "80"))
"""Number of launches. A higher PARAWRAP_LAUNCHES, such as 200, compares memory over a longer time."""

LAUNCHES = """
import contextlib, gc, json, os, sys, tempfile, threading, time
from pathlib import Path
import psutil, torch, torch.distributed as dist
from parawrap import LaunchError, Platform, current_rank, wrapper

me = psutil.Process()
folder = tempfile.gettempdir()
fields = dict(device="cpu", verbose=False, grace_s=0.5)

def resources():
    gc.collect()
    return {
        "processes": sorted(each.pid for each in me.children(recursive=True)),
        "descriptors": {name: os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")
                        if os.path.lexists(f"/proc/self/fd/{name}")},
        "threads": sorted(each.name for each in threading.enumerate()),
        "temporary": sorted(map(str, Path(folder).rglob("*"))),
        "shared": sorted(os.listdir("/dev/shm")),
        "maps": Path("/proc/self/maps").read_text().count("memfd:parawrap"),
        "memory": me.memory_info().rss,
    }

def works(how):
    total = torch.ones(1 << 18)  # a megabyte: its file is mapped
    dist.all_reduce(total)
    is_last = current_rank().global_rank == current_rank().world_size - 1
    if is_last and how == "raises":
        raise ValueError
    if is_last and how == "dies":
        os._exit(3)
    if how != "returns":
        time.sleep(60)
    return total

def submit(i):
    how = ("returns", "returns", "returns", "raises", "returns", "dies", "returns", "cancelled")[i % 8]
    count = 2 if i % 3 == 0 else 1
    platform = Platform(**fields, n_cpus=count, ipc_protocol=("tcp", "file")[i // 8 % 2])
    running = wrapper(platform)(works).submit(how)
    return how, count, running

def finish(how, count, running):
    if how == "cancelled":
        running.cancel()
    with contextlib.suppress(ValueError, LaunchError):
        assert [each.sum().item() for each in running.results(timeout=30)] == [count * float(1 << 18)] * count
        assert how == "returns"

def launch(count, at_once=4):
    for i in range(0, count, at_once):
        for submitted in [submit(j) for j in range(i, i + at_once)]:
            finish(*submitted)

launch(16)
before = resources()
launch(int(sys.argv[1]))
print(json.dumps([before, resources()]))
"""


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A parent's resources before and after many launches that return, raise, die, or are cancelled."""
    folder = tmp_path_factory.mktemp("launches")
    private = tmp_path_factory.mktemp("private")
    environment = {**os.environ, "TMPDIR": str(private)}
    before, after = json.loads(run_script(folder, LAUNCHES, COUNT, env=environment, patience_s=6 * PATIENCE_S))
    return before, after


def uses_many_launches(test):
    """Raise the timeout: the first test to run waits for all launches, half a minute or more."""
    return pytest.mark.stress(pytest.mark.timeout(7 * PATIENCE_S)(test))


@uses_many_launches
@pytest.mark.parametrize("resource", ["processes", "threads", "temporary", "maps"])
def test_many_launches_leave_no_resources(resource, many):
    """Processes, threads, temporary files, and mapped files are the same as before."""
    before, after = many
    assert after[resource] == before[resource]


@uses_many_launches
def test_many_launches_leave_no_shared_memory(many):
    """/dev/shm has no new files. Files of other programs may exist for a moment."""
    before, after = many
    new = [Path("/dev/shm", name) for name in set(after["shared"]) - set(before["shared"])]
    eventually(lambda: not any(map(Path.exists, new)), f"the removal of {new}", PATIENCE_S)


@uses_many_launches
def test_many_launches_leave_no_descriptors(many):
    """The number of open files is the same as before."""
    before, after = many
    assert len(after["descriptors"]) == len(before["descriptors"]), after["descriptors"]


@uses_many_launches
def test_memory_stays_flat_over_many_launches(many):
    """Memory grows by at most 60 KB per launch, or by 12 MB of allocator noise."""
    before, after = many
    assert after["memory"] - before["memory"] < max(COUNT * 60 << 10, 12 << 20)


def test_outdated_warm_processes_are_reaped(monkeypatch):
    """A changed environment needs a new warm process; old warm processes do not accumulate, not even as zombies."""
    launchable = wrapper(ranks(1))(lambda: 1)
    launchable()
    before = len(psutil.Process().children())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    launchable()
    monkeypatch.undo()

    def is_alone():
        launchable()  # a launch may reap old processes
        return len(psutil.Process().children()) == before

    eventually(is_alone, "only one warm process", PATIENCE_S)


@pytest.mark.parametrize("end", ["returns", "dies"])
def test_leaked_shared_memory_of_a_rank_is_freed(end):
    """Python's resource tracker frees the memory at the end of a rank."""

    def forgets():
        from multiprocessing import shared_memory

        names = [shared_memory.SharedMemory(create=True, size=100).name for _ in range(3)]
        print(*names, flush=True)
        dist.barrier()  # the first rank to die ends the other, after its tracker has registered the memory
        if end == "dies":
            os._exit(3)

    shared = Path("/dev/shm")
    before = set(shared.glob("psm_*"))  # Python's prefix; other programs also use this folder
    for _ in range(3):
        launch = wrapper(ranks())(forgets).submit()
        eventually(launch.done, "the end of the launch")
        assert all(len(launch.logs(rank).split()) >= 3 for rank in range(2))
    eventually(lambda: set(shared.glob("psm_*")) <= before, "the removal of the shared memory", PATIENCE_S)


FORKING = """
import os, signal, sys, time
from parawrap import Platform, wrapper

method, folder, end = sys.argv[1:]

@wrapper(Platform(device="cpu", n_cpus=2, spawn_method=method, grace_s=1))
def waits():
    report_pid(folder)
    while not os.path.exists(folder + "/go"):
        time.sleep(0.01)
    return 1

launch = waits.submit()
while len([name for name in os.listdir(folder) if name.endswith(".pid")]) < 2:
    time.sleep(0.01)
if os.fork() == 0:
    if end == "exit":
        sys.exit()
    report_pid(folder)
    time.sleep(600)
if end == "exit":
    os.wait()
    open(folder + "/go", "w").close()
    print(launch.results(timeout=20))
time.sleep(600 if end == "kill" else 0)
"""


@pytest.fixture(scope="module")
def forking(tmp_path_factory):
    """Parents that fork while a launch runs, by spawn method and by the way they end."""
    cases = [("forkserver", "kill"), ("fork", "kill"), ("forkserver", "exit")]
    scripts = {case: lambda folder, case=case: (FORKING, case[0], folder, case[1]) for case in cases}
    with running_scripts(tmp_path_factory.mktemp("forking"), scripts) as started:
        yield started


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_a_fork_of_the_parent_keeps_no_rank_alive(method, forking):
    """After a killed parent, its ranks end, although a fork of the parent still runs."""
    parent, place = forking[method, "kill"]
    pids_in(place, 3)
    family = [each.pid for each in psutil.Process(parent.pid).children(recursive=True)]
    forks = [pid for pid in family if (place / f"{pid}.pid").exists()]
    fork = max(forks, key=lambda pid: psutil.Process(pid).create_time())
    try:
        parent.kill()
        parent.wait()
        assert_gone([pid for pid in family if pid != fork])
        assert not is_gone(fork)
    finally:
        for pid in family:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_exit_of_a_fork_ends_no_rank(forking):
    """A fork of the parent that exits does not run the parent's exit handlers."""
    parent, _ = forking["forkserver", "exit"]
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output == "RankResults(1, 1)\n"

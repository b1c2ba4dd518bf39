"""No rank survives its parent."""

from __future__ import annotations

import psutil
import pytest

from tests.helpers.processes import ESCAPES, ESCAPING, assert_gone, is_gone, killing_survivors, pids_in, running_scripts
from tests.helpers.waiting import PATIENCE_S

PARENT = f"""
{ESCAPING}
import ctypes
import torch, torch.distributed as dist
from parawrap import Platform, current_rank, wrapper

method, folder, own, end = sys.argv[1:]
platform = Platform(device="cpu", n_cpus=1 if method == "spawn" else 2, spawn_method=method, grace_s=1)

@wrapper(platform)
def works():
    rank = current_rank()
    escape(folder + f"/{{rank.global_rank}}")
    if rank.global_rank:
        dist.all_reduce(torch.ones(1))
    if end == "killed":
        ctypes.PyDLL(None).sleep(600)  # holds the GIL
    time.sleep(600)

@wrapper(platform)
def returns():
    while not os.path.exists(own + "/go"):
        time.sleep(0.01)
    return 1

def fork(then):
    pid = os.fork()
    if pid == 0:
        then()
    return pid

unrelated = subprocess.Popen("exec sleep 600 >/dev/null 2>&1", shell=True, start_new_session=True)
report_pid(own, unrelated.pid)
if end == "exits":
    launch = returns.submit()
    os.waitpid(fork(sys.exit), 0)  # a fork that exits runs no exit handler of its parent
    open(own + "/go", "w").close()
    print(launch.results(timeout={PATIENCE_S}), flush=True)
launch = works.submit()
while len(list(pathlib.Path(folder).glob("*/*.pid"))) < platform.world_size * {ESCAPES}:
    time.sleep(0.01)
if end == "killed":
    fork(lambda: (report_pid(own), time.sleep(600)))
    launch.results()
"""
KILLED = [("killed", method) for method in ("forkserver", "spawn", "fork")]


@pytest.fixture(scope="module")
def parents(tmp_path_factory):
    """Parents of running ranks, by the way they end; started together, because each of them loads torch."""

    def parent(folder, end, method):
        own, launched = folder / "own", folder / "launched"
        for each in (own, launched / "0", launched / "1"):
            each.mkdir(parents=True)
        return PARENT, method, launched, own, end

    cases = [("exits", "forkserver"), *KILLED]
    root = tmp_path_factory.mktemp("parents")
    scripts = {case: lambda folder, case=case: parent(folder, *case) for case in cases}
    with killing_survivors(root), running_scripts(root, scripts) as started:
        yield started


def pids_of_ranks(folder):
    """Return the process ids of ranks and of the processes that they started, once all are reported."""
    return [pid for rank in (folder / "launched").iterdir() if any(rank.iterdir()) for pid in pids_in(rank, ESCAPES)]


@pytest.mark.parametrize("case", KILLED, ids=lambda case: case[1])
def test_killed_parent_has_no_rank(case, parents):
    """Nor do their processes survive, although a fork of the parent still runs, which is left alone."""
    parent, folder = parents[case]
    own = pids_in(folder / "own", 2)  # its subprocess and its fork
    family = {each.pid for each in psutil.Process(parent.pid).children(recursive=True)} - set(own)
    parent.kill()
    parent.wait(timeout=PATIENCE_S)
    assert_gone(family.union(pids_of_ranks(folder)))
    assert not any(map(is_gone, own))


def test_ranks_end_with_parent(parents):
    """A parent that exits while ranks run leaves no process. A fork of it that exits ends no rank."""
    parent, folder = parents["exits", "forkserver"]
    output, _ = parent.communicate(timeout=PATIENCE_S)
    assert output.splitlines()[0] == "RankResults(1, 1)"
    assert parent.returncode == 0
    assert_gone(pids_of_ranks(folder))

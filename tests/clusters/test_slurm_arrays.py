"""Several launches in one job array: each has its own results, output, and end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from parawrap import LaunchCancelledError, LaunchError, Platform
from parawrap.launch._job import Job
from parawrap.launch.slurm import launcher
from tests.launch.processes import eventually

pytestmark = pytest.mark.slurm

PATIENCE_S = 100.0


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """The folder of launches; nothing is left in it."""
    folder = tmp_path / "launches"
    monkeypatch.setenv("PARAWRAP_LAUNCH_DIR", str(folder))
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def cluster(slurm, folders):
    yield slurm
    slurm.settle()


def launched(function, arguments, max_parallel=None, **fields):
    """A launch of one rank for each of these arguments, in one array."""
    platform = Platform(**{"device": "slurm", "verbose": False, "ipc_groups": None} | fields)
    return launcher.launch_all([Job(platform, function, (each,)) for each in arguments], max_parallel)


def ending(cluster, launch):
    """The results of a launch, or what it raises; jobs that were requeued start soon."""
    eventually(lambda: cluster.hasten() or launch.done(), f"the end of {launch}", PATIENCE_S)
    try:
        return launch.results()
    except Exception as error:
        return error


def begun(folder, name):
    """Wait until a rank has created this file."""
    eventually(lambda: (folder / name).exists(), f"{name} in {folder}", PATIENCE_S)


def wait_for(path):
    """Runs in a rank: return the restart when the test has created `path`; raise if it is to raise."""
    from parawrap import current_rank

    rank = current_rank()
    path.with_name(f"{path.name}-begun-{rank.restart}").touch()
    while not path.exists():
        if rank.should_checkpoint():
            rank.requeue()
        time.sleep(0.05)
    return rank.restart


def test_an_array_gives_each_launch_its_results(cluster, folders):
    """Results, errors, and output come to their own launch, and Slurm has a single job."""

    def numbered(number):
        print("number", number)
        if number == 3:
            raise KeyError(number)
        return number, os.environ["SLURM_ARRAY_JOB_ID"]

    launches = launched(numbered, range(6))
    assert len(list(folders.iterdir())) == 1
    endings = [ending(cluster, launch) for launch in launches]
    (job,) = {each[0][1] for number, each in enumerate(endings) if number != 3}
    assert [each[0][0] for number, each in enumerate(endings) if number != 3] == [0, 1, 2, 4, 5]
    assert repr(endings[3]) == "KeyError(3)"
    assert [launch.logs(0).splitlines()[0] for launch in launches] == [f"number {number}" for number in range(6)]
    assert [launch.state for launch in launches] == [*["finished"] * 3, "failed", *["finished"] * 2]
    assert cluster.job(f"{job}_0")["ArrayJobId"] == job


def test_no_more_launches_run_than_allowed(cluster):
    """With `max_parallel=2`, the third waits until one of the others has ended."""

    def span(_number):
        begun_at = time.time()
        time.sleep(1)
        return begun_at, time.time()

    spans = [ending(cluster, launch)[0] for launch in launched(span, range(5), max_parallel=2)]
    for begun_at, _ in spans:
        assert sum(start <= begun_at < end for start, end in spans) <= 2


def test_a_launch_of_an_array_is_cancelled_alone(cluster, tmp_path):
    """Cancel of a running element and of a pending one leaves the others as they are."""
    paths = [tmp_path / str(number) for number in range(4)]
    launches = launched(wait_for, paths, max_parallel=2)
    for name in ("0-begun-0", "1-begun-0"):
        begun(tmp_path, name)
    eventually(lambda: [launch.state for launch in launches] == ["running", "running", "pending", "pending"], "the states")
    launches[2].cancel()
    launches[0].cancel()
    for path in paths:
        path.touch()
    endings = [ending(cluster, launch) for launch in launches]
    assert [type(each) for each in endings[0::2]] == [LaunchCancelledError] * 2
    assert [each[0] for each in endings[1::2]] == [0, 0]
    assert [launch.state for launch in launches] == ["cancelled", "finished", "cancelled", "finished"]
    assert not Path(tmp_path, "2-begun-0").exists()


@pytest.mark.parametrize("number", [0, 2])
def test_a_launch_of_an_array_is_requeued_alone(number, cluster, tmp_path):
    """A preempted element starts again. Only that one: not the rest of the array, whose number the last element has too."""
    paths = [tmp_path / str(number) for number in range(3)]
    launches = launched(wait_for, paths)
    for other in range(3):
        begun(tmp_path, f"{other}-begun-0")
    eventually(lambda: {launch.state for launch in launches} == {"running"}, "the states")
    launches[number].preempt()
    eventually(lambda: cluster.hasten() or (tmp_path / f"{number}-begun-1").exists(), "the restart", PATIENCE_S)
    for path in paths:
        path.touch()
    expected = [1 if other == number else 0 for other in range(3)]
    assert [ending(cluster, launch)[0] for launch in launches] == expected


def test_a_pending_launch_of_an_array_has_nothing_to_lose(cluster, tmp_path):
    """`preempt` of an element that has not started returns soon and changes nothing."""
    paths = [tmp_path / str(number) for number in range(2)]
    launches = launched(wait_for, paths, max_parallel=1)
    begun(tmp_path, "0-begun-0")
    began = time.monotonic()
    launches[1].preempt()
    assert time.monotonic() - began < 20
    for path in paths:
        path.touch()
    assert [ending(cluster, launch)[0] for launch in launches] == [0, 0]


def test_a_pending_launch_that_somebody_else_cancels_says_so(cluster, tmp_path):
    """Slurm forgets such an element at once."""
    paths = [tmp_path / str(number) for number in range(2)]
    launches = launched(wait_for, paths, max_parallel=1)
    begun(tmp_path, "0-begun-0")
    (job,) = {line.partition("_")[0] for line in cluster.run("squeue", "--noheader", "--format", "%i").split()}
    cluster.run("scancel", f"{job}_1")
    error = ending(cluster, launches[1])
    paths[0].touch()
    assert isinstance(error, LaunchCancelledError)
    assert f"Slurm job {job}_1 was removed from the queue" in str(error)
    assert ending(cluster, launches[0])[0] == 0


def test_an_array_that_slurm_refuses_leaves_nothing(cluster, folders):
    """One error for all, and no folder."""
    with pytest.raises(LaunchError, match=r"invalid partition specified: nowhere.* The job is an array of 3;"):
        launched(wait_for, range(3), partition="nowhere")
    assert not list(folders.iterdir())

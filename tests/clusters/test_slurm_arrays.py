"""Several launches in one job array: each has its own results, output, and end."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from parawrap import LaunchCancelledError, LaunchError, Platform
from parawrap.launch._packed_call import Job
from parawrap.launch.slurm._slurm_launcher import launcher
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slurm

PATIENCE_S = 100.0


def submit_array(function, arguments, max_parallel=None, **fields):
    """Submit one array with a launch of one rank per argument."""
    platform = Platform(**{"device": "slurm", "verbose": False, "ipc_groups": None} | fields)
    return launcher.launch_all([Job(platform, function, (each,)) for each in arguments], max_parallel)


def ending(cluster, launch):
    """Wait for a launch and return its results or its exception; requeued jobs start without delay."""
    eventually(lambda: cluster.hasten() or launch.done(), f"the end of {launch}", PATIENCE_S)
    try:
        return launch.results()
    except Exception as error:
        return error


def wait_for_file(folder, name):
    """Wait until a rank has created a file."""
    eventually(lambda: (folder / name).exists(), f"{name} in {folder}", PATIENCE_S)


def wait_in_rank(path):
    """Run in a rank: requeue on preemption, and return the restart once the test has created `path`."""
    from parawrap import current_rank

    rank = current_rank()
    path.with_name(f"{path.name}-begun-{rank.restart}").touch()
    while not path.exists():
        if rank.should_checkpoint():
            rank.requeue()
        time.sleep(0.05)
    return rank.restart


def test_an_array_gives_each_launch_its_results(cluster, folders):
    """Each launch has its own results, error, and output, and all run in one Slurm job."""

    def numbered(number):
        print("number", number)
        if number == 3:
            raise KeyError(number)
        return number, os.environ["SLURM_ARRAY_JOB_ID"]

    launches = submit_array(numbered, range(6))
    assert len(list(folders.iterdir())) == 1
    endings = [ending(cluster, launch) for launch in launches]
    (job,) = {each[0][1] for number, each in enumerate(endings) if number != 3}
    assert [each[0][0] for number, each in enumerate(endings) if number != 3] == [0, 1, 2, 4, 5]
    assert repr(endings[3]) == "KeyError(3)"
    assert [launch.logs(0).splitlines()[0] for launch in launches] == [f"number {number}" for number in range(6)]
    assert [launch.state for launch in launches] == [*["finished"] * 3, "failed", *["finished"] * 2]
    assert cluster.job(f"{job}_0")["ArrayJobId"] == job


def test_no_more_launches_run_than_allowed(cluster):
    """With `max_parallel=2`, at most two launches of an array run at once."""

    def span(_number):
        begun_at = time.time()
        time.sleep(1)
        return begun_at, time.time()

    spans = [ending(cluster, launch)[0] for launch in submit_array(span, range(5), max_parallel=2)]
    for begun_at, _ in spans:
        assert sum(start <= begun_at < end for start, end in spans) <= 2


def test_a_launch_of_an_array_is_cancelled_alone(cluster, tmp_path):
    """Cancelling a running and a pending element does not affect the other elements."""
    paths = [tmp_path / str(number) for number in range(4)]
    launches = submit_array(wait_in_rank, paths, max_parallel=2)
    for name in ("0-begun-0", "1-begun-0"):
        wait_for_file(tmp_path, name)
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
    """Preempting an element requeues only this element. The last element also has the job number of the whole array."""
    paths = [tmp_path / str(number) for number in range(3)]
    launches = submit_array(wait_in_rank, paths)
    for other in range(3):
        wait_for_file(tmp_path, f"{other}-begun-0")
    eventually(lambda: {launch.state for launch in launches} == {"running"}, "the states")
    launches[number].preempt()
    eventually(lambda: cluster.hasten() or (tmp_path / f"{number}-begun-1").exists(), "the restart", PATIENCE_S)
    for path in paths:
        path.touch()
    expected = [1 if other == number else 0 for other in range(3)]
    assert [ending(cluster, launch)[0] for launch in launches] == expected


def test_preempting_a_pending_launch_does_nothing(cluster, tmp_path):
    """`preempt` of an element that has not started returns soon and changes nothing."""
    paths = [tmp_path / str(number) for number in range(2)]
    launches = submit_array(wait_in_rank, paths, max_parallel=1)
    wait_for_file(tmp_path, "0-begun-0")
    began = time.monotonic()
    launches[1].preempt()
    assert time.monotonic() - began < 20
    for path in paths:
        path.touch()
    assert [ending(cluster, launch)[0] for launch in launches] == [0, 0]


def test_scancel_of_a_pending_launch_raises(cluster, tmp_path):
    """LaunchCancelledError names the element, although Slurm forgets a cancelled pending element at once."""
    paths = [tmp_path / str(number) for number in range(2)]
    launches = submit_array(wait_in_rank, paths, max_parallel=1)
    wait_for_file(tmp_path, "0-begun-0")
    (job,) = {line.partition("_")[0] for line in cluster.run("squeue", "--noheader", "--format", "%i").split()}
    cluster.run("scancel", f"{job}_1")
    error = ending(cluster, launches[1])
    paths[0].touch()
    assert isinstance(error, LaunchCancelledError)
    assert f"Slurm job {job}_1 was removed from the queue" in str(error)
    assert ending(cluster, launches[0])[0] == 0


def test_a_refused_array_leaves_no_files(cluster, folders):
    """If Slurm refuses an array, one LaunchError is raised, and no launch folder remains."""
    with pytest.raises(LaunchError, match=r"invalid partition specified: nowhere.* The job is an array of 3;"):
        submit_array(wait_in_rank, range(3), partition="nowhere")
    assert not list(folders.iterdir())

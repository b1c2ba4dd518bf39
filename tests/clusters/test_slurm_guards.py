"""The guard in each task of a Slurm launch: what ranks leave behind, time to clean up, and deaths of guards themselves."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from parawrap import Platform, RankDiedError, current_rank, wrapper
from parawrap.launch.coordinator import _launch
from tests.contract import scenarios
from tests.contract.harness import assert_no_survivors, wait_for_reports
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.slurm

PATIENCE_S = 100.0


def submit(function, *args, **fields):
    """Launch one rank on each of two nodes."""
    return wrapper(Platform(device="slurm", n_nodes=2, verbose=False, **fields))(function).submit(*args)


def leave_a_process_behind(folder, ending):
    """Leave a process in a session of its own, which holds a lock, and end."""
    rank = current_rank().global_rank
    lock = Path(folder, f"life-{rank}").open("w")  # noqa: SIM115 (held by the process)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command = ["bash", "-c", "setsid sleep 600 & disown"]
    subprocess.run(command, pass_fds=[lock.fileno()], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not all(Path(folder, f"life-{each}").exists() for each in range(2)):  # a failure ends the other rank
        time.sleep(0.01)
    if ending == "returns":
        return rank
    if ending == "raises":
        raise KeyError(rank)
    os._exit(7)


@pytest.mark.parametrize("ending", ["returns", "raises", "exits"])
def test_processes_that_left_the_group_are_ended(ending, cluster, tmp_path):
    """A process in another session ends with its rank, however the rank ends."""
    launch = submit(leave_a_process_behind, tmp_path, ending, ipc_groups=None)
    if ending == "returns":
        assert list(launch.results(PATIENCE_S)) == [0, 1]
    else:
        with pytest.raises(KeyError if ending == "raises" else RankDiedError):
            launch.results(PATIENCE_S)
    assert_no_survivors(tmp_path, 2)


def clean_up_slowly(folder):
    """Rank 1 fails; rank 0 needs longer to clean up than Slurm waits here between SIGTERM and SIGKILL."""
    if current_rank().global_rank == 1:
        while not Path(folder, "begun").exists():
            time.sleep(0.01)
        raise KeyError
    try:
        Path(folder, "begun").touch()
        time.sleep(600)
    finally:
        time.sleep(2.5)
        Path(folder, "cleaned").touch()


def test_other_ranks_have_time_to_clean_up(cluster, tmp_path):
    """After a failure, the `finally` blocks of the other ranks have ``grace_s``, although Slurm would give them less."""
    with pytest.raises(KeyError):
        submit(clean_up_slowly, tmp_path, ipc_groups=None).results(PATIENCE_S)
    assert (tmp_path / "cleaned").exists()


def kill_guard(restarts):
    """In the first attempts, rank 1 kills the task that guards it while rank 0 waits for it."""
    rank = current_rank()
    if rank.restart < restarts and rank.global_rank == 1:
        server = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()
        os.kill(int(server[1]), signal.SIGKILL)
        time.sleep(600)
    dist.barrier()
    return rank.restart


def test_the_death_of_a_guard_is_the_death_of_its_rank(cluster):
    """RankDiedError names the rank of the killed task, and the reason from Slurm."""
    with pytest.raises(RankDiedError, match="rank 1 of 2 was lost with its task in Slurm job") as raised:
        submit(kill_guard, 1).results(PATIENCE_S)
    assert "Killed" in str(raised.value)
    assert raised.value.rank == 1


def test_a_launch_restarts_after_the_death_of_a_guard(cluster):
    """The loop in the batch script starts all tasks again."""
    assert list(submit(kill_guard, 1, max_restarts=1).results(PATIENCE_S)) == [1, 1]


def fail_then_requeue(folder):
    """Fail, then call requeue, then fail, then return."""
    rank = current_rank()
    if rank.restart in (0, 2) and rank.global_rank == 1:
        raise ValueError(rank.restart)
    dist.barrier()
    if rank.restart == 1:
        rank.requeue()
    return rank.restart


@pytest.mark.parametrize("max_restarts", [1, 2])
def test_failures_count_over_all_starts_of_the_job(max_restarts, cluster, tmp_path):
    """A requeue is no failure, and does not allow more failures than `max_restarts`."""
    launch = submit(fail_then_requeue, tmp_path, max_restarts=max_restarts)
    eventually(lambda: cluster.hasten() or launch.done(), "the end", PATIENCE_S)
    if max_restarts == 2:
        assert list(launch.results()) == [3, 3]
        return
    with pytest.raises(ValueError, match="2") as raised:
        launch.results()
    assert "attempt 0 failed: rank 1 raised ValueError: 0" in raised.value.__notes__


def test_an_interrupted_results_call_keeps_the_results(cluster, folders, monkeypatch):
    """After a Ctrl-C while results are read, `results` returns them, although the launch has removed its folder."""
    launch = submit(lambda: current_rank().global_rank, ipc_groups=None)
    eventually(launch.done, "the end", PATIENCE_S)

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_launch, "results_or_error", interrupt)
        with pytest.raises(KeyboardInterrupt):
            launch.results()
    assert list(folders.iterdir()) == []
    assert list(launch.results()) == [0, 1]


def test_ranks_use_the_interface_between_the_nodes(cluster):
    """GLOO_SOCKET_IFNAME has the interface of the connection to the first node."""
    assert list(submit(lambda: os.environ["GLOO_SOCKET_IFNAME"]).results(PATIENCE_S)) == ["eth0", "eth0"]


def report_and_wait(folder):
    Path(folder, f"begun-{current_rank().global_rank}").touch()
    time.sleep(600)


def test_sigterm_ends_ranks_that_do_not_save(cluster, tmp_path):
    """Slurm sends SIGTERM to all tasks before it kills them, and the ranks have ended by then."""
    launch = submit(report_and_wait, tmp_path, ipc_groups=None, grace_s=1.0)
    wait_for_reports(tmp_path, "begun", 2)
    (number,) = cluster.run("squeue", "--noheader", "--format", "%i").split()
    cluster.run("scancel", "--signal=TERM", number)
    with pytest.raises(RankDiedError, match="was killed by SIGTERM"):
        launch.results(PATIENCE_S)


def test_an_urgent_job_preempts_a_launch_at_one_step(cluster, tmp_path):
    """Slurm's signal makes all ranks save at the same step; the job is requeued, and continues from that step."""
    launch = submit(
        scenarios.count_until_preempted, tmp_path, 5, grace_s=20, slurm_additional_parameters={"exclusive": True}
    )
    wait_for_reports(tmp_path, "counting0", 2)
    cluster.run("sbatch", "--partition", "urgent", "--exclusive", "--nodes", "2", "--output", "/dev/null", "--wrap", "true")
    eventually(lambda: cluster.hasten() or launch.done(), "the end", PATIENCE_S)
    (due,) = {int(step) for step in wait_for_reports(tmp_path, "due", 2)}
    assert list(launch.results()) == [(due, due + 5, 1)] * 2


def test_a_lost_node_wins_over_its_consequences(cluster, tmp_path):
    """Ranks that wait for the lost node in a collective fail too; RankDiedError names the node that Slurm lost."""
    launch = submit(wait_for_each_other, tmp_path)
    wait_for_reports(tmp_path, "begun", 2)
    cluster.kill_node("node1")
    cluster.declare_down("node1")
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 was lost with its node, in Slurm job \d+ \(node 1, node1\)"):
        launch.results(PATIENCE_S)


def wait_for_each_other(folder):
    scenarios.report(folder, "begun")
    while True:
        dist.barrier()

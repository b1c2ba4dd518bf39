"""Launches on a Ray cluster: lost nodes, interrupts, shutdowns, large values, and back pressure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parawrap import LaunchCancelledError, LaunchError, Platform, RankDiedError, current_rank, wrapper
from parawrap.launch.coordinator._transcript import Transcript
from parawrap.launch.ray import _node_actor, _reservation
from tests.contract import scenarios
from tests.contract.harness import PATIENCE_S, assert_no_survivors, wait_for_reports
from tests.helpers.processes import assert_gone, processes_in
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


@pytest.fixture(name="ray")
def _ray(ray_cluster):
    """The ray module. A launch joins the cluster, and the fixture leaves it."""
    import ray

    yield ray
    ray.shutdown()


def on_ray(function, **fields):
    """Decorate a function for one rank on each of two nodes, without process groups."""
    fields = {"n_nodes": 2, "verbose": False, "ipc_groups": None} | fields
    return wrapper(Platform(device="ray", **fields))(function)


def wait_in_first_attempt(folder):
    """Wait to be ended in the first attempt. Return the number of the attempt in later ones."""
    if current_rank().restart == 0:
        scenarios.wait_for_ever(folder)
    return current_rank().restart


def leave_daemon(folder):
    """Start a process that leaves the rank's process group, report both process ids, and wait to be ended."""
    daemon = subprocess.Popen(["sleep", "600"], start_new_session=True)
    scenarios.report(folder, "pids", f"{os.getpid()} {daemon.pid}")
    scenarios.wait_for_ever(folder)


def pids_of(folder):
    """Wait for the process ids that the two ranks of `leave_daemon` report."""
    return [int(pid) for text in wait_for_reports(folder, "pids", 2) for pid in text.split()]


def kill_an_actor():
    """Kill one of the node actors, as the kernel does if memory runs out."""
    processes_in("ray::NodeActor")[0].kill()


def state_of(ray, group):
    return ray.util.placement_group_table(group)["state"]


# -- the loss of a node


def test_a_restart_replaces_a_lost_node(ray, ray_cluster, tmp_path):
    """If a node is lost, the next attempt runs on the nodes that are left and on one that has joined since."""
    lost = ray_cluster.add_node()
    launch = on_ray(wait_in_first_attempt, n_nodes=3, max_restarts=1, ipc_groups=[]).submit(tmp_path)
    try:
        wait_for_reports(tmp_path, "begun", 3)
        ray_cluster.kill_node(lost)
        joined = ray_cluster.add_node()
        assert launch.results(PATIENCE_S) == (1, 1, 1)
        ray_cluster.kill_node(joined)
    finally:
        launch.cancel()
    assert_no_survivors(tmp_path, 3)


def test_a_launch_that_waits_for_another_node_can_be_cancelled(ray, ray_cluster, tmp_path):
    """If no node replaces a lost one, the next attempt waits for one, and `cancel` ends the wait."""
    lost = ray_cluster.add_node()
    launch = on_ray(wait_in_first_attempt, n_nodes=3, max_restarts=1).submit(tmp_path)
    wait_for_reports(tmp_path, "begun", 3)
    ray_cluster.kill_node(lost)
    eventually(lambda: launch._backend._attempts.restart == 1, "the second attempt")
    began = time.monotonic()
    launch.cancel()
    assert time.monotonic() - began < 10.0  # below the time to give up a node
    with pytest.raises(LaunchCancelledError):
        launch.results()
    assert_no_survivors(tmp_path, 3)


def test_the_ranks_of_a_killed_actor_end_and_restart(ray, tmp_path):
    """If the actor of a node is killed, its guard ends the ranks, and a new actor on the node starts the next attempt."""
    launch = on_ray(wait_in_first_attempt, max_restarts=1).submit(tmp_path)
    wait_for_reports(tmp_path, "begun", 2)
    kill_an_actor()
    assert launch.results(PATIENCE_S) == (1, 1)
    wait_for_reports(tmp_path, "cleaned", 2)
    assert_no_survivors(tmp_path, 2)


def test_the_error_of_a_killed_actor_says_that_its_node_was_lost(ray, tmp_path, caplog):
    """Without a restart, the launch raises RankDiedError, logs Ray's reason, and no process of the ranks survives."""
    launch = on_ray(leave_daemon).submit(tmp_path)
    pids = pids_of(tmp_path)
    kill_an_actor()
    with pytest.raises(RankDiedError, match="was lost with its node, which no longer answers"):
        launch.results(PATIENCE_S)
    (message,) = caplog.messages
    assert " of a launch is lost: its actor died: " in message
    assert_gone(pids)


# -- the end of the launching process, and of its connection to the cluster

KILLED_DRIVER = """
import os, pathlib, signal, sys, time
from tests.clusters.test_ray_launches import leave_daemon, on_ray

folder = pathlib.Path(sys.argv[1])
on_ray(leave_daemon).submit(folder)
while len(list(folder.glob("begun-*"))) < 2:
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_driver_leaves_no_process(ray_cluster, tmp_path):
    """If the launching process is killed, the ranks clean up and end, and so do processes that left their groups."""
    done = subprocess.run([sys.executable, "-c", KILLED_DRIVER, tmp_path], cwd=ROOT, timeout=PATIENCE_S, check=False)
    assert done.returncode == -signal.SIGKILL
    assert_gone(pids_of(tmp_path))
    wait_for_reports(tmp_path, "cleaned", 2)


def test_a_shutdown_of_ray_ends_every_launch(ray, tmp_path):
    """After `ray.shutdown()`, a running launch raises RankDiedError, and a pending one LaunchError."""
    launch = on_ray(leave_daemon, n_cpus=1, max_restarts=2).submit(tmp_path)
    pids = pids_of(tmp_path)
    pending = on_ray(leave_daemon, n_cpus=4).submit(tmp_path)
    eventually(lambda: pending._backend._reservation._group is not None, "the request")
    assert pending.state == "pending"
    ray.shutdown()
    with pytest.raises(RankDiedError, match="was lost with its node"):
        launch.results(PATIENCE_S)
    with pytest.raises(LaunchError, match=r"ray\.shutdown\(\) was called before the nodes of the launch were ready"):
        pending.results(PATIENCE_S)
    assert_gone(pids)
    assert not ray.is_initialized()


def test_an_interrupt_during_the_request_releases_the_resources(ray, monkeypatch):
    """A Ctrl-C while Ray makes the placement group removes the group."""
    groups = []
    make_group = ray.util.placement_group

    def interrupt(*args, **options):
        groups.append(make_group(*args, **options))
        eventually(main_thread_waits, "the wait for the launch")  # a signal in a finalizer would be lost
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return groups[0]

    monkeypatch.setattr(ray.util, "placement_group", interrupt)
    with pytest.raises(KeyboardInterrupt):
        on_ray(os.getpid)()
    eventually(lambda: state_of(ray, groups[0]) == "REMOVED", "the removal of the placement group")


def main_thread_waits():
    """True if the main thread waits for a launch."""
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code.co_filename.endswith("_interruptible_event.py")


def test_a_cancelled_pending_launch_releases_the_resources(ray, tmp_path):
    """`cancel` ends a launch that waits for resources, and removes its placement group."""
    launch = on_ray(scenarios.wait_for_ever, n_cpus=4).submit(tmp_path)
    wait_for_reports(tmp_path, "begun", 8)
    pending = on_ray(os.getpid).submit()
    group = eventually(lambda: pending._backend._reservation._group, "the request")
    assert pending.state == "pending"
    pending.cancel()
    assert pending.state == "cancelled"
    assert state_of(ray, group) == "REMOVED"
    launch.cancel()
    assert_no_survivors(tmp_path, 8)


# -- the Python of the nodes


def test_a_node_without_parawrap_is_named(ray, monkeypatch):
    """The error names the node, its Python, and the exception of the import."""
    program = _node_actor._PROGRAM.replace("from parawrap.", "from missing_parawrap.")
    monkeypatch.setattr(_node_actor, "_PROGRAM", program)
    _reservation._actor_class.cache_clear()
    try:
        with pytest.raises(LaunchError) as raised:
            on_ray(os.getpid)()
    finally:
        _reservation._actor_class.cache_clear()
    text = f"{os.uname().nodename}: {sys.executable} cannot import parawrap: ModuleNotFoundError("
    assert text in str(raised.value)
    assert str(raised.value).startswith("node ")


# -- large values


def test_large_results_and_arguments_arrive(ray):
    """A tensor above the size of the object store's share of a message arrives unchanged, in both directions."""
    tensor = torch.arange(8 * MIB)
    for result in on_ray(lambda given: given + 1)(tensor):
        assert torch.equal(result, tensor + 1)


def write_lines(count, folder):
    """Write lines of 1 KiB, and report how many have been written."""
    for number in range(count):
        sys.stdout.write("x" * 1023 + "\n")
        if number % 1024 == 0:
            scenarios.report(folder, f"written-{number // 1024}")


def test_much_output_arrives(ray, tmp_path):
    """100 MiB of output of each rank arrive in the log files."""
    launch = on_ray(write_lines, console_logs=tmp_path / "logs").submit(100 << 10, tmp_path)
    launch.results(PATIENCE_S)
    sizes = [path.stat().st_size for path in sorted(launch.log_folder.glob("rank*"))]
    assert sizes == [100 * MIB] * 2


def test_output_that_is_not_read_stays_in_the_rank(ray, tmp_path, monkeypatch):
    """While the launching process handles no output, a rank that writes is blocked."""
    may_write = threading.Event()
    write = Transcript.write

    def wait_and_write(self, *args):
        assert may_write.wait(PATIENCE_S)
        write(self, *args)

    def written():
        return len(list(tmp_path.glob("written-*")))

    def is_blocked():
        before = written()
        time.sleep(1.0)
        return before > 0 and written() == before

    monkeypatch.setattr(Transcript, "write", wait_and_write)
    launch = on_ray(write_lines, n_nodes=1).submit(60 << 10, tmp_path)
    try:
        eventually(is_blocked, "a rank that is blocked")
        assert written() < 30
    finally:
        may_write.set()
    assert launch.results(PATIENCE_S) == (None,)
    assert written() == 60


def keep(value):
    """Keep a value in this module for later calls."""
    global kept
    kept = value


def kept_with_rank(scale):
    """Return what `keep` kept, times `scale`, and the rank."""
    return kept * scale, current_rank().global_rank


def reduce_one():
    """Sum ones over the ranks."""
    value = torch.ones(1)
    dist.all_reduce(value)
    return value.item()


def fail_in_rank_0():
    """Raise in rank 0, while the other rank waits for it."""
    if current_rank().global_rank == 0:
        raise ValueError("of rank 0")
    reduce_one()


def test_ranks_stay_on_two_nodes(ray):
    """Ranks keep their state between calls, and answer with tensors."""
    with Platform(device="ray", n_nodes=2, verbose=False).open() as ranks:
        ranks(keep, torch.arange(300_000.0))
        answers = *ranks(kept_with_rank, 2), ranks[1](kept_with_rank, 2)
        assert [rank for _, rank in answers] == [0, 1, 1]
        assert all(torch.equal(value, 2 * torch.arange(300_000.0)) for value, _ in answers)
        with pytest.raises(ValueError, match="of rank 0"):
            ranks(fail_in_rank_0)
        assert ranks(reduce_one) == (2.0, 2.0)
        assert ranks(kept_with_rank, 1)[1][1] == 1


def test_a_dead_rank_ends_ranks_on_ray(ray):
    """The call raises RankDiedError, and so do later calls."""
    ranks = Platform(device="ray", n_nodes=2, verbose=False, ipc_groups=None).open()
    pids = ranks(os.getpid)
    with pytest.raises(RankDiedError, match="SIGKILL"):
        ranks[1](os.kill, pids[1], signal.SIGKILL)
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 was killed by SIGKILL"):
        ranks(os.getpid)
    ranks.close()
    assert_gone(pids)

"""Launches on a Ray cluster: lost nodes and actors, the end of the launching process, and large
values.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from parawrap import (
    LaunchCancelledError,
    LaunchError,
    Platform,
    RankDiedError,
    current_rank,
    wrapper,
)
from parawrap.launch.ray import _node_actor, reservation
from tests.contract import scenarios
from tests.contract.table import check_cell
from tests.helpers.launches import assert_no_survivors, results_of, wait_for_reports
from tests.helpers.processes import assert_gone, processes_in
from tests.helpers.ranks import all_sum
from tests.helpers.torchrun_world import ROOT
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.ray

MIB = 1 << 20


@pytest.fixture(name="ray")
def _ray(ray_cluster):
    """The ray module. A launch joins the cluster, and the fixture leaves it."""
    import ray

    ray.shutdown()  # tests of other files stay in the cluster
    yield ray
    ray.shutdown()


def on_ray(function, **fields):
    """Decorate a function for one rank on each of two nodes, without process groups."""
    fields = {"n_nodes": 2, "verbose": False, "ipc_groups": None} | fields
    return wrapper(Platform(device="ray", **fields))(function)


def in_each_start(scenario, folder):
    """Run a scenario of the contract in a folder of this start."""
    scenario(folder / str(current_rank().restart))


def folders_of_starts(folder):
    """Make the folders that `in_each_start` needs for two starts."""
    folders = [folder / str(start) for start in range(2)]
    for each in folders:
        each.mkdir()
    return folders


def pids_of(folder):
    """Wait for the process ids that the two ranks of `scenarios.leave_daemon` report."""
    return [int(pid) for text in wait_for_reports(folder, "pids", 2) for pid in text.split()]


def has_group(ray, launch):
    """True once Ray has the placement group of a launch."""
    group = launch._run._machines.reservation._group
    return group is not None and ray.util.placement_group_table(group)["state"] != "REMOVED"


# -- the end of the launching process, and of its connection to the cluster

KILLED_DRIVER = """
import os, pathlib, signal, sys, time
from parawrap import Platform, wrapper
from tests.contract.scenarios import leave_daemon

folder = pathlib.Path(sys.argv[1])
platform = Platform(device="ray", n_nodes=2, verbose=False, ipc_groups=None, grace_s=60)
wrapper(platform)(leave_daemon).submit(folder)
while len(list(folder.glob("begun-*"))) < 2:
    time.sleep(0.1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_driver_ends_ranks(ray, tmp_path):
    """SIGKILL of the launching process ends ranks, and processes that left their groups."""
    with subprocess.Popen([sys.executable, "-c", KILLED_DRIVER, tmp_path], cwd=ROOT) as driver:
        pids = pids_of(tmp_path)
    assert driver.returncode == -signal.SIGKILL
    wait_for_reports(tmp_path, "cleaned", 2)
    assert_gone(pids)


def test_first_launches_join_once(ray):
    """Two threads launch before this process has joined the cluster."""
    with ThreadPoolExecutor(2) as pool:
        launched = [pool.submit(on_ray(os.getpid, n_nodes=1)) for _ in range(2)]
        assert len({each.result() for each in launched}) == 2


def test_cancel_releases_the_resources(ray, tmp_path):
    """A launch that waits for resources is pending.

    `cancel` withdraws its request, or ends its ranks.
    """
    launch = on_ray(scenarios.leave_daemon, n_cpus=1).submit(tmp_path)
    pids = pids_of(tmp_path)
    pending = on_ray(scenarios.leave_daemon, n_cpus=16).submit(tmp_path)
    eventually(lambda: has_group(ray, pending), "the request")
    assert pending.state == "pending"
    for each in pending, launch:
        each.cancel()
        assert each.state == "cancelled"
        assert not has_group(ray, each)
        with pytest.raises(LaunchCancelledError):
            results_of(each)
    assert_gone(pids)


# -- requests that the cluster cannot satisfy


def test_clusters_that_cannot_run_it(ray, monkeypatch):
    """LaunchError names a node without parawrap, or the resources of the nodes, where Ray itself
    would wait forever.
    """
    with pytest.raises(LaunchError) as raised:
        on_ray(os.getpid, n_nodes=9)()
    check_cell("too many nodes", "ray", raised.value)
    program = _node_actor._PROGRAM.replace("from parawrap.", "from missing_parawrap.")
    monkeypatch.setattr(_node_actor, "_PROGRAM", program)
    reservation._actor_class.cache_clear()
    try:
        with pytest.raises(LaunchError) as raised:
            on_ray(os.getpid)()
    finally:
        reservation._actor_class.cache_clear()
    text = f"{os.uname().nodename}: {sys.executable} cannot import parawrap: ModuleNotFoundError("
    assert text in str(raised.value)
    assert str(raised.value).startswith("node ")


# -- large values, and ranks that stay


def keep(value):
    global kept
    kept = value


def kept_with_rank(scale):
    """Return what `keep` kept, times `scale`, and the rank."""
    return kept * scale, current_rank().global_rank


def test_ranks_stay_on_two_nodes(ray):
    """Ranks that stay on two nodes keep a tensor of 64 MiB, answer after a failure, and end with a
    death, which later calls name.
    """
    ranks = Platform(device="ray", n_nodes=2, verbose=False).open()
    tensor = torch.arange(8 * MIB)
    ranks(keep, tensor)
    answers = *ranks(kept_with_rank, 2), ranks[1](kept_with_rank, 2)
    assert [rank for _, rank in answers] == [0, 1, 1]
    assert all(torch.equal(value, 2 * tensor) for value, _ in answers)
    with pytest.raises(scenarios.OddError, match="code 5"):
        ranks(scenarios.fail_while_others_wait, scenarios.raise_odd_error)
    assert ranks(all_sum) == (2.0, 2.0)
    pids = ranks(os.getpid)
    with pytest.raises(RankDiedError, match="SIGKILL"):
        ranks[1](os.kill, pids[1], signal.SIGKILL)
    with pytest.raises(RankDiedError, match=r"rank 1 of 2 was killed by SIGKILL"):
        ranks(os.getpid)
    ranks.close()
    assert_gone(pids)


# -- the loss of a node; last, because processes that join a cluster soon after it may hang


def test_a_lost_node_restarts_ranks(ray, ray_cluster, tmp_path):
    """The launch of a lost node restarts on the nodes that are left and one that joins later.

    After the last restart, it raises.
    """
    folders, node = folders_of_starts(tmp_path), ray_cluster.add_node()
    launch = on_ray(in_each_start, n_nodes=3, max_restarts=1, ipc_groups=[]).submit(
        scenarios.wait_for_ever, tmp_path
    )
    wait_for_reports(folders[0], "begun", 3)
    ray_cluster.kill_node(node)
    node = ray_cluster.add_node()
    wait_for_reports(folders[1], "begun", 3)
    ray_cluster.kill_node(node)
    with pytest.raises(
        RankDiedError, match=r"was lost with its node, which no longer answers \(node "
    ) as raised:
        results_of(launch)
    check_cell("node lost", "ray", raised.value)
    for folder in folders:
        assert_no_survivors(folder, 3)


def test_a_killed_actor_is_a_lost_node(ray, tmp_path, caplog):
    """The server of a killed actor ends its ranks and what they left.

    New actors start the next attempt; the log has Ray's reason.
    """
    folders, pids = folders_of_starts(tmp_path), []
    launchable = on_ray(in_each_start, max_restarts=1, grace_s=60)
    launch = launchable.submit(scenarios.leave_daemon, tmp_path)
    for folder in folders:
        pids += pids_of(folder)
        for actor in processes_in("ray::NodeActor"):  # as the kernel does if memory runs out
            actor.kill()
    with pytest.raises(RankDiedError, match="was lost with its node, which no longer answers"):
        results_of(launch)
    assert " of a launch is lost: its actor died: " in caplog.text
    assert_gone(pids)
    for folder in folders:
        wait_for_reports(folder, "cleaned", 2)

"""The Ray cluster of the tests has two nodes, can lose nodes, and leaves no processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.processes import processes_in
from tests.helpers.waiting import eventually

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
OWNER = """
import sys
from tests.helpers.ray_cluster import RayCluster
with RayCluster() as cluster:
    print(cluster.folder, flush=True)
    input()
"""


@pytest.fixture(name="ray")
def _ray(ray_cluster):
    """The ray module, with this process joined to the cluster as a driver."""
    import ray

    ray.shutdown()  # tests of other files stay in the cluster
    ray.init(log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def owner():
    """Start a process that keeps a cluster open until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_bundles_spread_over_the_nodes(ray, ray_cluster):
    """A placement group with STRICT_SPREAD has one bundle on each node."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 4}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    remove_placement_group(group)
    assert set(placed.values()) == set(ray_cluster.nodes)


def test_a_task_runs_outside_of_this_process(ray):
    """A Ray task runs in a worker process of the cluster."""
    assert ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=60) != os.getpid()


def test_a_cluster_survives_a_killed_node(ray, ray_cluster):
    """The cluster notices that a node is lost, and another node can join."""
    lost = ray_cluster.nodes[1]
    ray_cluster.kill_node(lost)
    eventually(
        lambda: [node["NodeID"] for node in ray.nodes() if node["Alive"]] == list(ray_cluster.nodes), "the loss of the node"
    )
    joined = ray_cluster.add_node()
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} == {ray_cluster.nodes[0], joined}


def test_the_end_of_a_cluster_leaves_nothing():
    """The end of the ``with`` block ends all processes of the cluster and removes its folder."""
    with owner() as process:
        folder = process.stdout.readline().strip()
        assert processes_in(folder)
        process.communicate("\n")
    assert process.returncode == 0
    assert not processes_in(folder)
    assert not Path(folder).exists()


def test_killing_the_owner_ends_the_cluster():
    """When the process that started a cluster is killed, all processes of the cluster end."""
    with owner() as process:
        folder = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
    try:
        eventually(lambda: not processes_in(folder), "the end of its processes")
    finally:
        shutil.rmtree(folder)

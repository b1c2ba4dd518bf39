"""The Ray cluster of the tests: two nodes that this process can join, that can be lost, and of which nothing is left."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.processes import eventually, processes_in

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
OWNER = """
import sys
from tests.clusters.ray_cluster import RayCluster
with RayCluster() as cluster:
    print(cluster.folder, flush=True)
    input()
"""


@pytest.fixture(name="ray")
def _ray(ray_cluster):
    """Ray, of whose cluster this process is a driver."""
    import ray

    ray.init(log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


def owner():
    """A process that has a cluster until it reads a line."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def test_actors_spread_over_the_nodes(ray, ray_cluster):
    """A placement group that wants its bundles apart has one on each node."""
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([{"CPU": 4}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=60)
    placed = ray.util.placement_group_table(group)["bundles_to_node_id"]
    remove_placement_group(group)
    assert set(placed.values()) == set(ray_cluster.nodes)


def test_a_task_runs_outside_of_this_process(ray):
    """What is sent to the cluster runs in a worker of it."""
    assert ray.get(ray.remote(lambda: os.getpid()).remote(), timeout=60) != os.getpid()


def test_a_killed_node_is_gone_and_another_may_join(ray, ray_cluster):
    """The cluster learns that a node is lost, goes on without it, and takes a new one."""
    lost = ray_cluster.nodes[1]
    ray_cluster.kill_node(lost)
    eventually(lambda: [node["NodeID"] for node in ray.nodes() if node["Alive"]] == list(ray_cluster.nodes), "the loss")
    joined = ray_cluster.add_node()
    assert {node["NodeID"] for node in ray.nodes() if node["Alive"]} == {ray_cluster.nodes[0], joined}


def test_the_end_of_a_cluster_leaves_nothing():
    """When the block is over its processes and its folder are gone."""
    with owner() as process:
        folder = process.stdout.readline().strip()
        assert processes_in(folder)
        process.communicate("\n")
    assert process.returncode == 0
    assert not processes_in(folder)
    assert not Path(folder).exists()


def test_the_kill_of_its_owner_ends_a_cluster():
    """When the process that started a cluster is killed, all its processes end."""
    with owner() as process:
        folder = process.stdout.readline().strip()
        process.send_signal(signal.SIGKILL)
    try:
        eventually(lambda: not processes_in(folder), "the end of its processes")
    finally:
        shutil.rmtree(folder)

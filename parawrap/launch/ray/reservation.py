"""Reserve the resources of a launch on Ray: a placement group with one bundle per node."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import threading
from functools import cache
from typing import Any

from parawrap.errors import LaunchError
from parawrap.launch._devices import Device
from parawrap.launch._platform_fields import PlatformFields
from parawrap.launch.ray import _node_actor

_POLL_S = 0.2  # of a wait; short compared with the start of an actor, which takes seconds
_ANSWER_S = 5.0  # a head node in the same network answers in milliseconds
_GB = 1 << 30  # bytes
# Methods of an actor that may run at the same time. `stay` runs as long as the actor; `kill` and
# `close` must not wait for it, or for a `start` on a slow network
_ACTOR_THREADS = 4
_joining = threading.Lock()  # held for `ray.init`, which raises if another thread has called it


def _join_cluster() -> Any:
    """Join a cluster, and return the ray module.

    The cluster is that of `ray.init`, if the process has called it. Otherwise it is the cluster of
    RAY_ADDRESS, or one on this machine.
    """
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.util.client")
    except ImportError as error:
        msg = (
            "launcher='ray' needs Ray: pip install 'parawrap-torch[ray]', or set launcher='local' "
            "to start the ranks on this machine"
        )
        raise LaunchError(msg) from error
    with _joining:
        if not ray.is_initialized():
            _init(ray)
    if ray.util.client.ray.is_connected():
        msg = (
            "Ray Client (ray://) runs this process outside of the cluster, where ranks cannot "
            "reach it: run the script on a node of the cluster, or with 'ray job submit'"
        )
        raise LaunchError(msg)
    return ray


def _init(ray: Any) -> None:
    """Join the cluster of RAY_ADDRESS, or the one on this machine.

    Raises:
        LaunchError: If there is no such cluster.
    """
    address = os.environ.get("RAY_ADDRESS", "auto")
    host, _, port = address.rpartition(":")
    try:
        # Connect first, because Ray would retry for minutes. It checks other forms, such as ray://
        is_host_and_port = bool(host) and port.isdecimal() and "/" not in host
        if is_host_and_port:
            socket.create_connection((host, int(port)), _ANSWER_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        where = "that runs here" if address == "auto" else f"at RAY_ADDRESS={address}"
        msg = (
            f"the Ray cluster {where} cannot be joined: {error}. 'ray start --head' starts one, "
            "and launcher='local' starts the ranks on this machine"
        )
        raise LaunchError(msg) from error


class Reservation:
    """A launch's share of the cluster's resources.

    `request_and_wait` requests it; `end` releases it. Used by one thread.

    Raises:
        LaunchError: If Ray is missing, or the cluster is too small for the platform, even when
            idle.
    """

    def __init__(self, platform: PlatformFields) -> None:
        self.ray = _join_cluster()
        self._platform = platform
        # The resources that one node needs, under Ray's names
        self._bundle: dict[str, float] = {"CPU": platform.cpus_per_node}
        if platform.device == Device.GPU:
            self._bundle["GPU"] = platform.ranks_per_node
        if platform.ram is not None:
            self._bundle["memory"] = int(platform.ram * _GB)
        self._group: Any = None
        self._ready: Any = None
        self._check_size()

    def request_and_wait(self) -> bool:
        """Request the resources, and wait a moment for them. Return True if the launch has them.

        Call it in the thread of the run: in the main thread, Ctrl-C could come between the request
        and the assignment. Ray moves the share of a lost node to another node.

        Raises:
            LaunchError: If Ray was shut down.
        """
        if self._group is None:
            strategy = "STRICT_SPREAD" if self._platform.n_nodes > 1 else "STRICT_PACK"
            self._group = self.ray.util.placement_group(
                [self._bundle] * self._platform.n_nodes, strategy=strategy
            )
            self._ready = self._group.ready()
        return self.wait_briefly(self._ready)

    def wait_briefly(self, reference: Any) -> bool:
        """Wait a moment for the value of a reference. Return True if it is ready.

        Raises:
            LaunchError: If Ray was shut down.
        """
        if not self.ray.is_initialized():
            msg = "ray.shutdown() was called before the nodes of the launch were ready"
            raise LaunchError(msg)
        ready, _ = self.ray.wait([reference], timeout=_POLL_S)
        return bool(ready)

    def start_actor(self, node: int) -> Any:
        """Return a new actor that has the share of a node.

        Ray starts it as soon as the launch has the resources.
        """
        threads = int(self._bundle["CPU"] // self._platform.ranks_per_node)
        options = self._options(node, parts=1)
        # The launch restarts its ranks itself, all of them together
        return _actor_class(self.ray).options(max_restarts=0, **options).remote(threads)

    def options_of_rank(self, rank: int) -> dict[str, Any]:
        """Return the options of an actor that takes the share of a rank, on its node."""
        ranks_per_node = self._platform.ranks_per_node
        return self._options(rank // ranks_per_node, parts=ranks_per_node)

    def _options(self, node: int, *, parts: int) -> dict[str, Any]:
        """Return the options of an actor that takes one of equal parts of the share of a node."""
        memory = self._bundle.get("memory")
        strategies = self.ray.util.scheduling_strategies
        return {
            "num_cpus": self._bundle["CPU"] // parts,
            "num_gpus": self._bundle.get("GPU", 0) // parts,
            "memory": None if memory is None else int(memory // parts),
            "scheduling_strategy": strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=node
            ),
        }

    def end(self) -> None:
        """Release the resources. Ray kills the actors that still use them."""
        # After a shutdown, a call would start Ray again
        if self._group is not None and self.ray.is_initialized():
            self.ray.util.remove_placement_group(self._group)

    def _check_size(self) -> None:
        """Raise LaunchError if too few nodes are large enough. Ray would wait for them forever."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        fitting = 0
        found = []
        for node in nodes:
            resources = {name: node["Resources"].get(name, 0) for name in self._bundle}
            found.append(f"{node['NodeManagerHostname']} has {_describe(resources)}")
            is_large_enough = all(
                resources[name] >= amount for name, amount in self._bundle.items()
            )
            if is_large_enough:
                fitting += 1
        if fitting >= self._platform.n_nodes:
            return
        wanted = f"{self._platform.n_nodes} node(s) with {_describe(self._bundle)} each"
        msg = (
            f"the platform needs {wanted}, but only {fitting} of the Ray cluster's nodes have "
            f"that: {'; '.join(found)}. launcher='local' starts the ranks on this machine"
        )
        raise LaunchError(msg)


def _describe(resources: dict[str, float]) -> str:
    """Describe amounts of resources, such as "4 CPU, 2 GPU"."""
    described = []
    for name, amount in resources.items():
        is_memory = name == "memory"  # Ray counts it in bytes
        described.append(f"{amount / _GB:.1f} GB of memory" if is_memory else f"{amount:g} {name}")
    return ", ".join(described)


@cache
def _actor_class(ray: Any) -> Any:
    """Return the class of node actors, which Ray sends to the cluster once."""
    # The Python of a node may lack parawrap
    ray.cloudpickle.register_pickle_by_value(_node_actor)
    return ray.remote(max_concurrency=_ACTOR_THREADS)(_node_actor.NodeActor)

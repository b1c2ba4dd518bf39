"""Reserve the resources of a launch on a Ray cluster: one bundle per node, with a task that runs a node agent.

Ranks are not Ray actors. The node agent starts them as on any other machine, and so can report how they end.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import socket
from collections.abc import Iterable, Sequence
from typing import Any

from parawrap.backends.cpu_backend import usable_cores
from parawrap.errors import LaunchError
from parawrap.launch._devices import Device
from parawrap.launch._platform import Platform
from parawrap.launch.clusters._connections import Address
from parawrap.launch.rank._process_groups import LOOPBACK

__all__ = ["Reservation", "joined"]

_LOOK_S = 0.2
_LEAVING_S = 10.0
_ANSWER_S = 5.0
_GB = 1 << 30

# Run on each node by its own Python, which may lack parawrap.
_TASK = """
def run(*arguments):
    import socket, sys
    try:
        from parawrap.launch.ray._task import serve
    except BaseException as error:
        return f"{socket.gethostname()}: {sys.executable} cannot import parawrap: {error!r}"
    return serve(*arguments)
"""


def joined(platform: Platform) -> Any:
    """Join a Ray cluster and return the ray module.

    Use the cluster that this process has joined already, or else the one at RAY_ADDRESS, or else the one that runs on this
    machine. Otherwise start a new cluster.

    Raises:
        LaunchError: If ray is not installed, or the cluster cannot be joined.
    """
    try:
        ray: Any = importlib.import_module("ray")
        importlib.import_module("ray.util.client")
    except ImportError as error:
        msg = "launcher='ray' needs Ray: pip install 'parawrap-torch[ray]'"
        raise LaunchError(msg) from error
    if not ray.is_initialized():
        _join(ray, platform)
    if ray.util.client.ray.is_connected():
        msg = (
            "Ray Client (ray://) runs this process outside of the cluster, where ranks cannot reach it: run the script on "
            "a node of the cluster, or with 'ray job submit'"
        )
        raise LaunchError(msg)
    return ray


def _join(ray: Any, platform: Platform) -> None:
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = os.environ.get("RAY_ADDRESS")
    try:
        _check_answers(address or "")
        ray.init(address=address or "auto", **quiet)
        return
    except Exception as error:
        if address is not None or not isinstance(error, ConnectionError):
            where = "that runs here" if address is None else f"at RAY_ADDRESS={address}"
            msg = f"the Ray cluster {where} cannot be joined: {error}"
            raise LaunchError(msg) from error
    try:
        ray.init(address="local", num_cpus=max(usable_cores(), platform.cpus_per_node), include_dashboard=False, **quiet)
    except Exception as error:
        msg = f"no Ray cluster runs here, and none can be started: {error}"
        raise LaunchError(msg) from error


def _check_answers(address: str) -> None:
    """Check that an address accepts connections, because Ray itself would retry for minutes.

    Raises:
        OSError: If the address does not accept connections.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host, int(port)), _ANSWER_S).close()


class Reservation:
    """A launch's share of the cluster's resources. The constructor requests it; `end` releases it. Used by one thread.

    Args:
        ray: The ray module.
        platform: The launch's platform.

    Raises:
        LaunchError: If the cluster is too small for the launch, even when idle.
    """

    def __init__(self, ray: Any, platform: Platform) -> None:
        self._ray = ray
        self._platform = platform
        self._bundle = _bundle(platform)
        self._tasks: list[Any] = []
        self._check_size()
        strategy = "STRICT_SPREAD" if platform.n_nodes > 1 else "STRICT_PACK"
        self._group = ray.util.placement_group([self._bundle] * platform.n_nodes, strategy=strategy)
        self._ready = self._group.ready()

    def is_ready(self) -> bool:
        """Wait a moment for the resources. Return True if the launch has them.

        Raises:
            LaunchError: If Ray was shut down.
        """
        self._check_ray()
        ready, _ = self._ray.wait([self._ready], timeout=_LOOK_S)
        return bool(ready)

    def addresses(self, own: Sequence[str]) -> list[str]:
        """Return addresses where nodes may reach this process: only loopback if the cluster consists of this machine."""
        here = self._ray.util.get_node_ip_address()
        if all(node["NodeManagerAddress"] == here for node in self._nodes()):
            return [LOOPBACK]
        return [here, *(each for each in own if each != here)]

    def start_agents(self, address: Address, payload: bytes) -> None:
        """Start an agent on each node. The agents connect to `address`."""
        place: dict[str, Any] = {"__name__": "__main__"}  # functions of __main__ are pickled by value
        exec(_TASK, place)
        platform, call = self._platform, self._ray.put(payload)
        share = self._bundle["CPU"] // platform.ranks_per_node
        for node in range(platform.n_nodes):
            task = self._ray.remote(place["run"]).options(
                name=f"{platform.name}: node {node}",
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                memory=self._bundle.get("memory"),
                max_retries=0,
                scheduling_strategy=self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=node
                ),
            )
            self._tasks.append(task.remote(address, node, platform.spawn_method, platform.grace_s, share, call))

    def options_of_rank(self, rank: int) -> dict[str, Any]:
        """Return the options of an actor that takes the share of one rank, on the node of that rank."""
        per_node = self._platform.ranks_per_node
        return {
            "num_cpus": self._bundle["CPU"] // per_node,
            "num_gpus": self._bundle.get("GPU", 0) // per_node,
            "memory": int(self._bundle["memory"] // per_node) if "memory" in self._bundle else None,
            "scheduling_strategy": self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=rank // per_node
            ),
        }

    def check(self) -> None:
        """Check that all nodes can still take part.

        Raises:
            LaunchError: If an agent has ended already, or Ray was shut down.
        """
        self._check_ray()
        for node, task in enumerate(self._tasks):
            ended, _ = self._ray.wait([task], timeout=0)
            if ended:
                msg = f"node {node}: {self._ending_of(task)}"
                raise LaunchError(msg)

    def end(self) -> None:
        """Wait for the agents, kill those that do not end, and release the resources."""
        if not self._ray.is_initialized():  # after a shutdown, which ended the agents, any call would start Ray again
            return
        _, left = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=_LEAVING_S) if self._tasks else ([], [])
        for task in left:
            with contextlib.suppress(Exception):  # it may just have ended
                self._ray.cancel(task, force=True)
        self._ray.util.remove_placement_group(self._group)

    def _check_ray(self) -> None:
        if not self._ray.is_initialized():
            msg = "ray.shutdown() was called before the nodes of the launch were ready"
            raise LaunchError(msg)

    def _ending_of(self, task: Any) -> str:
        try:
            return str(self._ray.get(task))
        except Exception as error:  # noqa: BLE001 (Ray raises many types for a task that failed)
            return f"its agent died: {error}"

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _check_size(self) -> None:
        """Check the size of the cluster, because Ray would wait forever for resources that no node has."""
        platform, nodes = self._platform, self._nodes()
        fitting = [node for node in nodes if _holds(node["Resources"], self._bundle)]
        if len(fitting) >= platform.n_nodes:
            return
        wanted = _listed(self._bundle, self._bundle)
        found = "; ".join(f"{node['NodeManagerHostname']} has {_listed(node['Resources'], self._bundle)}" for node in nodes)
        msg = (
            f"the platform needs {platform.n_nodes} node(s) with {wanted} each, but only {len(fitting)} of the Ray "
            f"cluster's nodes have that: {found}"
        )
        raise LaunchError(msg)


def _bundle(platform: Platform) -> dict[str, float]:
    """Return the resources that one node needs."""
    has_gpus = platform.device == Device.GPU
    bundle: dict[str, float] = {"CPU": platform.cpus_per_node}
    if has_gpus:
        bundle["GPU"] = platform.ranks_per_node
    if platform.ram is not None:
        bundle["memory"] = int(platform.ram * _GB)
    return bundle


def _listed(resources: dict[str, float], names: Iterable[str]) -> str:
    amounts = {name: resources.get(name, 0) for name in names}
    return ", ".join(
        f"{amount / _GB:.1f} GB of memory" if name == "memory" else f"{amount:g} {name}" for name, amount in amounts.items()
    )


def _holds(resources: dict[str, float], bundle: dict[str, float]) -> bool:
    return all(resources.get(name, 0) >= amount for name, amount in bundle.items())

"""The task that a launch runs on each node of a Ray cluster: a node agent."""

from __future__ import annotations

import os
import socket

from parawrap.launch.clusters._network import Address, dial
from parawrap.launch.clusters._node_agent import NodeAgent
from parawrap.launch.parcels._packing import memory_file
from parawrap.launch.watch._starters import starter_named, stop_server

__all__ = ["serve"]

_DIALING_S = 5.0


def serve(address: Address, node: int, spawn_method: str, grace_s: float, threads: int, payload: bytes) -> str:
    """Run this node's ranks until the launch is over. Return why the task ended; that matters only before ranks start.

    Args:
        address: Where the watching process listens.
        node: This node's number.
        spawn_method: How processes are started.
        grace_s: Seconds that ranks have to clean up when the line to the watching process breaks.
        threads: CPUs per rank.
        payload: The packed call.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray has set it to the CPUs of all ranks of the node
    starter = starter_named(spawn_method)
    wire = dial(address, _DIALING_S)
    if wire is None:
        return f"{socket.gethostname()} cannot reach the launching process at {', '.join(address.hosts)}"
    file = memory_file("call")
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(payload)
        NodeAgent(wire, node, starter, file, grace_s).run()
    finally:
        os.close(file)
        stop_server()
    return "its agent ended before its ranks were started"

"""What runs on each node of a Ray cluster for a launch: the node's keeper."""

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
    """Keep this node until the launch is over; gives why it ended, which matters only while nodes gather.

    Args:
        address: where the launch is watched.
        node: this one's number.
        spawn_method: how processes are started.
        grace_s: seconds that ranks have to clean up when the line to there is gone.
        threads: the CPUs that each rank has for itself.
        payload: the packed call.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray has put there what all ranks of the node have together
    starter = starter_named(spawn_method)
    wire = dial(address, _DIALING_S)
    if wire is None:
        return f"{socket.gethostname()} cannot reach the process that launches, at {', '.join(address.hosts)}"
    file = memory_file("call")
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(payload)
        NodeAgent(wire, node, starter, file, grace_s).keep()
    finally:
        os.close(file)
        stop_server()
    return "its keeper has ended before its ranks were ordered"

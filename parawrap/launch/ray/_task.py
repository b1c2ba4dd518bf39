"""The Ray task of a launch on each node. It runs a node agent."""

from __future__ import annotations

import os
import socket

from parawrap.launch.clusters._connections import Address, dial
from parawrap.launch.clusters._node_agent import NodeAgent
from parawrap.launch.guard._start_methods import starter_named, stop_server
from parawrap.launch.messages._pickle_values import memory_file

__all__ = ["serve"]

_DIALING_S = 5.0


def serve(address: Address, node: int, spawn_method: str, grace_s: float, threads: int, payload: bytes) -> str:
    """Run this node's ranks until the launch ends. Return the reason why the task ended, for errors before ranks start.

    Args:
        address: Where the supervising process listens.
        node: This node's number.
        spawn_method: The platform's ``spawn_method``.
        grace_s: Seconds for ranks to clean up if the connection to the supervising process breaks.
        threads: The number of CPUs per rank.
        payload: The pickled call.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)  # Ray sets it to the CPUs of the whole task
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

"""The wait until all nodes of a launch have called."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from parawrap.errors import LaunchError
from parawrap.launch.clusters._network import Front
from parawrap.launch.clusters._remote_node import RemoteNode
from parawrap.launch.watch._loop import Loop

__all__ = ["GATHERING_S", "await_nodes"]

GATHERING_S = 300.0
"""How long the nodes of a launch may take to call, once they have been asked to."""

_LOOK_S = 0.2


def await_nodes(
    front: Front, loop: Loop, numbers: Sequence[int], check: Callable[[], None], patience_s: float
) -> list[RemoteNode]:
    """The nodes with these numbers, in this order.

    Args:
        front: where they call.
        loop: waits for what they say from then on.
        numbers: of the nodes.
        check: called again and again; raises what is to end the wait.
        patience_s: seconds to wait.

    Raises:
        LaunchError: not all have called in that time.
    """
    nodes: dict[int, RemoteNode] = {}
    until = time.monotonic() + patience_s
    try:
        while missing := [number for number in numbers if number not in nodes]:
            check()
            if time.monotonic() > until:
                told = ", ".join(map(str, missing))
                msg = f"node(s) {told} never called, within {patience_s:g} seconds: see whether they can reach this one"
                raise LaunchError(msg)
            wire = front.accept(_LOOK_S)
            if wire is None:
                continue
            hello = wire.receive()
            if hello is None or hello.body[0] not in missing:
                wire.close()
                continue
            number, host = hello.body
            nodes[number] = RemoteNode(loop, wire, number, host)
    except BaseException:
        for node in nodes.values():
            node.close()
        raise
    return [nodes[number] for number in numbers]

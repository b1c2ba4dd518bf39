"""The connections of Ray nodes: what holds up a launch, and for how long. Needs no cluster."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from parawrap import LaunchError, Platform
from parawrap.launch.ray._node_actor import CONNECTIONS, RANK_BYTES
from parawrap.launch.ray.ray_machines import _ActorStarter


def starter(*, is_cancelled=lambda: False, **fields):
    platform = Platform(launcher="ray", device="cpu", n_cpus=2, **fields)
    node = SimpleNamespace(number=0, host="a-host", is_lost=threading.Event())
    return _ActorStarter(None, platform, [node], "127.0.0.1", is_cancelled)


def fail_to_start(starting):
    """Return the error of a start, and its seconds, while two connections are silent."""
    address = starting._listener.getsockname()[:2]
    begun = time.monotonic()
    with (
        socket.create_connection(address),
        socket.create_connection(address),
        pytest.raises(LaunchError) as caught,
    ):
        starting.start(0)
    starting.__exit__()
    return str(caught.value), time.monotonic() - begun


def test_silent_connections_have_a_limit():
    """Connections that send nothing, as of a port scanner, end with the time limit. The limit holds
    for all ranks together.
    """
    text, seconds = fail_to_start(starter(timeout_min=1 / 60))
    assert text.startswith("rank 0 on node 0, a-host did not connect to this process in time")
    assert 1 <= seconds < 10


def test_a_cancel_ends_the_wait():
    orders = iter([False, True])
    text, seconds = fail_to_start(starter(is_cancelled=lambda: next(orders)))
    assert text.startswith("the launch was cancelled")
    assert seconds < 10


def test_a_node_is_lost_only_if_ray_says_so(monkeypatch):
    """Else the process that forks its ranks has died, for example because memory ran out."""
    monkeypatch.setattr("parawrap.launch.ray.ray_machines._NOTICE_S", 0.01)
    starting = starter()
    assert starting.describe(1).startswith("the process on node 0 that forks its ranks")
    starting._nodes[0].is_lost.set()
    assert starting.describe(1) == "its node, which no longer answers"
    starting.__exit__()


def test_a_node_that_is_lost_before_its_ranks_connect():
    """The start names the loss, and waits for no connection."""
    starting = starter()
    starting._nodes[0].is_lost.set()
    text, seconds = fail_to_start(starting)
    assert text.startswith("node 0, a-host was lost before rank 0 had connected: its actor died")
    assert seconds < 10


def test_a_node_that_is_lost_after_its_ranks_connect():
    """The connections of a rank end, although nothing ended them when the node was lost."""
    starting = starter()
    address = starting._listener.getsockname()[:2]
    with contextlib.ExitStack() as ranks:
        for kind in range(CONNECTIONS):
            connection = ranks.enter_context(socket.create_connection(address))
            rank_bytes = (0).to_bytes(RANK_BYTES, "little")
            connection.sendall(starting._token + rank_bytes + bytes([kind]))
        while len(starting._arrived.get(0, ())) < CONNECTIONS:
            starting._accept(1)
        starting._nodes[0].is_lost.set()
        connections = starting.start(0)
        os.set_blocking(connections.status, False)
        assert os.read(connections.status, 1) == b""
        connections.close()
    starting.__exit__()

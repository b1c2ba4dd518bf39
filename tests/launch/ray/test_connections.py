"""The connections of Ray nodes: what holds up a launch, and for how long. Needs no cluster."""

from __future__ import annotations

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from parawrap import LaunchError, Platform
from parawrap.launch.ray.ray_machines import _ActorStarter

NODE = SimpleNamespace(number=0, host="a-host", is_lost=threading.Event())


def starter(*, is_cancelled=lambda: False, **fields):
    platform = Platform(launcher="ray", device="cpu", n_cpus=2, **fields)
    return _ActorStarter(None, platform, [NODE], "127.0.0.1", is_cancelled)


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
    monkeypatch.setattr(NODE, "is_lost", SimpleNamespace(wait=lambda _: True))
    assert starting.describe(1) == "its node, which no longer answers"
    starting.__exit__()

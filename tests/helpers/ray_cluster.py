"""A real Ray cluster on this machine: a head node and worker nodes, each with its own scheduler and
object store.

The nodes share this machine's address and hostname. Ray writes all files into one temporary folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from tests.helpers.waiting import PATIENCE_S

_STORE_BYTES = 100 << 20


class RayCluster:
    """A Ray cluster of two nodes that runs inside a ``with`` block.

    This process can join it as a driver.
    """

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            # Not in TMPDIR: Ray puts sockets here, and socket paths must be short.
            self.folder = Path(tempfile.mkdtemp(prefix="pw-ray-", dir="/tmp"))
            cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            patch = cleanup.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("RAY_TMPDIR", str(self.folder))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
            # Else busy processes nearby leave workers hardly any time
            patch.setenv("RAY_worker_niceness", "0")
            # Else each driver starts a worker per CPU, on two cores
            patch.setenv("RAY_enable_worker_prestart", "0")
            # Ray counts a node as lost after five failed checks. A killed node fails each at once,
            # a busy one after 10 s.
            patch.setenv("RAY_health_check_period_ms", "300")

            from ray._private import services
            from ray.cluster_utils import Cluster

            patch.setattr(services, "get_node", partial(_ask_patiently, services.get_node))
            self._cluster = Cluster()
            cleanup.callback(self._end)
            for _ in range(2):
                self.add_node()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *ending: object) -> None:
        self._cleanup.close()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that a process needs to join the cluster."""
        return {"RAY_ADDRESS": self._cluster.address}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the nodes, starting with the head."""
        return tuple(node.node_id for node in self._cluster.list_all_nodes())

    def add_node(self) -> str:
        """Start a node, wait until it has joined, and return its id."""
        head = {} if self._cluster.head_node else {"include_dashboard": False}
        # More CPUs than this machine has, so that no launch of the contract waits for another one's
        # end.
        return self._cluster.add_node(num_cpus=16, object_store_memory=_STORE_BYTES, **head).node_id

    def kill_node(self, node: str) -> None:
        """Kill all processes of a worker node, without a graceful shutdown.

        Ray notices the loss seconds later.
        """
        (found,) = (each for each in self._cluster.worker_nodes if each.node_id == node)
        self._cluster.remove_node(found, allow_graceful=False)

    def _end(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def _ask_patiently(get_node: Callable[..., Any], *args: Any) -> Any:
    """Ask the head node for a new node until this one has registered.

    Ray itself gives up after 30 seconds, which a single question to a busy head node may take.
    """
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return get_node(*args)
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def missing() -> str | None:
    """Return why this machine cannot run a Ray cluster, or None if it can."""
    return "not installed: ray" if importlib.util.find_spec("ray") is None else None

"""A real Ray cluster on this machine: a head and more nodes, each with its own scheduler, object store and workers.

The nodes share this machine's address and hostname. All that Ray writes lies in one temporary folder.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Self

import pytest

_STORE_BYTES = 100 << 20


class RayCluster:
    """A head and the nodes that joined it, from ``with`` to its end; this process may, and need not, join as a driver.

    Args:
        count: How many nodes there are, the head among them.
        cpus: CPUs of each.
    """

    def __init__(self, count: int = 2, *, cpus: int = 4) -> None:
        self._count, self._cpus = count, cpus
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as cleanup:
            # Ray makes sockets in there, whose paths are short, and TMPDIR may be anywhere.
            self.folder = Path(tempfile.mkdtemp(prefix="pw-ray-", dir="/tmp"))
            cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            patch = cleanup.enter_context(pytest.MonkeyPatch.context())
            patch.setenv("RAY_TMPDIR", str(self.folder))
            patch.setenv("RAY_USAGE_STATS_ENABLED", "0")

            from ray.cluster_utils import Cluster

            self._cluster = Cluster()
            cleanup.callback(self._end)
            for _ in range(self._count):
                self.add_node()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *ending: object) -> None:
        self._cleanup.close()

    @property
    def environment(self) -> dict[str, str]:
        """What a process is to have in its environment in order to join."""
        return {"RAY_ADDRESS": self._cluster.address}

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the nodes, the head's first."""
        return tuple(node.node_id for node in self._cluster.list_all_nodes())

    def add_node(self) -> str:
        """Start one more node and wait until the cluster has it; gives its id."""
        head = {} if self._cluster.head_node else {"include_dashboard": False}
        return self._cluster.add_node(num_cpus=self._cpus, object_store_memory=_STORE_BYTES, **head).node_id

    def kill_node(self, node: str) -> None:
        """End all processes of a node that is not the head, without a goodbye."""
        (found,) = (each for each in self._cluster.worker_nodes if each.node_id == node)
        self._cluster.remove_node(found, allow_graceful=False)

    def _end(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()


def missing() -> str | None:
    """Why there can be no such cluster here; None where there can."""
    return "not installed: ray" if importlib.util.find_spec("ray") is None else None

"""Messages between the tasks of a job, through a store that rank 0's task opens.

Any program may connect to the store. So each message is signed with the launch's secret, which only the launch folder
holds. The signature is valid for one message of one attempt, so no message can be replayed.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from parawrap.launch.rank._signed_values import SignedStore, Signer

__all__ = ["StoreQueue", "connect", "reachable"]

_FOREVER = timedelta(days=365)  # a reader waits for the next message as long as the attempt runs
_DIAL_S = 3.0  # a host of the cluster answers in milliseconds, or not at all


def connect(host: str, port: int) -> dist.TCPStore:
    """Open a connection to the store. A reader needs its own, because a waiting call blocks its connection."""
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=_FOREVER)


def reachable(hosts: Sequence[str], port: int) -> tuple[str, str] | None:
    """Return the first address that accepts a connection, and this machine's own address of that connection."""
    for host in hosts:
        try:
            with socket.create_connection((host, port), timeout=_DIAL_S) as probe:
                return host, str(probe.getsockname()[0])
        except OSError:
            continue
    return None


class StoreQueue:
    """A queue with any number of writers and one reader.

    Args:
        store: The connection to the store.
        name: The queue's name. It contains the attempt, so that the signatures of two attempts differ.
        signer: Signs and verifies the messages.
    """

    def __init__(self, store: dist.Store, name: str, signer: Signer) -> None:
        self._store = SignedStore(store, name, signer)
        self._received = 0

    def send(self, *message: Any) -> None:
        """Append a message.

        Raises:
            DistError: If the store is gone.
        """
        self._store.set(str(self._store.add("sent", 1)), pickle.dumps(message))

    def receive(self) -> tuple[Any, ...]:
        """Wait for the next message and remove it from the queue.

        Raises:
            DistError: If the store is gone.
            LaunchError: If the message is not signed with the launch's secret.
        """
        self._received += 1
        key = str(self._received)
        message: tuple[Any, ...] = pickle.loads(self._store.get(key, "another task of the job"))
        self._store.delete(key)
        return message

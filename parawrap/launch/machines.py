"""This machine as the place where ranks run, and the store where they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from parawrap.launch._platform_fields import PlatformFields
from parawrap.processes.fork_server import fork_server
from parawrap.processes.members import RankStarter
from parawrap.processes.settings import Settings
from parawrap.processes.torch_groups import (
    LOOPBACK,
    StoreAddress,
    free_port,
    open_file_store,
    open_tcp_store,
)


class Hosts(NamedTuple):
    """The machines of one attempt: the starter of the ranks, and the store where the ranks meet."""

    starter: RankStarter
    store: StoreAddress


class Machines:
    """The machines of a launch, for all of its attempts: this machine.

    `RayMachines` are those of a cluster.
    """

    def __init__(self, platform: PlatformFields) -> None:
        self.platform = platform

    @contextlib.contextmanager
    def open(self, is_cancelled: Callable[[], bool]) -> Iterator[Hosts | None]:
        """Wait for the machines of one attempt, and yield them until the end of the attempt.

        Yield None if `is_cancelled` returns True before.

        Raises:
            LaunchError: If there are no such machines.
        """
        platform = self.platform
        host = platform.master_addr or LOOPBACK
        store: contextlib.AbstractContextManager[StoreAddress]
        # The ranks need no store, but user code may read MASTER_ADDR and open one there
        if not platform.requires_ipc:
            store = contextlib.nullcontext(StoreAddress(host, platform.master_port or free_port()))
        elif uses_port(platform):
            # All ranks are on this machine: no other interface needs to listen
            store = open_tcp_store(host, platform.master_port, on_all_interfaces=False)
        else:
            # By default no port, since every user of this machine could connect to it
            store = open_file_store()
        with store as address:
            yield Hosts(fork_server(), address)

    def close(self) -> None:
        """Release the machines. May be called again."""

    def settings(self) -> Settings:
        """Return the settings of this process that ranks get."""
        return Settings.here()


def uses_port(platform: PlatformFields) -> bool:
    """True if the ranks of this machine meet at a port.

    By default they do only if the platform names an address.
    """
    if platform.ipc_protocol is not None:
        return platform.ipc_protocol == "tcp"
    return platform.master_addr is not None or platform.master_port != 0

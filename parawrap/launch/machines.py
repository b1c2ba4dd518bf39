"""This machine as the place where ranks run, and the store where they meet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from parawrap.launch._platform import Platform
from parawrap.processes.groups import LOOPBACK, StoreAddress, free_port, open_file_store, open_tcp_store
from parawrap.processes.pool import Starter
from parawrap.processes.server import fork_server
from parawrap.processes.settings import Settings


class Hosts(NamedTuple):
    """The machines of one attempt.

    Attributes:
        starter: Starts the ranks.
        store: The store where they meet.
    """

    starter: Starter
    store: StoreAddress


class Machines:
    """The machines of a launch, for all of its attempts: this machine. `RayMachines` are those of a cluster."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    @contextlib.contextmanager
    def open(self, is_cancelled: Callable[[], bool]) -> Iterator[Hosts | None]:
        """Wait for the machines of one attempt. Yield None if `is_cancelled` returns True before.

        Raises:
            LaunchError: If there are no such machines.
        """
        with _open_store(self.platform) as store:
            yield Hosts(fork_server(), store)

    def close(self) -> None:
        """Release the machines. May be called again."""

    def settings(self) -> Settings:
        """Return the settings of this process that ranks get."""
        return Settings.here()


def machines_for(platform: Platform) -> Machines:
    """Return the machines of a platform.

    Raises:
        LaunchError: If they cannot be had.
    """
    if platform.launcher == "ray":
        from parawrap.launch.ray.ray_machines import RayMachines  # imports Ray

        return RayMachines(platform)
    return Machines(platform)


def uses_port(platform: Platform) -> bool:
    """True if the ranks of this machine meet at a port. By default they do only if the platform names an address."""
    if platform.ipc_protocol is not None:
        return platform.ipc_protocol == "tcp"
    return platform.master_addr is not None or platform.master_port != 0


def _open_store(platform: Platform) -> contextlib.AbstractContextManager[StoreAddress]:
    """Keep a store for ranks of this machine. Without process groups, only find an address for user code."""
    if not platform.requires_ipc:
        address = StoreAddress(platform.master_addr or LOOPBACK, platform.master_port or free_port())
        return contextlib.nullcontext(address)
    if uses_port(platform):
        return open_tcp_store(platform.master_addr or LOOPBACK, platform.master_port, everywhere=False)
    return open_file_store()

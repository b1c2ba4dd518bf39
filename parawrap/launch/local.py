"""The local launcher: ranks are processes on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from parawrap.launch._job import Job, Preview, preview
from parawrap.launch._platform import Platform
from parawrap.launch.attempts import Attempts, World
from parawrap.launch.launch import Launch, await_ranks, start
from parawrap.processes.groups import LOOPBACK, StoreAddress, free_port, open_file_store, open_tcp_store
from parawrap.processes.server import fork_server
from parawrap.processes.settings import Settings


class _Local:
    """Launches on this machine."""

    def launch(self, job: Job) -> Launch[Any]:
        """Start the ranks, and return once they are started."""
        launch: Launch[Any] = Launch(job, Attempts(job, LocalMachines(job.platform)))
        start(launch)
        await_ranks(launch)
        return launch

    def preview(self, job: Job) -> Preview:
        platform = job.platform
        meeting = "file (in a new private folder)"
        if uses_port(platform):
            meeting = f"tcp {platform.master_addr or LOOPBACK}:{platform.master_port or '(any free port)'}"
        how = f"{platform.world_size} processes on this machine, forked from one with torch loaded"
        return preview(job, "local", how, meeting=meeting if platform.requires_ipc else None)


launcher = _Local()


def uses_port(platform: Platform) -> bool:
    """True if the ranks of this machine meet at a port. By default they do only if the platform names an address."""
    if platform.ipc_protocol is not None:
        return platform.ipc_protocol == "tcp"
    return platform.master_addr is not None or platform.master_port != 0


def open_store(platform: Platform) -> contextlib.AbstractContextManager[StoreAddress]:
    """Keep a store for ranks of this machine. Without process groups, only find an address for user code."""
    if not platform.requires_ipc:
        address = StoreAddress(platform.master_addr or LOOPBACK, platform.master_port or free_port())
        return contextlib.nullcontext(address)
    if uses_port(platform):
        return open_tcp_store(platform.master_addr or LOOPBACK, platform.master_port, everywhere=False)
    return open_file_store()


class LocalMachines:
    """This machine. Implements `Machines`."""

    def __init__(self, platform: Platform) -> None:
        self._platform = platform

    @contextlib.contextmanager
    def open(self, is_cancelled: Callable[[], bool]) -> Iterator[World | None]:
        with open_store(self._platform) as store:
            yield World(fork_server(), store)

    def close(self) -> None:
        """Do nothing: the server stays for later launches."""

    def settings(self) -> Settings:
        return Settings.here()

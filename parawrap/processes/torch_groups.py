"""The store where ranks meet, their process groups, and how waiting collectives are ended."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from parawrap._private_names import sequence_number_of
from parawrap.errors import LaunchError

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACES = ("lo", "lo0")  # of Linux and of macOS
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_ALL_INTERFACES = "0.0.0.0"
LINGER_S = 1.0
"""Seconds that a rank stays after its function has returned, as docs/launching.md promises.

Other ranks can complete a collective before the connections of this rank break.
"""

NO_LIMIT = timedelta(days=365)
"""For waits that last as long as the user's function. A time limit of the launch may end them."""

_BACKLOG = 4096  # the most that Linux queues by default: all ranks connect at once
_OPEN_FILES = Path("/dev/fd")
_has_joined = False  # True once this rank has joined groups, also after they were destroyed


@dataclass(frozen=True)
class StoreAddress:
    """The store where the ranks of one launch meet: at a host and port, or in a file.

    With a file, host and port are an address for MASTER_ADDR and MASTER_PORT.
    """

    host: str | None = None
    port: int = 0
    path: str | None = None
    # True if a store listens at the port. Otherwise, the port is free for user code on rank 0
    is_served: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"file {self.path}"
        port = str(self.port) if self.port else "(any free port)"
        return f"tcp {self.host}:{port}"

    def open(self, world_size: int) -> dist.Store:
        """Connect a rank to the store.

        Raises:
            LaunchError: If the store cannot be reached.
        """
        if self.path is not None:
            return dist.FileStore(self.path, world_size)
        try:
            # Without a wait for other ranks, which may start much later, or fail
            return dist.TCPStore(str(self.host), self.port, is_master=False, wait_for_workers=False)
        except (RuntimeError, dist.DistError) as error:
            msg = (
                f"this rank cannot reach the store of its launch at {self.host}:{self.port}: "
                f"{error}. The store accepts connections from any process, so another program may "
                "have disturbed it"
            )
            raise LaunchError(msg) from error


def store_folders(pid: int) -> str:
    """Return a glob pattern for the folders that a process makes for its stores."""
    return str(Path(tempfile.gettempdir(), f"parawrap-store-{pid}-*"))


@contextlib.contextmanager
def open_file_store() -> Iterator[StoreAddress]:
    """Keep a file for ranks of this machine, in a folder that only this user may enter.

    If this process is killed, the fork server removes the folder, whose name has the prefix of
    `store_folders`.
    """
    prefix = store_folders(os.getpid()).removesuffix("*")
    with tempfile.TemporaryDirectory(
        prefix=Path(prefix).name, ignore_cleanup_errors=True
    ) as folder:
        yield StoreAddress(LOOPBACK, free_port(), str(Path(folder, "store")))


@contextlib.contextmanager
def open_tcp_store(host: str, port: int, *, on_all_interfaces: bool) -> Iterator[StoreAddress]:
    """Keep a store at a port of this machine.

    The store gets a socket that is bound already, so no other process can take the port.

    Args:
        host: The address that ranks connect to.
        port: The port; 0 for a free one.
        on_all_interfaces: True to listen on all interfaces instead of the one of `host`.

    Raises:
        LaunchError: If the store cannot listen there.
    """
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_ = addresses[0]
        listener = socket.create_server(
            (_ALL_INTERFACES if on_all_interfaces else host, port), family=family, backlog=_BACKLOG
        )
    except OSError as error:
        msg = (
            f"the ranks' store cannot listen on {host}:{port}: {error}; leave out master_addr and "
            "master_port"
        )
        raise LaunchError(msg) from error
    with listener:
        listener.settimeout(None)
        port = int(listener.getsockname()[1])
        file = os.dup(listener.fileno())  # the store owns it
        store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=file
        )
    yield StoreAddress(host, port, is_served=True)
    del store  # not before: the store serves as long as this object lives


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.create_server((LOOPBACK, 0)) as found:
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Groups:
    """The process groups of a world, as the user has described them."""

    backend: str  # for torch.distributed
    lists: Sequence[Sequence[int]]  # the ranks of each group; empty for one group of all ranks
    timeout: timedelta | None  # of collectives; None for torch's default
    on_loopback: bool  # all ranks run on one machine

    def join(
        self, store: dist.Store, rank: int, world_size: int, device: torch.device
    ) -> dist.ProcessGroup | None:
        """Join the world's process group and this rank's own group.

        Return this rank's own group, or None if the rank is in no list.
        """
        global _has_joined
        _has_joined = True  # first: an error below may be an echo
        if self.on_loopback:
            stay_on_loopback()
        before = _connections()
        try:
            dist.init_process_group(
                self.backend,
                store=store,
                rank=rank,
                world_size=world_size,
                device_id=device if device.type == "cuda" else None,
                timeout=self.timeout,
            )
        except Exception:
            _number_groups_again()
            raise
        world = cast("dist.ProcessGroup", dist.group.WORLD)
        group = self.make_own(rank) if self.lists else world
        # gloo connects all pairs of ranks when a group is made
        _links.clear()
        _links.update(_connections() - before)
        return group

    def make_own(self, rank: int) -> dist.ProcessGroup | None:
        """Make all groups, in the same order in every rank, as torch.distributed requires.

        Return this rank's group.
        """
        mine: dist.ProcessGroup | None = None
        for ranks in self.lists:
            made = dist.new_group(list(ranks), timeout=self.timeout)
            if rank in ranks:
                mine = cast("dist.ProcessGroup", made)
        return mine


def has_had_groups() -> bool:
    """True if this process has had process groups: those of parawrap, or the user's own."""
    return _has_joined or dist.is_initialized()


def leave_groups() -> None:
    """Destroy all process groups of this process."""
    with contextlib.suppress(Exception):  # a group with dead peers may raise
        dist.destroy_process_group()


def _number_groups_again() -> None:
    """Make torch number the next groups from 0.

    torch also counts a group that could not be joined, and starts again from 0 only when it
    destroys the default group. Ranks that count differently would wait for each other forever.
    """
    with contextlib.suppress(Exception):  # the caller raises the first error
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leave_groups()


def stay_on_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user set their variables."""
    interfaces = [name for _, name in socket.if_nameindex()]
    found = [name for name in LOOPBACK_INTERFACES if name in interfaces]
    loopback = found[0] if found else LOOPBACK_INTERFACES[0]
    for name in INTERFACE_VARIABLES:
        os.environ.setdefault(name, loopback)


def count_operations() -> int | None:
    """Return the number of collectives that this rank has begun; None without a group."""
    if not dist.is_initialized():
        return None
    try:
        return sequence_number_of(dist.group.WORLD)
    except Exception:  # noqa: BLE001 (a backend that does not count: equal in all ranks)
        return 0


# -- broken connections

# The name of a socket in /dev/fd, which no later socket gets, and its descriptor
_Link = tuple[str, int]

_links: set[_Link] = set()  # the connections of this rank to others


def break_links() -> None:
    """Shut down the connections to other ranks, and abort NCCL: waiting collectives then raise.

    torch offers this for NCCL only (`ProcessGroup.abort`). Listening sockets stay, because gloo
    ends the process without them.
    """
    if dist.is_initialized() and torch.cuda.is_initialized():
        with contextlib.suppress(Exception):  # a group without a backend for the device
            dist.group.WORLD.abort()  # type: ignore[union-attr]
    # Only connections that are still open: another file may have the number of a closed one
    for _, number in _links & _connections():
        # On a duplicate, which this block closes: the descriptor itself belongs to gloo
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as link:
            link.getpeername()  # raises for a listening socket
            link.shutdown(socket.SHUT_RDWR)


def _connections() -> set[_Link]:
    """Return all open sockets of this process."""
    found = set()
    for file in os.listdir(_OPEN_FILES):  # noqa: PTH208 (names only)
        with contextlib.suppress(OSError):  # closed meanwhile, as the descriptor of the folder
            name = os.readlink(_OPEN_FILES / file)  # noqa: PTH115
            if name.startswith("socket:"):
                found.add((name, int(file)))
    return found

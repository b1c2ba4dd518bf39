"""Where ranks meet, and the process groups they make there.

The parent keeps the store, not rank 0: it outlives every rank, and a rank that dies takes no other rank's store with it. On
one machine it listens on the loopback interface, on a port that the system gave out and that was never free in between.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform

__all__ = [
    "Meeting",
    "enter_groups",
    "leave_groups",
    "meeting_of",
    "meeting_place",
    "open_store",
    "own_group",
    "private_folder",
]

_BACKLOG = 4096
_LONGEST_TEMP = 70
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one launch find each other: a host and port, or a file."""

    host: str | None = None
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        return f"file {self.path}" if self.path else f"tcp {self.host}:{self.port or '(any free port)'}"


def meeting_of(platform: Platform) -> Meeting | None:
    """Where the platform would have ranks meet, before anything is opened; None where they form no group."""
    if not platform.requires_ipc:
        return None
    if platform.ipc_protocol == "file":
        return Meeting(path="(in a new private folder)")
    return Meeting(platform.master_addr or _LOOPBACK, platform.master_port)


@contextmanager
def meeting_place(platform: Platform) -> Iterator[Meeting | None]:
    """Keep a store open for the ranks of a launch.

    Raises:
        LaunchError: the address that the platform names cannot be listened on.
    """
    planned = meeting_of(platform)
    if planned is None:
        yield None
    elif planned.path is not None:
        with private_folder() as folder:
            yield Meeting(path=str(folder / "store"))
    else:
        listener = _listen(planned)
        port = listener.getsockname()[1]
        host = str(planned.host)
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        yield Meeting(host, port)
        del store


def _listen(meeting: Meeting) -> socket.socket:
    listener = None
    try:
        family = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((meeting.host, meeting.port))
        listener.listen(_BACKLOG)
    except OSError as error:
        if listener is not None:
            listener.close()
        place = f"{meeting.host}:{meeting.port}"
        msg = f"the ranks cannot meet at {place}: {error}; leave master_addr and master_port out for a free port here"
        raise LaunchError(msg) from error
    return listener


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that no other user may enter, gone at the end."""
    # Made with mode 0700. The path of a socket within may have a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="parawrap-", dir="/tmp" if len(tempfile.gettempdir()) > _LONGEST_TEMP else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def open_store(meeting: Meeting, world_size: int) -> dist.Store:
    """A rank's own line to the store."""
    if meeting.path is not None:
        return dist.FileStore(meeting.path, world_size)
    return dist.TCPStore(str(meeting.host), meeting.port, is_master=False, wait_for_workers=False)


def enter_groups(
    platform: Platform, store: dist.Store, rank: int, world_size: int, device: torch.device, *, one_machine: bool
) -> dist.ProcessGroup | None:
    """Join the world, and the group that the platform puts this rank in; None where it puts it in none."""
    if one_machine:
        _stay_on_loopback()
    dist.init_process_group(
        platform.process_group_backend,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device if device.type == "cuda" else None,
    )
    if not platform.ipc_groups:
        return cast("dist.ProcessGroup", dist.group.WORLD)
    return own_group(platform.ipc_groups, rank)


def own_group(groups: Sequence[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Every rank enters every new_group, as torch.distributed asks, in the same order."""
    mine: dist.ProcessGroup | None = None
    for ranks in groups:
        made = dist.new_group(list(ranks))
        if rank in ranks:
            mine = cast("dist.ProcessGroup", made)
    return mine


def leave_groups() -> None:
    """End every process group of this process."""
    with contextlib.suppress(Exception):  # one whose peers are gone already may complain
        dist.destroy_process_group()


def _stay_on_loopback() -> None:
    """Gloo and NCCL listen on every interface unless told otherwise; what the user told them stays."""
    (loopback,) = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")][:1] or ["lo"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)

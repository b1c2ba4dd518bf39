"""The store where ranks meet, and the process groups that they form."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from parawrap.errors import LaunchError
from parawrap.launch._platform import Platform

__all__ = [
    "LOOPBACK",
    "StoreAddress",
    "enter_groups",
    "leave_groups",
    "make_own_group",
    "open_store",
    "plan_store",
    "stay_on_loopback",
]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class StoreAddress:
    """The store where the ranks of one launch meet: at a host and port, or in a file.

    With a file, host and port are a reserved address for MASTER_ADDR and MASTER_PORT. User code on rank 0 may open a store
    there.
    """

    host: str | None = None
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        return f"file {self.path}" if self.path else f"tcp {self.host}:{self.port or '(any free port)'}"


def plan_store(platform: Platform, host: str | None = None) -> StoreAddress | None:
    """Return where a platform's ranks would meet; None if they do not form process groups.

    Args:
        platform: The launch's platform.
        host: The address of the store, unless the platform sets one. None selects the loopback interface.
    """
    if not platform.requires_ipc:
        return None
    if _protocol(platform) == "file":
        return StoreAddress(path="(in a new private folder)")
    return StoreAddress(platform.master_addr or host or LOOPBACK, platform.master_port)


def _protocol(platform: Platform) -> str:
    """Return the platform's protocol. The default is a file if all ranks run on the machine that keeps the store."""
    if platform.ipc_protocol is not None:
        return platform.ipc_protocol
    names_address = platform.master_addr is not None or platform.master_port != 0
    return "tcp" if names_address or platform.n_nodes > 1 or platform.launcher == "ray" else "file"


def open_store(meeting: StoreAddress, world_size: int) -> dist.Store:
    """Connect a rank to the store.

    Raises:
        LaunchError: If the store cannot be reached.
    """
    if meeting.path is not None:
        if not Path(meeting.path).parent.exists():  # torch would wait for the folder while it holds the GIL
            msg = "the launch of this rank has ended already, and its store is gone"
            raise LaunchError(msg)
        return dist.FileStore(meeting.path, world_size)
    try:
        return dist.TCPStore(str(meeting.host), meeting.port, is_master=False, wait_for_workers=False)
    except (RuntimeError, dist.DistError) as error:
        msg = (
            f"this rank cannot reach the store of its launch at {meeting.host}:{meeting.port}: {error}. The store accepts "
            "connections from any process, so another program may have disturbed it"
        )
        raise LaunchError(msg) from error


def enter_groups(
    platform: Platform, store: dist.Store, rank: int, world_size: int, device: torch.device, *, one_machine: bool
) -> dist.ProcessGroup | None:
    """Join the world's process group and this rank's group in ``ipc_groups``.

    Return the rank's group. Return None if ``ipc_groups`` does not contain this rank.
    """
    if one_machine:
        stay_on_loopback()
    try:
        dist.init_process_group(
            platform.process_group_backend,
            store=store,
            rank=rank,
            world_size=world_size,
            device_id=device if device.type == "cuda" else None,
            timeout=platform.ipc_timeout,
        )
    except Exception:
        _number_groups_anew()
        raise
    if not platform.ipc_groups:
        return cast("dist.ProcessGroup", dist.group.WORLD)
    return make_own_group(platform, rank)


def _number_groups_anew() -> None:
    """Make torch number the next groups as the first ones.

    It counts a group that could not be joined, and starts from 0 only when it destroys the default group. Ranks with
    different numbers of groups would wait for each other forever.
    """
    with contextlib.suppress(Exception):  # the first error is raised
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    leave_groups()


def make_own_group(platform: Platform, rank: int) -> dist.ProcessGroup | None:
    """Make all ``ipc_groups``, in the same order in every rank, as torch.distributed requires. Return this rank's group."""
    mine: dist.ProcessGroup | None = None
    for ranks in platform.ipc_groups or ():
        made = dist.new_group(list(ranks), timeout=platform.ipc_timeout)
        if rank in ranks:
            mine = cast("dist.ProcessGroup", made)
    return mine


def leave_groups() -> None:
    """Destroy all process groups of this process."""
    with contextlib.suppress(Exception):  # a group with dead peers may raise
        dist.destroy_process_group()


def stay_on_loopback() -> None:
    """Restrict gloo and NCCL to the loopback interface, unless the user set their variables."""
    (loopback,) = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")][:1] or ["lo"]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", loopback)

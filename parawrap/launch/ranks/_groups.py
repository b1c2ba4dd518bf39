"""Where ranks meet, and the process groups they make there."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist

from parawrap.launch._platform import Platform

__all__ = [
    "LOOPBACK",
    "Rendezvous",
    "enter_groups",
    "leave_groups",
    "open_store",
    "own_group",
    "planned_rendezvous",
]

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one launch find each other: a host and port, or a file."""

    host: str | None = None
    port: int = 0
    path: str | None = None

    def __str__(self) -> str:
        return f"file {self.path}" if self.path else f"tcp {self.host}:{self.port or '(any free port)'}"


def planned_rendezvous(platform: Platform, host: str | None = None) -> Rendezvous | None:
    """Where the platform would have ranks meet, before anything is opened; None where they form no group.

    Args:
        platform: of the launch.
        host: where the store is, unless the platform says it; None for this machine alone.
    """
    if not platform.requires_ipc:
        return None
    if platform.ipc_protocol == "file":
        return Rendezvous(path="(in a new private folder)")
    return Rendezvous(platform.master_addr or host or LOOPBACK, platform.master_port)


def open_store(meeting: Rendezvous, world_size: int) -> dist.Store:
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

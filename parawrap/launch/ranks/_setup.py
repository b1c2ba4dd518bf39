"""How a process becomes a rank: its device, its seeds and its process groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parawrap.launch._devices import Device, rank_device
from parawrap.launch._platform import Platform
from parawrap.launch._rank import Rank
from parawrap.launch._seeds import seed
from parawrap.launch.ranks._groups import enter_groups, own_group

__all__ = ["Place", "set_up"]


@dataclass(frozen=True)
class Place:
    """A rank's numbers."""

    global_rank: int
    local_rank: int
    node: int
    world_size: int
    ranks_per_node: int
    restart: int = 0


def set_up(place: Place, platform: Platform, store: dist.Store | None, group: dist.ProcessGroup | None = None) -> Rank:
    """Make this process the rank.

    Args:
        place: which one.
        platform: of the launch.
        store: where the ranks meet; None forms no group.
        group: the process group that is there already, where there is one; only those of ``ipc_groups`` are made then.
    """
    device = rank_device(Device(platform.device), place.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    seed(platform.seed)
    rank = Rank(place.global_rank, place.local_rank, place.node, place.world_size, device, platform, group, place.restart)
    if group is not None and platform.ipc_groups:
        return replace(rank, group=own_group(platform.ipc_groups, place.global_rank))
    if store is None or group is not None:
        return rank
    one_machine = place.ranks_per_node == place.world_size
    group = enter_groups(platform, store, place.global_rank, place.world_size, device, one_machine=one_machine)
    return replace(rank, group=group)

"""Turn a process into a rank: set its device, seeds, and process groups."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from parawrap.errors import PlatformError
from parawrap.launch._devices import Device, make_current, rank_device, visible
from parawrap.launch._platform import Platform
from parawrap.launch._rank import Rank
from parawrap.launch._seeds import seed
from parawrap.launch.rank._loader_warning import watch_loaders
from parawrap.launch.rank._process_groups import enter_groups, make_own_group

__all__ = ["Place", "set_up"]


@dataclass(frozen=True)
class Place:
    """A rank's numbers in its world."""

    global_rank: int
    local_rank: int
    node: int
    world_size: int
    ranks_per_node: int
    restart: int = 0


def set_up(place: Place, platform: Platform, store: dist.Store | None, group: dist.ProcessGroup | None = None) -> Rank:
    """Set up this process as a rank, and return the rank.

    Args:
        place: The rank's place.
        platform: The launch's platform.
        store: The store where the ranks meet. None forms no process group.
        group: An existing process group of the world. If given, only the groups of ``ipc_groups`` are made.

    Raises:
        PlatformError: If the rank's device is not on this node.
    """
    device = rank_device(Device(platform.device), place.local_rank)
    if device.type == "cuda":
        _check_cuda(place)
    if device.type == "neuron":
        _check_neuron(place)
    make_current(device)
    seed(platform.seed)
    if place.world_size > 1:
        watch_loaders()
    rank = Rank(place.global_rank, place.local_rank, place.node, place.world_size, device, platform, group, place.restart)
    if group is not None and platform.ipc_groups:
        return replace(rank, group=make_own_group(platform, place.global_rank))
    if store is None or group is not None:
        return rank
    one_machine = place.ranks_per_node == place.world_size
    group = enter_groups(platform, store, place.global_rank, place.world_size, device, one_machine=one_machine)
    return replace(rank, group=group)


def _check_cuda(place: Place) -> None:
    there = torch.cuda.device_count()
    if place.local_rank < there:
        return
    lacks = (
        f"its torch {torch.__version__} is built without CUDA: install a CUDA build of torch there (https://pytorch.org)"
        if torch.version.cuda is None
        else f"{there} CUDA device(s) are visible: reduce n_gpus, or check CUDA_VISIBLE_DEVICES and `nvidia-smi` there"
    )
    msg = (
        f"rank {place.global_rank} needs GPU {place.local_rank} of node {place.node} ({socket.gethostname()}), but {lacks}"
    )
    raise PlatformError(msg)


def _check_neuron(place: Place) -> None:
    there = visible(Device.NEURON)
    if place.local_rank >= there:
        msg = (
            f"rank {place.global_rank} needs neuron:{place.local_rank} of node {place.node} ({socket.gethostname()}), but "
            f"torch sees {there} NeuronCore(s) there: reduce n_gpus, or check NEURON_RT_VISIBLE_CORES and `neuron-ls` there"
        )
        raise PlatformError(msg)

"""Shard the parameters of modules over the ranks with torch's fully_shard (FSDP2)."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parawrap.functional._averages import buckets
from parawrap.functional._collectives import collective_device, exchange_json, find_difference, group_size
from parawrap.launch import make_current

__all__ = ["blocks_of", "fully_sharded"]


def fully_sharded(module: nn.Module, device: torch.device, **options: Any) -> nn.Module:
    """Copy rank 0's parameters and buffers to all ranks, then shard the module in place, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if isinstance(module, FSDPModule):
        return module
    _take_from_rank_0(module)
    make_current(device)  # fully_shard moves each block to the current device
    options = {"mesh": init_device_mesh(device.type, (group_size(),)), **options}
    for block in blocks_of(module):
        fully_shard(block, **options)
    fully_shard(module, **options)
    return module


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the submodules that fully_shard shards one at a time.

    A block is a child of a ModuleList or Sequential, and has a sibling of its class. It is not a ModuleList or Sequential
    itself. It has parameters, and shares none with modules outside it. Blocks do not contain blocks.
    """
    places = Counter(each for _, each in module.named_modules(remove_duplicate=False))
    uses = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    chosen: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for each in module.modules():
        is_list = _is_plain_list(each) or (each is module and isinstance(each, (nn.ModuleList, nn.Sequential)))
        children = list(each.children()) if is_list and each not in inside else []
        classes = Counter(map(type, children))
        for child in children:
            inner = Counter(parameter for _, parameter in child.named_parameters(remove_duplicate=False))
            is_owner = all(uses[parameter] == count * places[child] for parameter, count in inner.items())
            if classes[type(child)] > 1 and not _is_plain_list(child) and inner and is_owner and child not in inside:
                chosen.append(child)
                inside.update(child.modules())
    return chosen


def _is_plain_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


def _take_from_rank_0(module: nn.Module) -> None:
    """Replace parameters and buffers by those of rank 0, in place."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in named.items():
        if tensor.is_meta:
            msg = f"{name} is on the meta device and has no values. Call module.to_empty(...) and initialise it first."
            raise ValueError(msg)
    ours = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items()]
    if difference := find_difference(exchange_json(ours)):
        rank, here, there = difference
        msg = f"rank 0's module has {here}, but rank {rank}'s has {there}. Give all ranks the same architecture."
        raise ValueError(msg)
    where = collective_device()
    for bucket in buckets([tensor.detach() for tensor in named.values()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(where)
        dist.broadcast(flat.view(torch.uint8), 0)  # as bytes: backends do not support every dtype
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

"""Shard the parameters of modules over the ranks with torch's fully_shard (FSDP2)."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from parawrap.functional._averages import buckets
from parawrap.functional._collectives import collective_device, exchange_texts, group_size
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
    paths: dict[nn.Module, list[str]] = {}
    for path, each in module.named_modules(remove_duplicate=False):
        paths.setdefault(each, []).append(f"{path}.")
    owners: dict[nn.Parameter, list[str]] = {}
    for path, parameter in module.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(path)
    chosen: dict[nn.Module, None] = {}
    for each in paths:
        is_list = isinstance(each, (nn.ModuleList, nn.Sequential)) and (each is module or _is_plain_list(each))
        siblings = list(each.children()) if is_list else []
        classes = Counter(map(type, siblings))
        for child in siblings:
            inside = tuple(path for block in chosen for path in paths[block])
            is_inside = any(path.startswith(inside) for path in paths[child])
            if classes[type(child)] > 1 and not _is_plain_list(child) and not is_inside and _owns(child, paths, owners):
                chosen[child] = None
    return list(chosen)


def _is_plain_list(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.Sequential)


def _owns(block: nn.Module, paths: dict[nn.Module, list[str]], owners: dict[nn.Parameter, list[str]]) -> bool:
    """True if a module has parameters, and shares none of them with a module outside it."""
    parameters = list(block.parameters())
    ways = tuple(paths[block])
    return bool(parameters) and all(path.startswith(ways) for parameter in parameters for path in owners[parameter])


def _take_from_rank_0(module: nn.Module) -> None:
    """Replace parameters and buffers by those of rank 0, in place."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in named.items():
        if tensor.is_meta:
            msg = f"{name} is on the meta device and has no values. Call module.to_empty(...) and initialise it first."
            raise ValueError(msg)
    ours = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in named.items()]
    first, *others = [json.loads(text) for text in exchange_texts(json.dumps(ours))]
    for rank, other in enumerate(others, 1):
        if other != first:
            here = next((each for each in first if each not in other), "nothing else")
            there = next((each for each in other if each not in first), "nothing else")
            msg = f"rank 0's module has {here}, but rank {rank}'s has {there}. Give all ranks the same architecture."
            raise ValueError(msg)
    where = collective_device()
    for bucket in buckets([tensor.detach() for tensor in named.values()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(where)
        dist.broadcast(flat.view(torch.uint8), 0)  # as bytes: backends do not support every dtype
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))

"""Seeds, devices, and modules of a rank; modules that train together with those of other ranks."""

from __future__ import annotations

import os
import sys
from itertools import chain
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parawrap._private_names import COMPILED, BatchNorm
from parawrap.functional._collectives import group_size
from parawrap.launch import (
    Device,
    Platform,
    PlatformFields,
    current_rank,
    inside_a_rank,
    make_current,
    seed_all,
)
from parawrap.tree import replace_nodes

T = TypeVar("T", bound=nn.Module)


def seed_generators(seed: int, offset: int = 0) -> None:
    """Seed Python, torch, accelerators, and numpy (if loaded) with ``seed + offset``.

    ``Platform(seed=...)`` gives all ranks the same seed. ``seed_generators(seed, offset=rank)``
    gives each rank its own.

    >>> import torch
    >>> seed_generators(7, offset=1)
    >>> first = torch.rand(1)
    >>> seed_generators(8)
    >>> torch.equal(first, torch.rand(1))
    True
    """
    seed_all(seed + offset)


def optimiser_to(optimiser: torch.optim.Optimizer, device: torch.device | str | int) -> None:
    """Move the state of an optimizer to a device, in place.

    Use it if the parameters moved after the optimizer got its state, for instance from
    ``load_state_dict``. Step counters that the optimizer keeps on the CPU stay on the CPU.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> optimiser = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); optimiser.step()
    >>> optimiser_to(optimiser, "meta")
    >>> state = optimiser.state[model.weight]
    >>> state["exp_avg"].device, state["step"].device
    (device(type='meta'), device(type='cpu'))
    """
    # Parameters in groups with these options of torch have their step counter on the device
    with_step_on_device: set[Tensor] = set()
    for group in optimiser.param_groups:
        if group.get("capturable") or group.get("fused"):
            with_step_on_device.update(group["params"])
    for parameter, state in optimiser.state.items():
        for name, value in state.items():
            stays = name == "step" and parameter not in with_step_on_device
            if not stays:
                state[name] = replace_nodes(
                    value, torch.is_tensor, lambda tensor: tensor.to(device)
                )


def has_batch_norm(module: nn.Module) -> bool:
    """Return True if a module has a batch normalization layer, also a lazy or synchronized one.

    >>> import torch
    >>> has_batch_norm(torch.nn.Sequential(torch.nn.BatchNorm2d(1)))
    True
    """
    return any(isinstance(layer, BatchNorm) for layer in module.modules())


@overload
def to(
    module: T,
    local_rank: int | None = ...,
    *,
    sync_modules: Literal[False],
    device: Device | torch.device | str | int | None = ...,
    **options: Any,
) -> T: ...


@overload
def to(
    module: T,
    local_rank: int | None = ...,
    sync_modules: bool = ...,
    device: Device | torch.device | str | int | None = ...,
    **options: Any,
) -> T | DistributedDataParallel: ...


def to(
    module: nn.Module,
    local_rank: int | None = None,
    sync_modules: bool = True,
    device: Device | torch.device | str | int | None = None,
    **options: Any,
) -> nn.Module:
    """Move a module to this rank's device, and make it train with the other ranks.

    With more than one rank, the module is wrapped in DistributedDataParallel: all ranks start with
    rank 0's parameters and buffers, and gradients are averaged. It is only moved if no parameter
    requires gradients, or if there is no process group (``ipc_groups=None``).

    On CUDA, batch normalization is synchronized between ranks. torch's SyncBatchNorm does not work
    on the CPU. Create the optimizer after this call.

    Args:
        module: A module on any device.
        local_rank: The index of the device; by default the local rank.
        sync_modules: If False, only move the module.
        device: A kind such as ``"gpu"``, or the name of a torch device; by default the rank's
            device.
        **options: Options of DistributedDataParallel.

    Returns:
        `module` itself, or the DistributedDataParallel that wraps it.

    Raises:
        PlatformError: If this machine has no device of the kind.

    Example:
        >>> import torch
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def train():
        ...     model = functional.to(torch.nn.Linear(2, 2))
        ...     return type(model).__name__
        >>> train()
        RankResults('DistributedDataParallel', 'DistributedDataParallel')
    """
    target = _find_device(local_rank, device)
    trains_alone = not sync_modules or group_size() == 1
    if trains_alone or isinstance(module, DistributedDataParallel):
        return module.to(target)
    if target.type == "cuda" and has_batch_norm(module):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    module = module.to(target)
    # DistributedDataParallel refuses a module without gradients
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    ids = [target] if target.type == "cuda" else None
    return DistributedDataParallel(module, **{"device_ids": ids, **options})


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's module inside a module from `to`.

    It is the same module in ranks, inline, and with one rank.

    The wrappers of DistributedDataParallel, FullyShardedDataParallel, DataParallel, and
    torch.compile are removed, also nested ones. ``fully_shard`` changes a module in place, so the
    module itself is returned.

    Example:
        >>> import torch
        >>> from parawrap import Platform, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def train():
        ...     model = functional.to(torch.nn.Linear(2, 2, bias=False))
        ...     return list(functional.unwrap(model).state_dict())
        >>> train(), train.inline()
        (RankResults(['weight'], ['weight']), RankResults(['weight']))
    """
    wrappers: tuple[Any, ...] = (DistributedDataParallel, nn.DataParallel)
    # It is slow to import, and no module can use it before it was imported
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        wrappers += (fsdp.FullyShardedDataParallel,)
    inner: Any = module
    while True:
        if isinstance(inner, wrappers):
            inner = inner.module
        elif hasattr(inner, COMPILED):
            inner = getattr(inner, COMPILED)
        else:
            return inner  # type: ignore[no-any-return]


def _find_device(
    local_rank: int | None, device: Device | torch.device | str | int | None
) -> torch.device:
    """Return the device of a rank.

    Args:
        local_rank: The index of the device; None for that of this rank.
        device: A kind, or the name of a torch device; None for the kind of this rank.
    """
    rank = current_rank() if inside_a_rank() else None
    if local_rank is not None:
        index = local_rank
    elif rank is not None:
        index = rank.local_rank
    else:
        index = int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        own: PlatformFields = Platform() if rank is None else rank.platform
        return own.device_of(index)
    if isinstance(device, str):  # also a Device
        device = device.lower()
    kinds = (*Device, "cuda")  # "cuda" is a kind here, with the index of the rank
    if device in kinds:
        platform: PlatformFields = Platform(device=cast("Device", device))
        if rank is not None and rank.platform.device == platform.device:
            platform = rank.platform  # it has the fields that choose devices for ranks
        return platform.device_of(index)
    return torch.device(device)


def device(module: nn.Module) -> torch.device:
    """Return the device of a module's first parameter or, without parameters, of its first buffer.

    For a module without both, return the device of the rank, or the CPU outside a rank.

    >>> import torch
    >>> device(torch.nn.Linear(1, 1))
    device(type='cpu')
    """
    for tensor in chain(module.parameters(), module.buffers()):
        return tensor.device
    return current_rank().device if inside_a_rank() else torch.device("cpu")


def set_default_device(local_rank: int | None = None, platform: Platform | None = None) -> None:
    """Make this rank's device the default device for new tensors, and the current one of its kind.

    Args:
        local_rank: The index of the device; by default the local rank.
        platform: The platform with the kind of device; by default this rank's platform.

    >>> import torch
    >>> from parawrap import Platform, functional, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def where():
    ...     functional.set_default_device()
    ...     return str(torch.empty(0).device)
    >>> where()
    RankResults('cpu', 'cpu')
    """
    target = _find_device(local_rank, None if platform is None else platform.device)
    make_current(target)
    torch.set_default_device(target)

"""Helpers used inside a rank: seeds, averages over ranks, models and datasets made distributed.

They ask `current_rank` and torch.distributed where they are, and work in a process that is no rank too, as its only rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sized
from itertools import groupby
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, Sampler

from parawrap.errors import PlatformError
from parawrap.launch import Device, Platform, Rank, current_rank, inside_a_rank, rank_device, seed_all

__all__ = [
    "average_params_grads",
    "device",
    "get_dataset_sampler",
    "has_batch_norm",
    "optimiser_to",
    "seed_generators",
    "set_default_device",
    "to",
]

_BUCKET_BYTES = 64 << 20


def seed_generators(seed: int, offset: int = 0) -> None:
    """Seed python, torch, the accelerators, and numpy where it is loaded, with ``seed + offset``.

    A platform's ``seed`` makes all ranks alike; ``seed_generators(seed, offset=rank)`` makes them differ.

    >>> import torch
    >>> seed_generators(7, offset=1)
    >>> first = torch.rand(1)
    >>> seed_generators(8)
    >>> torch.equal(first, torch.rand(1))
    True
    """
    seed_all(seed + offset)


def average_params_grads(module: nn.Module, params: bool = False, grads: bool = True) -> None:
    """Replace gradients, parameters, or both, by their mean over all ranks, in place and bit for bit alike on every rank.

    The tensors of one dtype and device travel together, flattened into buckets of at most 64 MiB: one collective a bucket,
    not one a parameter. A parameter that has no gradient on this rank, but on another one, gets the mean with zeros, as
    DistributedDataParallel has it. Does nothing where there is one rank.

    Args:
        module: the same architecture on every rank.
        params: whether to average the parameters.
        grads: whether to average their gradients.

    Example:
        >>> import torch
        >>> from parawrap import Platform, current_rank, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def step():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     model(torch.full((1, 1), float(current_rank().global_rank))).sum().backward()
        ...     functional.average_params_grads(model)
        ...     return model.weight.grad.item()
        >>> step()
        RankResults(0.5, 0.5)
    """
    if _world_size() == 1:
        return
    parameters = list(module.parameters())
    if grads:
        _give_missing_gradients(parameters)
        _average([parameter.grad for parameter in parameters if parameter.grad is not None])
    if params:
        _average(
            [parameter.detach() for parameter in parameters if parameter.is_floating_point() or parameter.is_complex()]
        )


def _give_missing_gradients(parameters: list[nn.Parameter]) -> None:
    """Have every rank send the same tensors: zeros where only others have a gradient, dense ones where any rank's is."""
    if not parameters:
        return
    flags = torch.tensor(
        [_has_dense_and_sparse(each) for each in parameters], dtype=torch.uint8, device=parameters[0].device
    )
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    for parameter, (dense, sparse) in zip(parameters, flags.tolist(), strict=True):
        if parameter.grad is None and (dense or sparse):
            parameter.grad = torch.zeros_like(parameter) if dense else _no_rows_of(parameter)
        elif dense and parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()


def _has_dense_and_sparse(parameter: nn.Parameter) -> tuple[bool, bool]:
    if parameter.grad is None:
        return False, False
    is_dense = parameter.grad.layout is torch.strided
    return is_dense, not is_dense


def _no_rows_of(parameter: nn.Parameter) -> Tensor:
    """What a sparse embedding's gradient is where no row of it was used."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        rows, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape, check_invariants=False
    )


def _average(tensors: list[Tensor]) -> None:
    """The mean over ranks, in place."""
    world_size = _world_size()
    for bucket in _buckets([tensor for tensor in tensors if tensor.layout is torch.strided]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= world_size
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # an embedding's sparse gradient has another size on every rank
            dist.all_reduce(tensor)
            tensor.div_(world_size)


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors of one dtype and device, in their order, in groups of a bounded size."""
    for _, alike in groupby(sorted(tensors, key=_kind), key=_kind):
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _kind(tensor: Tensor) -> tuple[str, str]:
    return str(tensor.dtype), str(tensor.device)


def optimiser_to(optimiser: torch.optim.Optimizer, device: torch.device | str | int) -> None:
    """Move the state of an optimiser, momenta and so on, to a device; in place, whatever the state's structure.

    For an optimiser whose parameters were moved after it had state, say after ``load_state_dict``. A state's ``step`` that
    the optimiser keeps on the CPU on purpose stays there.

    >>> import torch
    >>> model = torch.nn.Linear(2, 2)
    >>> optimiser = torch.optim.Adam(model.parameters())
    >>> model(torch.ones(1, 2)).sum().backward(); optimiser.step()
    >>> optimiser_to(optimiser, "meta")
    >>> optimiser.state[model.weight]["exp_avg"].device, optimiser.state[model.weight]["step"].device
    (device(type='meta'), device(type='cpu'))
    """
    capturable = any(group.get("capturable") or group.get("fused") for group in optimiser.param_groups)
    for state in optimiser.state.values():
        for name, value in state.items():
            if name != "step" or capturable:
                state[name] = _moved(value, device)


def _moved(value: Any, device: torch.device | str | int) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_moved(item, device) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def has_batch_norm(module: nn.Module) -> bool:
    """Whether there is a batch normalisation layer in it, of any dimension, lazy and synchronised ones among them.

    >>> import torch
    >>> has_batch_norm(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.BatchNorm2d(1)))
    True
    """
    return any(isinstance(layer, _BatchNorm) for layer in module.modules())


def to(
    module: nn.Module,
    local_rank: int | None = None,
    sync_modules: bool = True,
    device: Device | torch.device | str | int | None = None,
    **ddp_kwargs: Any,
) -> nn.Module:
    """Move a module to this rank's device, and make it train with the other ranks.

    With more than one rank, and parameters that want gradients, it is wrapped in DistributedDataParallel, whose ranks start
    with rank 0's parameters; on CUDA, batch normalisation is synchronised between ranks first (torch's SyncBatchNorm does
    not work on the CPU).

    Args:
        module: on any device.
        local_rank: the device's index; the rank's own by default.
        sync_modules: False only moves.
        device: a kind such as ``"gpu"``, or whatever names a torch device; the rank's own by default.
        **ddp_kwargs: for DistributedDataParallel.

    Returns:
        `module` itself, or what wraps it.

    Raises:
        PlatformError: this machine shows no device of that kind.

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
    target = _target(local_rank, device)
    module = module.to(target)
    if not sync_modules or _world_size() == 1 or isinstance(module, DistributedDataParallel):
        return module
    if target.type == "cuda" and has_batch_norm(module):
        module = nn.SyncBatchNorm.convert_sync_batchnorm(module)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module
    ids = [target] if target.type == "cuda" else None
    return DistributedDataParallel(module, **{"device_ids": ids, **ddp_kwargs})


def _target(local_rank: int | None, device: Device | torch.device | str | int | None) -> torch.device:
    if isinstance(device, (int, torch.device)):
        return torch.device(device)
    rank = current_rank() if inside_a_rank() else None
    index = local_rank if local_rank is not None else rank.local_rank if rank else int(os.environ.get("LOCAL_RANK", "0"))
    if device is None:
        kind = Device(rank.platform.device) if rank else Device(Platform().device)
    elif device.lower() in (*Device, "cuda"):
        kind = Device(Platform(device=device).device)
    else:
        return torch.device(device.lower())
    return rank_device(kind, index)


def get_dataset_sampler(
    dataset: Dataset[Any], global_rank: int | None = None, platform: Platform | None = None, *, pad: bool = True
) -> Sampler[int] | None:
    """The sampler that gives this rank its share of a dataset; None where there is one rank, which takes everything.

    Args:
        dataset: with a length.
        global_rank: this rank's by default.
        platform: this rank's by default.
        pad: True is torch's DistributedSampler: shuffled (call ``set_epoch``), and every rank gets equally many rows, some
            of them twice where the length is no multiple of the world size, as training with collectives asks for. False
            gives every row exactly once, in order, to exactly one rank: for evaluation. Ranks may then differ by one row.

    Raises:
        TypeError: the dataset is a stream, or has no length.
        PlatformError: `global_rank` is not in the platform's world.

    Example:
        >>> from parawrap import Platform
        >>> [list(get_dataset_sampler(range(5), rank, Platform(device="cpu", n_cpus=2), pad=False)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    rank, world_size = _place(global_rank, platform)
    if not 0 <= rank < world_size:
        msg = f"global_rank={rank}: there is no such rank in a world of {world_size}"
        raise PlatformError(msg)
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        name = type(dataset).__qualname__
        msg = f"{name} has no length, or is a stream, which no sampler can share: split it by current_rank()"
        raise TypeError(msg)
    if world_size == 1:
        return None
    if pad:
        return cast("Sampler[int]", _Padded(dataset, num_replicas=world_size, rank=rank))
    return _Share(len(dataset), rank, world_size)


def _place(global_rank: int | None, platform: Platform | None) -> tuple[int, int]:
    here: Rank | None = current_rank() if inside_a_rank() else None
    world_size = platform.world_size if platform else here.world_size if here else _world_size()
    if global_rank is None:
        global_rank = here.global_rank if here else dist.get_rank() if world_size > 1 and dist.is_initialized() else 0
    return global_rank, world_size


class _Padded(DistributedSampler[Any]):
    """torch's, which shuffles by a generator on the CPU, also where `set_default_device` has named another device."""

    def __iter__(self) -> Iterator[Any]:
        with torch.device("cpu"):
            return super().__iter__()


class _Share(Sampler[int]):
    """A contiguous share of the indices, whose lengths over the ranks differ by at most one, the larger first."""

    def __init__(self, length: int, rank: int, world_size: int) -> None:
        share, longer = divmod(length, world_size)
        start = rank * share + min(rank, longer)
        self._indices = range(start, start + share + (rank < longer))

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        """Nothing is shuffled; here so that one loop serves both samplers."""


def device(module: nn.Module) -> torch.device:
    """The device of a module's first parameter, else of its first buffer, else the rank's own, else the CPU.

    >>> import torch
    >>> device(torch.nn.Linear(1, 1))
    device(type='cpu')
    """
    tensors: Iterable[Tensor] = (*module.parameters(), *module.buffers())
    for tensor in tensors:
        return tensor.device
    return current_rank().device if inside_a_rank() else torch.device("cpu")


def set_default_device(local_rank: int | None = None, platform: Platform | None = None) -> None:
    """Have this rank's new tensors made on its device, and make that the current one.

    Args:
        local_rank: the device's index; this rank's own by default.
        platform: whose kind of device; this rank's own by default.

    >>> import torch
    >>> from parawrap import Platform, functional, wrapper
    >>> @wrapper(Platform(device="cpu", n_cpus=2))
    ... def where():
    ...     functional.set_default_device()
    ...     return str(torch.empty(0).device)
    >>> where()
    RankResults('cpu', 'cpu')
    """
    target = _target(local_rank, None if platform is None else platform.device)
    if target.type == "cuda":
        torch.cuda.set_device(target)
    torch.set_default_device(target)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

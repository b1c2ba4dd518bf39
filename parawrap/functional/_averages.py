"""Average parameters and gradients over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parawrap.functional._collectives import group_size, is_whole


def average_params_grads(module: nn.Module, params: bool = False, grads: bool = True) -> None:
    """Replace gradients, parameters, or both by their mean over all ranks, in place.

    The results are bit-identical on all ranks. Tensors of one dtype and device travel in one
    collective, as a copy. If only some ranks have a gradient for a parameter, the gradients of the
    other ranks count as zeros, as in DistributedDataParallel. With one rank, or without a process
    group (``ipc_groups=None``), the function does nothing.

    Args:
        module: A module with the same architecture on every rank.
        params: Average the parameters.
        grads: Average the gradients.

    Raises:
        TypeError: If the module is sharded by ``fully_shard``, which averages gradients itself, or
            a gradient is sparse.

    Example:
        >>> import torch
        >>> from parawrap import Platform, current_rank, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2))
        ... def step():
        ...     model = torch.nn.Linear(1, 1, bias=False)
        ...     x = torch.full((1, 1), float(current_rank().global_rank))
        ...     model(x).sum().backward()
        ...     functional.average_params_grads(model)
        ...     return model.weight.grad.item()
        >>> step()
        RankResults(0.5, 0.5)
    """
    if group_size() == 1:
        return
    parameters = list(module.parameters())
    tensors: list[Tensor] = [*parameters]
    if grads:
        tensors += _gradients_of(parameters)
    if not all(map(is_whole, tensors)):
        msg = (
            "average_params_grads takes whole, dense tensors. fully_shard averages gradients over "
            "the ranks itself: leave the call out. For an embedding, use sparse=False."
        )
        raise TypeError(msg)
    if grads and parameters:
        _add_zeros(parameters)
        _average(_gradients_of(parameters))
    if params:
        _average([each.detach() for each in parameters if _has_mean(each)])


def _gradients_of(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _has_mean(tensor: Tensor) -> bool:
    """False for integers and bools, which stay as they are."""
    return tensor.is_floating_point() or tensor.is_complex()


def _add_zeros(parameters: list[nn.Parameter]) -> None:
    """Give a parameter a gradient of zeros if only other ranks have a gradient for it.

    The collective needs the same tensors in all ranks.
    """
    has_gradient = [parameter.grad is not None for parameter in parameters]
    # Integers: not all backends reduce bools
    is_used = torch.tensor(has_gradient, device=parameters[0].device).int()
    dist.all_reduce(is_used, dist.ReduceOp.MAX)
    for parameter, used in zip(parameters, is_used.tolist(), strict=True):
        if used and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _average(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, in place.

    Tensors of one dtype and device share one collective.
    """
    # In the order of the parameters, so that all ranks begin the same collectives
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in groups.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        flat.div_(group_size())  # before the sum, which could be too large for float16
        dist.all_reduce(flat)
        means = flat.split([tensor.numel() for tensor in alike])
        for tensor, mean in zip(alike, means, strict=True):
            tensor.copy_(mean.view_as(tensor))

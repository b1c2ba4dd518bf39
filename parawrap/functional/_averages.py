"""Average parameters and gradients over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parawrap.functional._collectives import group_size


def average_params_grads(module: nn.Module, params: bool = False, grads: bool = True) -> None:
    """Replace gradients, parameters, or both by their mean over all ranks, in place.

    The results are bit-identical on all ranks. Tensors of one dtype and device are copied into one,
    for one collective. If only some ranks have a gradient for a parameter, the gradients of the
    other ranks count as zeros, as in DistributedDataParallel. With one rank, the function does
    nothing.

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
    gradients = [parameter.grad for parameter in parameters if grads and parameter.grad is not None]
    if any(
        hasattr(each, "full_tensor") or each.layout is not torch.strided
        for each in (*parameters, *gradients)
    ):
        msg = (
            "average_params_grads takes whole, dense tensors. fully_shard averages gradients over "
            "the ranks itself: leave the call out. For an embedding, use sparse=False."
        )
        raise TypeError(msg)
    if grads and parameters:
        has_gradient = torch.tensor(
            [each.grad is not None for each in parameters], device=parameters[0].device
        ).int()
        dist.all_reduce(has_gradient, dist.ReduceOp.MAX)
        for parameter, is_used in zip(parameters, has_gradient.tolist(), strict=True):
            if is_used and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _average([parameter.grad for parameter in parameters if parameter.grad is not None])
    if params:
        _average(
            [each.detach() for each in parameters if each.is_floating_point() or each.is_complex()]
        )


def _average(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, in place.

    Tensors of one dtype and device share one collective.
    """
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        alike = [tensor for tensor in tensors if (tensor.dtype, tensor.device) == kind]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        flat.div_(group_size())  # before the sum, which may be too large for float16
        dist.all_reduce(flat)
        for tensor, mean in zip(
            alike, flat.split([tensor.numel() for tensor in alike]), strict=True
        ):
            tensor.copy_(mean.view_as(tensor))

"""Average parameters and gradients over ranks, in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parawrap.functional._collectives import group_size

__all__ = ["average_params_grads", "buckets"]

_BUCKET_BYTES = 64 << 20


def average_params_grads(module: nn.Module, params: bool = False, grads: bool = True) -> None:
    """Replace gradients, parameters, or both by their mean over all ranks, in place.

    The results are bit-identical on all ranks. Tensors of one dtype and device are flattened into buckets of at most 64
    MiB, with one collective per bucket. If only some ranks have a gradient for a parameter, the gradients of the other
    ranks count as zeros, as in DistributedDataParallel. With one rank, the function does nothing.

    Args:
        module: A module with the same architecture on every rank.
        params: Average the parameters.
        grads: Average the gradients.

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
    if group_size() == 1:
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
    """Make all ranks send tensors of the same layout.

    A missing gradient becomes zeros if another rank has one. All ranks send a dense gradient if any rank has one.
    """
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
    """Return an empty gradient of a sparse embedding."""
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        rows, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape, check_invariants=False
    )


def _average(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, in place."""
    ranks = group_size()
    for bucket in buckets([tensor for tensor in tensors if tensor.layout is torch.strided]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat /= ranks
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # an embedding's sparse gradient has a different size on each rank
            dist.all_reduce(tensor)
            tensor.div_(ranks)


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in buckets of bounded size, each of one dtype and device."""
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

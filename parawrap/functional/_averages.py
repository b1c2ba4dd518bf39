"""Average parameters and gradients over ranks, in buckets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parawrap.functional._collectives import group_size

_BUCKET_BYTES = 64 << 20  # one all_reduce of this size uses the network well; a guess that no test has contradicted


def average_params_grads(module: nn.Module, params: bool = False, grads: bool = True) -> None:
    """Replace gradients, parameters, or both by their mean over all ranks, in place.

    The results are bit-identical on all ranks. Tensors of one dtype and device are flattened into buckets of at most 64
    MiB, with one collective per bucket. If only some ranks have a gradient for a parameter, the gradients of the other
    ranks count as zeros, as in DistributedDataParallel. With one rank, the function does nothing.

    Args:
        module: A module with the same architecture on every rank.
        params: Average the parameters.
        grads: Average the gradients.

    Raises:
        TypeError: If the module is sharded by ``fully_shard``, which averages gradients itself.

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
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        msg = (
            "average_params_grads takes whole parameters, but fully_shard has sharded this module. Leave the call out: "
            "fully_shard averages gradients over the ranks itself."
        )
        raise TypeError(msg)
    if grads:
        _give_missing_gradients(parameters)
        _average([parameter.grad for parameter in parameters if parameter.grad is not None])
    if params:
        _average([each.detach() for each in parameters if each.is_floating_point() or each.is_complex()])


def _give_missing_gradients(parameters: list[nn.Parameter]) -> None:
    """Make all ranks send tensors of the same layout.

    A missing gradient becomes zeros if another rank has one. All ranks send a dense gradient if any rank has one.
    """
    if not parameters:
        return
    layouts = [None if parameter.grad is None else parameter.grad.layout for parameter in parameters]
    flags = [(layout is torch.strided, layout not in (None, torch.strided)) for layout in layouts]
    agreed = torch.tensor(flags, dtype=torch.uint8, device=parameters[0].device)
    dist.all_reduce(agreed, dist.ReduceOp.MAX)
    for parameter, (is_dense, is_sparse) in zip(parameters, agreed.tolist(), strict=True):
        if parameter.grad is None and (is_dense or is_sparse):
            parameter.grad = torch.zeros_like(parameter) if is_dense else _empty_sparse_gradient(parameter)
        elif is_dense and parameter.grad is not None and parameter.grad.layout is not torch.strided:
            parameter.grad = parameter.grad.to_dense()


def _empty_sparse_gradient(parameter: nn.Parameter) -> Tensor:
    rows = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(
        rows, parameter.new_empty(0, *parameter.shape[1:]), parameter.shape, check_invariants=False
    )


def _average(tensors: list[Tensor]) -> None:
    """Replace tensors by their mean over ranks, in place."""
    for bucket in buckets([tensor for tensor in tensors if tensor.layout is torch.strided]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        _average_one(flat)
        for tensor, mean in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(mean.view_as(tensor))
    for tensor in tensors:
        if tensor.layout is not torch.strided:  # an embedding's sparse gradient has a different size on each rank
            _average_one(tensor)


def _average_one(tensor: Tensor) -> None:
    tensor.div_(group_size())  # before the sum, which may be too large for float16
    dist.all_reduce(tensor)


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

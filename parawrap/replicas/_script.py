"""Replicas of TorchScript modules, whose attributes live in C++."""

from __future__ import annotations

import torch

from parawrap.replicas._tensors import Tensors

__all__ = ["fill_script", "replicate_script"]


def replicate_script(module: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """The module, then each scripted module in it, beside a copy that shares code and, as yet, every attribute."""
    replica: torch.nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    pairs = [(module, replica)]
    for name, child in module._modules.items():
        if child is not None:
            below = replicate_script(child)
            setattr(replica, name, below[0][1])
            pairs += below
    return pairs


def fill_script(replica: torch.nn.Module, module: torch.nn.Module, tensors: Tensors) -> None:
    """Set the replica's own parameters and buffers, and whether it trains, as the module has them now."""
    for name, parameter in module._parameters.items():
        setattr(replica, name, parameter if parameter is None else tensors.parameter(parameter))
    for name, buffer in module._buffers.items():
        setattr(replica, name, buffer if buffer is None else tensors.buffer(buffer))
    replica.training = module.training

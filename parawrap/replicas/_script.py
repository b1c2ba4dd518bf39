"""Replicas of TorchScript modules, whose attributes live in C++."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["fill_script", "replicate_script"]


class _Tensors(Protocol):
    def parameter(self, original: torch.Tensor) -> torch.Tensor: ...

    def buffer(self, original: torch.Tensor) -> torch.Tensor: ...


def replicate_script(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that shares code and, until it is filled, every attribute; the same for the scripted modules in it."""
    replica = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    for name, child in module._modules.items():
        if child is not None:
            setattr(replica, name, replicate_script(child))
    assert isinstance(replica, torch.nn.Module)
    return replica


def fill_script(replica: torch.nn.Module, module: torch.nn.Module, tensors: _Tensors) -> None:
    """Set the replica's parameters and buffers, and whether it trains, as the module has them now."""
    for name, parameter in module._parameters.items():
        setattr(replica, name, tensors.parameter(parameter))  # type: ignore[arg-type]
    for name, buffer in module._buffers.items():
        setattr(replica, name, tensors.buffer(buffer))  # type: ignore[arg-type]
    replica.training = module.training
    for name, child in module._modules.items():
        if child is not None:
            fill_script(replica._modules[name], child, tensors)  # type: ignore[arg-type]

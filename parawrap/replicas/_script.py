"""Replicas of TorchScript modules, whose attributes live in C++."""

from __future__ import annotations

from typing import Any

import torch

from parawrap.replicas._tensors import Tensors

__all__ = ["attributes_of", "fill_script", "replicate_script"]


def replicate_script(module: torch.nn.Module) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """The module, then each scripted module in it, beside a copy that shares code and, as yet, every attribute."""
    replica: torch.nn.Module = module._replicate_for_data_parallel()
    pairs = [(module, replica)]
    for name, child in module._modules.items():
        if child is not None:
            below = replicate_script(child)
            setattr(replica, name, below[0][1])
            pairs += below
    return pairs


def fill_script(replica: torch.nn.Module, module: torch.nn.Module, tensors: Tensors) -> None:
    """Set the replica's own attributes, tensors and others, as the module has them now."""
    parameters, buffers = dict(module._parameters.items()), dict(module._buffers.items())
    for name, value in attributes_of(module).items():
        if isinstance(parameter := parameters.get(name), torch.Tensor):
            setattr(replica, name, tensors.parameter(parameter))
        elif isinstance(buffer := buffers.get(name), torch.Tensor):
            setattr(replica, name, tensors.buffer(buffer))
        else:
            setattr(replica, name, tensors.attribute(value))
    replica.training = module.training


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """A scripted module's own attributes by name, parameters and buffers among them, without its submodules."""
    concrete: Any = module._concrete_type
    cpp: Any = module._c
    return {name: cpp.getattr(name) for name in concrete.get_attributes()}

"""A module that holds compiled models: a copy of it around other compiled ones, with the very tensors that it has.

What is compiled has its weights inside. What stands around it is ordinary: the copy has its parameters and buffers, not
copies of them, so that it answers as the module does after an optimizer's step, and gradients arrive in the module's own
parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parawrap.errors import ReplicaError

__all__ = ["copy_around", "modules_around"]


def modules_around(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The module and the modules in it that are not compiled, nor part of one that is."""
    if not isinstance(model, torch.jit.ScriptModule):
        yield model
        for child in model.children():
            yield from modules_around(child)


def copy_around(model: torch.nn.Module, replaced: Mapping[int, torch.nn.Module]) -> torch.nn.Module:
    """The module with other compiled models in it, by the id of those that they replace; one of these itself, if it is one.

    Raises:
        ReplicaError: an attribute cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for module in modules_around(model) for tensor in _tensors_of(module)}
    try:
        copied: torch.nn.Module = copy.deepcopy(model, {**memo, **replaced})
    except (TypeError, RuntimeError) as error:
        msg = (
            f"no replica of {type(model).__name__} can be made: {error}. Keep what cannot be copied out of the module that "
            "holds the compiled one"
        )
        raise ReplicaError(msg) from error
    return copied


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))

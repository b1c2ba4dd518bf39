"""Copy a module that contains compiled models, with other compiled models in their place.

A compiled model holds its weights inside. The ordinary modules around it share their parameters and buffers with the copy,
so the copy follows each optimizer step, and gradients arrive in the original parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parawrap.errors import ReplicaError

__all__ = ["copy_around", "modules_around"]


def modules_around(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the module and its submodules, except compiled models and their parts."""
    if not isinstance(model, torch.jit.ScriptModule):
        yield model
        for child in model.children():
            yield from modules_around(child)


def copy_around(model: torch.nn.Module, replaced: Mapping[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a copy of `model` with each compiled model replaced by ``replaced[id(compiled)]``.

    If `model` itself is in `replaced`, return its replacement.

    Raises:
        ReplicaError: If an attribute cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for module in modules_around(model) for tensor in _tensors_of(module)}
    try:
        copied: torch.nn.Module = copy.deepcopy(model, {**memo, **replaced})
    except (TypeError, RuntimeError) as error:
        msg = (
            f"{type(model).__name__} cannot be copied for a replica: {error}. Remove the attribute that cannot be copied "
            "from the module around the compiled model"
        )
        raise ReplicaError(msg) from error
    return copied


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))

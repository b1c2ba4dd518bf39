"""Find the compiled models in a module, and copy the module with other compiled models in their place.

A compiled model holds its weights inside. The ordinary modules around it share their parameters and buffers with the copy,
so the copy follows each optimizer step, and gradients arrive in the original parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from parawrap.errors import ReplicaError

__all__ = ["copy_around", "find_compiled", "modules_around", "not_traced"]


def find_compiled(model: object) -> list[torch.jit.ScriptModule]:
    """Return the outermost ScriptModules in a module, which may be the module itself, each once.

    Raises:
        ReplicaError: If the module has none. The vendor's functions silently ignore such a module.
    """
    parts = _find_scripted(model)
    if not parts:
        raise not_traced(model)
    return parts


def modules_around(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the names of the module and its submodules, except compiled models and their parts, with the modules."""
    if isinstance(model, torch.jit.ScriptModule):
        return
    yield "", model
    for name, child in model.named_children():
        for rest, module in modules_around(child):
            yield f"{name}.{rest}".rstrip("."), module


def copy_around(model: torch.nn.Module, replaced: Mapping[int, torch.nn.Module]) -> torch.nn.Module:
    """Return a copy of `model` with each compiled model replaced by ``replaced[id(compiled)]``.

    If `model` itself is in `replaced`, return its replacement.

    Raises:
        ReplicaError: If an attribute cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for _, module in modules_around(model) for tensor in _tensors_of(module)}
    try:
        copied: torch.nn.Module = copy.deepcopy(model, {**memo, **replaced})
    except (TypeError, RuntimeError) as error:
        msg = (
            f"{type(model).__name__} cannot be copied for a replica: {error}. Remove the attribute that cannot be copied "
            "from the module around the compiled model"
        )
        raise ReplicaError(msg) from error
    return copied


def not_traced(model: object) -> ReplicaError:
    """Return the error for a model that has no part compiled for NeuronCores."""
    name = type(model).__name__ if isinstance(model, torch.nn.Module) else repr(model)
    return ReplicaError(f"{name} was not traced for NeuronCores. Call parawrap.neuron.trace(model, example_inputs) first")


def _find_scripted(model: object) -> list[torch.jit.ScriptModule]:
    if isinstance(model, torch.jit.ScriptModule):
        return [model]
    children = model.children() if isinstance(model, torch.nn.Module) else ()
    found = {id(part): part for child in children for part in _find_scripted(child)}
    return list(found.values())


def _tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)
    yield from (value for value in vars(module).values() if isinstance(value, torch.Tensor))

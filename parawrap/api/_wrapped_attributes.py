"""Attributes that a wrapper lacks and that the module in it may have."""

from __future__ import annotations

from typing import Any

import torch


def submodule(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """Return a submodule by its name; None before the module has it, as before ``__init__`` and during unpickling."""
    try:
        found = torch.nn.Module.__getattr__(module, name)
    except AttributeError:
        return None
    return found if isinstance(found, torch.nn.Module) else None


def get_wrapped_attribute(
    wrapper: torch.nn.Module, module: torch.nn.Module | None, name: str, missing: AttributeError
) -> Any:
    """Return an attribute of `module`. Called by the ``__getattr__`` of `wrapper`.

    Names like ``__deepcopy__`` are not looked up: a copy of the wrapper would be a copy of the module.

    Raises:
        AttributeError: If the module lacks the attribute. If a property of the wrapper raised an AttributeError, that
            error. `missing` for special names, and before the wrapper has a module.
    """
    if name.startswith("__") and name.endswith("__"):
        raise missing
    if hasattr(type(wrapper), name):
        return object.__getattribute__(wrapper, name)  # Python drops the error of a property before `__getattr__`
    if module is None:  # before __init__, as during unpickling
        raise missing
    return getattr(module, name)

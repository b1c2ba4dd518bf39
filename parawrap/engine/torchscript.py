"""Copies of TorchScript modules for lanes on other devices than the model's. Their attributes live in C++.

Lanes on the model's device share the module itself: it has no state in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parawrap.engine._private_names import CHILDREN, getters_of_script, replicate_script
from parawrap.tree import flatten, unflatten

ScriptPairs = list[tuple[torch.nn.Module, torch.nn.Module]]
"""Each scripted module in a tree, next to its copy."""


def copy_script(module: torch.nn.Module) -> ScriptPairs:
    """Return copies of a scripted module, and of those in it, that share code and, until `fill_scripts`, attributes."""
    copied = replicate_script(module)
    pairs: ScriptPairs = [(module, copied)]
    for name, child in getattr(module, CHILDREN).items():
        if child is not None:
            below = copy_script(child)
            setattr(copied, name, below[0][1])  # C++ gives other objects, without what Python knows of the modules
            pairs += below
    return pairs


def fill_scripts(pairs: ScriptPairs, copy_of: Callable[[Any], Any]) -> None:
    """Set the attributes of copies to the copies of the originals' attributes."""
    for original, copied in pairs:
        for name, read in getters_of_script(original).items():
            leaves, spec = flatten(read())
            setattr(copied, name, unflatten(spec, list(map(copy_of, leaves))))


def tensors_of_script(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors of a scripted module, and of those in it, with the names of the attributes that hold them."""
    return [
        (f"{prefix}.{name}".lstrip("."), leaf)
        for prefix, part in module.named_modules()
        for name, read in getters_of_script(part).items()
        for leaf in flatten(read())[0]
        if isinstance(leaf, torch.Tensor)
    ]

"""Replicas of TorchScript modules. Their attributes live in C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from operator import call, is_
from typing import Any

import torch

from parawrap.replicas._private_names import HOOK_KIND, children_of, getters_of_script, replicate_script
from parawrap.tree import flatten, unflatten

__all__ = ["ScriptedState", "fill_script", "new_script", "script_pairs", "tensors_of_script"]

_COPIES = "_copies_of_children"


def new_script(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a scripted module, and of those in it, that shares code and, until `fill_script`, attributes."""
    copy = replicate_script(module)
    children = []
    for name, child in children_of(module).items():
        if child is not None:
            children.append((child, new_script(child)))
            setattr(copy, name, children[-1][1])
    vars(copy)[_COPIES] = children  # C++ gives other objects, without what Python knows of the modules
    return copy


def fill_script(module: torch.nn.Module, copy: torch.nn.Module, copy_of: Callable[[Any], Any]) -> None:
    """Set the copy's attributes to the copies of the module's."""
    for original, part in script_pairs(module, copy):
        for name, value in _attributes_of(original).items():
            leaves, spec = flatten(value)
            setattr(part, name, unflatten(spec, list(map(copy_of, leaves))))


def tensors_of_script(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a scripted module, and of those in it, with the names of the attributes that hold them."""
    for prefix, part in module.named_modules():
        for name, value in _attributes_of(part).items():
            for leaf in flatten(value)[0]:
                if isinstance(leaf, torch.Tensor):
                    yield f"{prefix}.{name}".lstrip("."), leaf


def script_pairs(module: torch.nn.Module, copy: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Yield each scripted module in a tree, next to its copy."""
    yield module, copy
    for pair in vars(copy)[_COPIES]:
        yield from script_pairs(*pair)


def _attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes of one scripted module by name, with its parameters and buffers, without its submodules."""
    return {name: read() for name, read in getters_of_script(module).items()}


class ScriptedState:
    """The attributes of a scripted module, and of the modules in it, at one moment.

    They lie in C++ and are compared before every call, so the functions that read them are made once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts = [*module.modules()]
        self._children = [*map(children_of, parts)]
        self._getters = [
            read
            for part in parts
            for name, read in getters_of_script(part).items()
            if part is module or name != HOOK_KIND  # hooks of the modules in it never run
        ]
        self._before = self._now()

    def intact(self) -> bool:
        """True if all attributes are what they were.

        Tensors and modules are compared by identity. C++ makes new Python objects of other values, which are compared.
        """
        now = self._now()
        if len(now) == len(self._before) and all(map(is_, now, self._before)):
            return True
        (leaves, spec), (leaves_before, spec_before) = flatten(now), flatten(self._before)
        return spec == spec_before and all(map(_is_same, leaves, leaves_before))

    def _now(self) -> list[Any]:
        children = chain.from_iterable(each.values() for each in self._children)
        return [*children, *map(call, self._getters)]


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or isinstance(one, torch.nn.Module | torch.Tensor):
        return one is other
    return bool(one == other) or (one != one and other != other)  # not a number

"""Replicas of TorchScript modules, whose attributes live in C++."""

from __future__ import annotations

from functools import partial
from itertools import chain
from operator import call, is_
from typing import Any

import torch

from parawrap.replicas._tensors import Tensors

__all__ = ["ScriptedState", "fill_script", "replicate_script"]

_HOOKED = "_is_full_backward_hook"


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
    for name, value in _attributes_of(module).items():
        if isinstance(parameter := parameters.get(name), torch.Tensor):
            setattr(replica, name, tensors.parameter(parameter))
        elif isinstance(buffer := buffers.get(name), torch.Tensor):
            setattr(replica, name, tensors.buffer(buffer))
        else:
            setattr(replica, name, tensors.attribute(value))


def _attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """A scripted module's own attributes by name, parameters and buffers among them, without its submodules."""
    cpp: Any = module._c
    return {name: cpp.getattr(name) for name in _names_of(module)}


def _names_of(module: torch.nn.Module) -> list[str]:
    """Those of its attributes: which there are is fixed when a module is compiled."""
    concrete: Any = vars(module).get("_concrete_type")
    if concrete is None:  # torch.jit.freeze leaves it out
        cpp: Any = module._c
        concrete = torch._C.ConcreteModuleType.from_jit_type(cpp._type())
    return [*concrete.get_attributes()]


class ScriptedState:
    """What the attributes of a scripted module, and of those in it, were at one moment.

    They lie in C++, and are looked at before every call: the ways to them are worked out once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        parts: list[Any] = [*module.modules()]
        # A dictionary within torch's own, there since 1.2, and ten times as fast to look into.
        self._children: list[dict[str, Any]] = [part._modules._python_modules for part in parts]
        self._getters = [
            partial(part._c.getattr, name)
            for part in parts
            for name in _names_of(part)
            if part is module or name != _HOOKED  # hooks of the modules in it never run
        ]
        self._before = self._now()

    def intact(self) -> bool:
        """Whether they all are what they were.

        Tensors and modules are compared by identity; what C++ makes a new Python object of at each look, by value.
        """
        now = self._now()
        if len(now) != len(self._before):
            return False
        return all(map(is_, now, self._before)) or all(map(_is_same, now, self._before))

    def _now(self) -> list[Any]:
        children = chain.from_iterable(map(dict.values, self._children))
        return [*children, *map(call, self._getters)]


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.nn.Module | torch.Tensor):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(value, other[key]) for key, value in one.items())
    return bool(one == other) or (one != one and other != other)  # not a number

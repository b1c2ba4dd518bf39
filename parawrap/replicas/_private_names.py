"""The private names of torch that replicas use. CONTRIBUTING.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from parawrap._private_name import private_name

__all__ = [
    "BUFFERS",
    "CHILDREN",
    "COMPILED_CALL",
    "COMPILED_FROM",
    "HOOK_KIND",
    "IS_REPLICA",
    "NOT_CALLED",
    "PARAMETERS",
    "buffers_of",
    "children_of",
    "compiler",
    "copy_all",
    "getters_of_script",
    "is_compiled_module",
    "recompiled",
    "replicate_script",
    "version_of",
]

# A tensor's count of writes in place
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")

# What torch.nn.Module keeps, by attribute
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
IS_REPLICA = "_is_replica"  # lets parameters of a replica be set to views
HOOK_KIND = "_is_full_backward_hook"
# Dictionaries that calls do not read. They stay shared.
NOT_CALLED = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        "_non_persistent_buffers_set",
    }
)


def buffers_of(module: torch.nn.Module) -> Any:
    """Return the module's own dictionary of buffers."""
    return module._buffers


def children_of(module: torch.nn.Module) -> Any:
    """Return the module's own dictionary of submodules."""
    return module._modules


def copy_all(copies: Iterable[torch.Tensor], originals: Iterable[torch.Tensor]) -> None:
    """Copy each original into its copy, faster than a loop over `Tensor.copy_`."""
    torch._foreach_copy_(copies, originals)  # type: ignore[arg-type]  # pyright: ignore


# torch.compile
COMPILED_CALL = "_compiled_call_impl"  # of a module whose `compile` was called
COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function


def compiler() -> Any:
    """Return torch's compiler if the process has loaded it, as the first torch.compile does; else None."""
    return sys.modules.get("torch._dynamo")


def is_compiled_module(cls: type) -> bool:
    """True for the class of the modules that torch.compile returns."""
    return compiler() is not None and issubclass(cls, compiler().OptimizedModule)


def recompiled(copy: Any, compiled: Any, copy_of: Callable[[Any], Any]) -> None:
    """Make an empty `copy` of a compiled module compile the copy of the module in it."""
    type(compiled).__init__(copy, copy_of(compiled._orig_mod), compiled.dynamo_ctx)


# TorchScript
_type_of_script = private_name("torch._C.ConcreteModuleType.from_jit_type", "replicas of TorchScript modules")


def replicate_script(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of one scripted module that shares code and attributes."""
    copy: torch.nn.Module = module._replicate_for_data_parallel()
    return copy


def getters_of_script(module: torch.nn.Module) -> dict[str, Callable[[], Any]]:
    """Return a function that reads it for each attribute that a scripted module has in C++, by name."""
    cpp: Any = module._c
    return {name: partial(cpp.getattr, name) for name in _type_of_script(cpp._type()).get_attributes()}

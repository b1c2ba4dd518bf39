"""The private names of torch that replicas use. CONTRIBUTING.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch

from parawrap._private_name import missing_name, private_attribute, private_name, private_reader

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
    "check_modules",
    "children_of",
    "compiler",
    "copy_all",
    "getters_of_script",
    "is_compiled_function",
    "is_compiled_module",
    "make_subclass",
    "recompile_copy",
    "replicate_script",
    "uses_cuda_graphs",
    "version_of",
]

# A tensor's count of writes in place
version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version", "replicas")

# A tensor of another class with the same memory and version, which is not a view
make_subclass: Callable[[type[torch.Tensor], torch.Tensor], torch.Tensor] = private_name(
    "torch.Tensor._make_subclass", "replicas"
)

# Attributes of torch.nn.Module that hold its parts
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


@cache
def check_modules() -> None:
    """Raise VersionError if modules lack what replicas copy or change: they could be wrong without an error."""
    module = torch.nn.Module()
    for name in (PARAMETERS, BUFFERS, CHILDREN, COMPILED_CALL):
        private_attribute(module, name, "replicas")


def buffers_of(module: torch.nn.Module) -> Any:
    """Return the module's own dictionary of buffers."""
    return module._buffers


def children_of(module: torch.nn.Module) -> Any:
    """Return the module's own dictionary of submodules."""
    return module._modules


# Copies tensors into others, faster than a loop over `Tensor.copy_`
copy_all: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] = private_name(
    "torch._foreach_copy_", "replicas"
)


# torch.compile
COMPILED_CALL = "_compiled_call_impl"  # of a module whose `compile` was called
COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function
_COMPILED = "replicas of compiled models"


def compiler() -> Any:
    """Return torch's compiler if the process has loaded it, as the first torch.compile does; else None."""
    return sys.modules.get("torch._dynamo")


def is_compiled_module(cls: type) -> bool:
    """True for the class of the modules that torch.compile returns."""
    return compiler() is not None and issubclass(cls, private_name("torch._dynamo.OptimizedModule", _COMPILED))


def is_compiled_function(function: Any) -> bool:
    """True for a function that torch.compile returned."""
    if compiler() is not None:
        _check_compiled_functions()
    return COMPILED_FROM in vars(function)


@cache
def _check_compiled_functions() -> None:
    """Raise VersionError if compiled functions do not have their originals. Lanes would share compiled code."""
    if not hasattr(torch.compiler.disable(lambda: None), COMPILED_FROM):
        raise missing_name(COMPILED_FROM, _COMPILED)


def recompile_copy(copy: Any, compiled: Any, copy_of: Callable[[Any], Any]) -> None:
    """Make an empty `copy` of a compiled module compile the copy of the module in it."""
    module = private_attribute(compiled, "_orig_mod", _COMPILED)
    context = private_attribute(compiled, "dynamo_ctx", _COMPILED)
    type(compiled).__init__(copy, copy_of(module), context)


def uses_cuda_graphs(compiled: Any) -> bool:
    """Return True if a compiled module captures CUDA graphs, as with ``mode="reduce-overhead"``."""
    read = getattr(compiled, "get_compiler_config", None)
    return read is not None and bool((read() or {}).get("triton.cudagraphs"))


# TorchScript
_SCRIPTED = "replicas of TorchScript modules"
_type_of_script = private_name("torch._C.ConcreteModuleType.from_jit_type", _SCRIPTED)


def replicate_script(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of one scripted module that shares code and attributes."""
    copy: torch.nn.Module = private_attribute(module, "_replicate_for_data_parallel", _SCRIPTED)()
    return copy


def getters_of_script(module: torch.nn.Module) -> dict[str, Callable[[], Any]]:
    """Return a function that reads it for each attribute that a scripted module has in C++, by name."""
    cpp: Any = private_attribute(module, "_c", _SCRIPTED)
    script_type = private_attribute(cpp, "_type", _SCRIPTED)()
    return {name: partial(cpp.getattr, name) for name in _type_of_script(script_type).get_attributes()}

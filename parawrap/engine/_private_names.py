"""The private names of torch that the engine uses. CONTRIBUTING.md lists them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.autograd import forward_ad

from parawrap._private_name import missing_name, private_attribute, private_name, private_reader

_REPLICAS = "replicas"
_LANES = "lanes"

# A tensor's count of writes in place
version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version", _REPLICAS)

# Attributes of torch.nn.Module that hold its parts
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
# Dictionaries that calls do not read. They stay shared.
NOT_CALLED = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        "_non_persistent_buffers_set",
    }
)

# Copies tensors into others, faster than a loop over `Tensor.copy_`
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = private_name("torch._foreach_copy_", _REPLICAS)

# The hooks of all modules
global_hooks: tuple[dict[int, Any], ...] = (
    private_name("torch.nn.modules.module._global_forward_hooks", _REPLICAS),
    private_name("torch.nn.modules.module._global_forward_pre_hooks", _REPLICAS),
    private_name("torch.nn.modules.module._global_backward_hooks", _REPLICAS),
    private_name("torch.nn.modules.module._global_backward_pre_hooks", _REPLICAS),
)

# Modes and hooks of the calling thread
DeviceContext: Any = private_name("torch.utils._device.DeviceContext", _LANES)
function_modes: Callable[[], list[Any]] = private_name("torch.overrides._get_current_function_mode_stack", _LANES)
count_function_modes: Callable[[], int] = private_name("torch._C._len_torch_function_stack", _LANES)
count_dispatch_modes: Callable[[], int] = private_name("torch._C._len_torch_dispatch_stack", _LANES)
saved_tensor_hooks: Callable[[bool], Any] = private_name("torch._C._autograd._top_saved_tensors_default_hooks", _LANES)
functorch_level: Callable[[], Any] = private_name("torch._C._functorch.peek_interpreter_stack", _LANES)
profiler_runs: Callable[[], bool] = private_name("torch._C._autograd._profiler_enabled", _LANES)
tracing_state: Callable[[], Any] = private_name("torch._C._get_tracing_state", _LANES)
InferenceMode: Any = private_name("torch._C._InferenceMode", _LANES)
set_grad_enabled: Callable[[bool], None] = private_name("torch._C._set_grad_enabled", _LANES)


# The level of forward-mode autograd, -1 outside it. All threads share it.
forward_ad_level: Callable[[], int] = partial(
    private_reader("torch.autograd.forward_ad._current_level", _LANES), forward_ad
)


@cache
def check_modules() -> None:
    """Raise VersionError if modules lack what replicas copy or change: they could be wrong without an error."""
    module = torch.nn.Module()
    for name in (PARAMETERS, BUFFERS, CHILDREN, COMPILED_CALL):
        private_attribute(module, name, _REPLICAS)


# torch.compile
COMPILED_CALL = "_compiled_call_impl"  # of a module whose `compile` was called
COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function
_COMPILED = "replicas of compiled models"


def compiler() -> Any:
    """Return torch's compiler if the process has loaded it, as the first torch.compile does; else None."""
    return sys.modules.get("torch._dynamo")


def is_compiled_module(value: Any) -> bool:
    """True for a module that torch.compile returned."""
    return compiler() is not None and isinstance(value, private_name("torch._dynamo.OptimizedModule", _COMPILED))


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


def recompile_copy(copy: Any, compiled: Any, copied_module: torch.nn.Module) -> None:
    """Make an empty `copy` of a compiled module compile the copy of the module in it."""
    context = private_attribute(compiled, "dynamo_ctx", _COMPILED)
    initialize: Any = type(compiled).__init__
    initialize(copy, copied_module, context)


def compiled_original(compiled: Any) -> torch.nn.Module:
    """Return the module that a compiled module was made from."""
    module: torch.nn.Module = private_attribute(compiled, "_orig_mod", _COMPILED)
    return module


def uses_cuda_graphs(compiled: Any) -> bool:
    """True if a compiled module captures CUDA graphs, as with ``mode="reduce-overhead"``."""
    read = getattr(compiled, "get_compiler_config", None)
    return read is not None and bool((read() or {}).get("triton.cudagraphs"))

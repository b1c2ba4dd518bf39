"""The private names of torch, Python, and cloudpickle that parawrap uses.

- A private name is used only where nothing public does the same. Its comment says what parawrap
  uses the name for, and which public name comes closest.
- Private names stand in this file and nowhere else. Private names of an optional package, such as
  submitit or torch_geometric, stand in the only file that uses the package.
- If a release lacks a name of a module or class, the import of parawrap fails, and the error has
  the name. ``tests/test_private_names.py`` and the tests of the feature find a missing attribute of
  an object, and a name that has got another meaning.
- Names with an underscore that Python or torch document, such as ``os._exit``, are public.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch
from torch.autograd import forward_ad


def private_name(path: str) -> Any:
    """Return the object at a dotted path.

    Raises:
        ImportError: If this release of torch or Python has no object there.

    >>> private_name("atexit._clear").__name__
    '_clear'
    >>> private_name("atexit._gone")
    Traceback (most recent call last):
    ImportError: parawrap needs atexit._gone, which Python ... with torch ... does not have. ...
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        msg = (
            f"parawrap needs {path}, which Python {platform.python_version()} with torch "
            f"{version('torch')} does not have. "
            'Install releases that the page "Tested releases" of the documentation lists'
        )
        raise ImportError(msg) from error


def private_reader(path: str) -> Callable[[Any], Any]:
    """Return a function that reads an attribute of instances, such as ``Tensor._version``.

    Raises:
        ImportError: If the class has no such attribute.
    """
    private_name(path)
    _, _, name = path.rpartition(".")
    return attrgetter(name)


# A tensor's count of writes in place, which shows whether forward or the user wrote it. Nothing
# public shows that; torch's notes on autograd describe the count.
version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version")

# Attributes of torch.nn.Module that hold its parts: they show changes of a model. The public
# `named_buffers` and its like are slower, and leave out entries that are None.
PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
# Dictionaries that calls do not read: replicas share them. Nothing public leads to them.
NOT_CALLED = frozenset(
    {
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_non_persistent_buffers_set",
    }
)
# The entries of each module's ``__dict__`` that torch makes. All others are attributes of the user,
# and so is the training flag. Nothing public lists them.
MODULE_ENTRIES = frozenset(vars(torch.nn.Module())) - {"training"}
# Dictionaries of hooks that calls run: they show hooks that were added or removed. Nothing public
# reads them.
HOOK_TABLES = frozenset(name for name in MODULE_ENTRIES - NOT_CALLED if "_hooks" in name)
PRE_HOOKS = "_forward_pre_hooks"
# The attribute that makes a tensor a Parameter for `isinstance`. Copies of parameters on other
# devices have it. The public way is an instance of Parameter, which would be a leaf of autograd.
IS_PARAMETER = "_is_param"
# The name of the attribute that a hook of torch.nn.utils.prune sets in each call. It does not count
# as a write of forward. Nothing public shows it.
pruned_name_of: Callable[[Any], Any] = attrgetter("_tensor_name")

# Copies many small tensors into others at once. The public loop over `Tensor.copy_` is slower.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = private_name(
    "torch._foreach_copy_"
)

# Hooks that run for all modules, and may write into a model that writes nothing itself. With one,
# each call is checked for writes. Nothing public reads them.
global_hooks: tuple[dict[int, Any], ...] = (
    private_name("torch.nn.modules.module._global_forward_hooks"),
    private_name("torch.nn.modules.module._global_forward_pre_hooks"),
    private_name("torch.nn.modules.module._global_backward_hooks"),
    private_name("torch.nn.modules.module._global_backward_pre_hooks"),
)

# Modes and hooks of the calling thread

# The mode of a default device goes into the lanes; under any other function mode, calls run
# plainly. The public `torch.get_default_device` does not show other modes.
DeviceContext: Any = private_name("torch.utils._device.DeviceContext")
function_modes: Callable[[], list[Any]] = private_name(
    "torch.overrides._get_current_function_mode_stack"
)
count_function_modes: Callable[[], int] = private_name("torch._C._len_torch_function_stack")
# Calls run plainly under a dispatch mode, such as a FLOP counter, and tensors are not sent under
# FakeTensorMode. Nothing public counts the modes.
count_dispatch_modes: Callable[[], int] = private_name("torch._C._len_torch_dispatch_stack")
# Calls run plainly under hooks on saved tensors. Nothing public shows them.
saved_tensor_hooks: Callable[[bool], Any] = private_name(
    "torch._C._autograd._top_saved_tensors_default_hooks"
)
# Calls run plainly inside vmap and grad. Nothing public shows them.
functorch_level: Callable[[], Any] = private_name("torch._C._functorch.peek_interpreter_stack")
# Lanes take turns under a profiler. Nothing public shows that one runs.
profiler_runs: Callable[[], bool] = private_name("torch._C._autograd._profiler_enabled")
# Calls run plainly under `torch.jit.trace`. The public `torch.jit.is_tracing` is slower.
tracing_state: Callable[[], Any] = private_name("torch._C._get_tracing_state")
# Enter the caller's modes in a lane. The public `torch.inference_mode` and `torch.set_grad_enabled`
# are slower.
InferenceMode: Any = private_name("torch._C._InferenceMode")
set_grad_enabled: Callable[[bool], None] = private_name("torch._C._set_grad_enabled")

# The level of forward-mode autograd, -1 outside it: calls run plainly there. All threads share it.
# Nothing public shows it.
forward_ad_level: Callable[[], int] = partial(
    private_reader("torch.autograd.forward_ad._current_level"), forward_ad
)

# Attributes by which torch.compile connects the user's module or function with the compiled one.
# Lanes get compiled copies of the user's. Nothing public connects the two.
COMPILED_CALL = "_compiled_call_impl"  # of a module whose `compile` was called: the compiled call
COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function: the user's function
COMPILED = "_orig_mod"  # of a compiled module: the user's module


def compiler() -> Any:
    """Return torch's compiler; None if the process has not loaded it.

    The first torch.compile loads it.
    """
    return sys.modules.get("torch._dynamo")


def is_compiled_module(value: Any) -> bool:
    """True for a module that torch.compile returned."""
    if compiler() is None:  # looking up the class would load the compiler, which takes seconds
        return False
    return isinstance(value, private_name("torch._dynamo.OptimizedModule"))


def is_compiled_function(function: Any) -> bool:
    """True for a function that torch.compile returned."""
    return COMPILED_FROM in vars(function)


def recompile_copy(copy: Any, compiled: Any, copied_module: torch.nn.Module) -> None:
    """Initialize the empty `copy` of a compiled module, so that it compiles `copied_module`."""
    # Through the class, because the call of `__init__` of an instance is an error for type checkers
    initialize: Any = type(compiled).__init__
    initialize(copy, copied_module, compiled.dynamo_ctx)


def compiled_original(compiled: Any) -> torch.nn.Module:
    """Return the user's module in a compiled module."""
    module: torch.nn.Module = getattr(compiled, COMPILED)
    return module


def uses_cuda_graphs(compiled: Any) -> bool:
    """True if a compiled module captures CUDA graphs, as with ``mode="reduce-overhead"``."""
    read = getattr(compiled, "get_compiler_config", None)
    return read is not None and bool((read() or {}).get("triton.cudagraphs"))


# Parts of tensors, batches, and modules

# The two parts of a sparse tensor, whose memory must stay until a CUDA stream has used it. The
# public `Tensor.indices` and `Tensor.values` refuse a tensor that is not coalesced.
indices_of = private_reader("torch.Tensor._indices")
values_of = private_reader("torch.Tensor._values")
# Without it, `tree_map` of torch takes a `Parts` of `tp_collate` as one leaf. Nothing public
# registers a class.
register_pytree_node: Any = private_name("torch.utils._pytree.register_pytree_node")
# The base class of all batch norms, also of the user's own. A list of the public classes would have
# torch's only.
BatchNorm: Any = private_name("torch.nn.modules.batchnorm._BatchNorm")

# Classes of tensors that are refused, because their copies have no meaning in another process. They
# have no public names.
FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.ShardedTensor"


def loaded_class(path: str) -> Any:
    """Return a class if its module is loaded.

    Else return an empty tuple: `isinstance` then finds no instance.
    """
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, ())


# Processes

# Runs the exit handlers of a rank, which then exits without unloading torch. Nothing public does.
run_exit_handlers = private_name("atexit._run_exitfuncs")
# Waits for the threads that a rank's function started, and ends idle workers of thread pools.
# Nothing public does both.
join_threads = private_name("threading._shutdown")

# cloudpickle has no public names for these.
# The globals that a function uses.
names_in_code = private_name("cloudpickle.cloudpickle._extract_code_globals")
# True for a function, class, or module that is pickled by its name.
goes_by_name = private_name("cloudpickle.cloudpickle._should_pickle_by_reference")
# Make a class that is pickled by value. parawrap keeps its slots, and does not run its
# `__init_subclass__` again.
make_class = private_name("cloudpickle.cloudpickle._make_skeleton_class")
make_enum = private_name("cloudpickle.cloudpickle._make_skeleton_enum")
# Tables by which an object that comes back has the sender's own class.
id_of_class = private_name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS")
class_of_id = private_name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID")

# Flags and warning filters of this interpreter, for its ranks. Nothing public lists them.
interpreter_options = private_name("subprocess._args_from_interpreter_flags")
# The environment as bytes. It is compared at each call, and decoded only if it changed; the public
# `dict(os.environ)` is slower. Variables of a rank are set in it alone: `os.environ` has them, and
# programs that the rank starts do not. Nothing public does that.
raw_environ: Any = getattr(os.environ, "_data", os.environ)
# The settings that children of multiprocessing get, such as their authkey. In them, loader workers
# get the description of their rank. Environment variables, which are public, go to all programs.
_settings_of: Callable[[Any], dict[str, Any]] = attrgetter("_config")
# The process that removes shared memory and semaphores that nothing has unlinked. Ranks report to
# the tracker of the script. The public `multiprocessing.resource_tracker.getfd` only reads the
# connection, and cannot set it.
_tracker: Any = private_name("multiprocessing.resource_tracker._resource_tracker")
# Finalizers, also of torch's libraries. Ranks leave them out, as they would delay the exit. Nothing
# public lists them.
_finalizers: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})


def keep_finalizers_from_exits() -> None:
    """Take the finalizers that exist now out of the exits of this process and of its forks."""
    for finalizer in list(_finalizers):
        finalizer.atexit = False


def update_in_python(variables: Mapping[str, str]) -> tuple[str, dict[Any, Any]]:
    """Return the name of a function, and its argument: the call sets variables in Python alone.

    `pkgutil.resolve_name` finds the function by its name, also in a process without parawrap.
    """
    if raw_environ is os.environ:
        return "os:environ.update", dict(variables)
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    return "os:environ._data.update", encoded


def set_in_python(name: str, value: str) -> None:
    """Set a variable in `os.environ`, and not in the environment that started programs get."""
    if raw_environ is os.environ:
        os.environ[name] = value
    else:
        raw_environ[os.fsencode(name)] = os.fsencode(value)


def process_configuration() -> dict[str, Any]:
    """Return the settings of this process. Its children of multiprocessing get a copy of them."""
    return _settings_of(multiprocessing.current_process())


def imports_main() -> bool:
    """True while a child of multiprocessing runs the main script again, to find definitions.

    A launch in the script is refused then. Nothing public shows it.
    """
    return bool(getattr(multiprocessing.current_process(), "_inheriting", False))


def tracker_connection() -> int | None:
    """Return the descriptor of the connection to the resource tracker; None if none runs."""
    connection: int | None = _tracker._fd
    return connection


def use_tracker(connection: int) -> None:
    """Use the resource tracker of another process, as children of multiprocessing do."""
    _tracker._fd = connection


def sequence_number_of(group: Any) -> int:
    """Return the number of operations that this process has begun in a process group.

    It shows groups of ranks that are out of step after a failed call. Nothing public counts them.
    """
    return int(group._get_sequence_number_for_group())

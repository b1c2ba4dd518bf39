"""The private names of torch, Python, and cloudpickle that parawrap uses.

- A private name is used only where nothing public does the same. The comment at each one says what
  it is needed for, and which public name comes closest.
- Private names stand in this file and nowhere else. Those of optional packages, such as submitit
  and torch_geometric, stand in the only file that uses the package.
- If a release lacks one, the import of parawrap fails, and its error says which. The import does
  not notice a missing attribute of objects; ``tests/test_private_names.py`` and the tests of the
  feature do, as they notice a name that means something else.
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
        ImportError: If there is none in this release of torch or Python.

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
    """Return a function that reads an attribute of instances, such as ``Tensor._version``."""
    private_name(path)
    return attrgetter(path.rpartition(".")[2])


# A tensor's count of writes in place, which shows what forward and the user wrote. Nothing public
# does; torch's notes on autograd describe it.
version_of: Callable[[torch.Tensor], int] = private_reader("torch.Tensor._version")

# Attributes of torch.nn.Module that hold its parts: they show changes of a model. The public
# `named_buffers` and others are slower, and leave entries out that are None.
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
# The entries of each module's ``__dict__`` that torch makes, which are no attributes of the user's.
# The training flag is set by users. Nothing public lists them.
MODULE_ENTRIES = frozenset(vars(torch.nn.Module())) - {"training"}
# Dictionaries of hooks that calls run: they show hooks that were added or removed. Nothing public
# reads them.
HOOK_TABLES = frozenset(name for name in MODULE_ENTRIES - NOT_CALLED if "_hooks" in name)
PRE_HOOKS = "_forward_pre_hooks"
# True for tensors that are parameters for `isinstance`: copies of parameters on other devices are.
# The public way is a subclass of Parameter, which would be a leaf
IS_PARAMETER = "_is_param"
# The name of the attribute that a hook of torch.nn.utils.prune computes in each call, which is no
# write of forward. Nothing public tells it.
pruned_name_of: Callable[[Any], Any] = attrgetter("_tensor_name")

# Copies many small tensors into others at once. The public loop over `Tensor.copy_` is slower.
copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = private_name(
    "torch._foreach_copy_"
)

# The hooks of all modules: with such a hook, also a model that writes nothing itself is checked for
# writes. Nothing public reads them.
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

# torch.compile: the user's module or function in what it returned, and copies of that for lanes.
# Nothing public leads from one to the other.
COMPILED_CALL = "_compiled_call_impl"  # of a module whose `compile` was called
COMPILED_FROM = "_torchdynamo_orig_callable"  # of a compiled function
COMPILED = "_orig_mod"  # of a compiled module: the module that it was made from


def compiler() -> Any:
    """Return torch's compiler if the process has loaded it, as the first torch.compile does.

    Else None.
    """
    return sys.modules.get("torch._dynamo")


def is_compiled_module(value: Any) -> bool:
    """True for a module that torch.compile returned."""
    return compiler() is not None and isinstance(
        value, private_name("torch._dynamo.OptimizedModule")
    )


def is_compiled_function(function: Any) -> bool:
    """True for a function that torch.compile returned."""
    return COMPILED_FROM in vars(function)


def recompile_copy(copy: Any, compiled: Any, copied_module: torch.nn.Module) -> None:
    """Make an empty `copy` of a compiled module compile the copy of the module in it."""
    initialize: Any = type(compiled).__init__
    initialize(copy, copied_module, compiled.dynamo_ctx)


def compiled_original(compiled: Any) -> torch.nn.Module:
    """Return the module that a compiled module was made from."""
    module: torch.nn.Module = getattr(compiled, COMPILED)
    return module


def uses_cuda_graphs(compiled: Any) -> bool:
    """True if a compiled module captures CUDA graphs, as with ``mode="reduce-overhead"``."""
    read = getattr(compiled, "get_compiler_config", None)
    return read is not None and bool((read() or {}).get("triton.cudagraphs"))


# Parts of tensors, batches, and modules

# The parts of a sparse tensor, whose memory is kept until a stream has used it. The public
# `Tensor.indices` and `Tensor.values` refuse a tensor that is not coalesced.
indices_of = private_reader("torch.Tensor._indices")
values_of = private_reader("torch.Tensor._values")
# Without it, `tree_map` of torch takes the parts of a batch as one leaf. Nothing public registers a
# class.
register_pytree_node: Any = private_name("torch.utils._pytree.register_pytree_node")
# The base class of all batch norms, also of a user's own. A public list has torch's classes only.
BatchNorm: Any = private_name("torch.nn.modules.batchnorm._BatchNorm")

# Tensors whose copies mean nothing in another process, and which are refused. Their classes have no
# public names.
FAKE_TENSOR = "torch._subclasses.fake_tensor.FakeTensor"
SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.ShardedTensor"


def loaded_class(path: str) -> Any:
    """Return a class if its module is loaded.

    Else an empty tuple, of which nothing is an instance.
    """
    module, _, name = path.rpartition(".")
    return getattr(sys.modules.get(module), name, ())


# Processes

# Runs the exit handlers of a rank, which leaves without unloading torch. Nothing public does.
run_exit_handlers = private_name("atexit._run_exitfuncs")
# Waits for the threads that a rank's function started, and ends idle workers of thread pools.
# Nothing public does both.
join_threads = private_name("threading._shutdown")
# Of cloudpickle, without public names: the globals that a function uses; what goes by name; the
# makers of classes that go by value, to keep slots and not to run `__init_subclass__` again; and
# tables for objects that go back, as objects of the sender's class
names_in_code = private_name("cloudpickle.cloudpickle._extract_code_globals")
goes_by_name = private_name("cloudpickle.cloudpickle._should_pickle_by_reference")
make_class = private_name("cloudpickle.cloudpickle._make_skeleton_class")
make_enum = private_name("cloudpickle.cloudpickle._make_skeleton_enum")
id_of_class = private_name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS")
class_of_id = private_name("cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID")
# Flags and warning filters of this interpreter, for its ranks. Nothing public lists them.
interpreter_options = private_name("subprocess._args_from_interpreter_flags")
# The environment as bytes: compared at each call, and decoded only if it changed. The public
# `dict(os.environ)` is slower. It also takes variables of a rank that programs do not see. Nothing
# public does.
raw_environ: Any = getattr(os.environ, "_data", os.environ)
# The settings that children of multiprocessing get, such as their authkey: the rank goes with them
# to loader workers. Environment variables, which are public, would go to all programs.
_of_process: Callable[[Any], dict[str, Any]] = attrgetter("_config")
# The process that removes shared memory and semaphores that nothing has unlinked: ranks report to
# that of the script. The public `multiprocessing.resource_tracker.getfd` reads the connection only.
_tracker: Any = private_name("multiprocessing.resource_tracker._resource_tracker")
# Finalizers of torch's libraries, which ranks must not run: they would exit later. Nothing public
# lists them.
_finalizers: dict[Any, Any] = getattr(weakref.finalize, "_registry", {})


def keep_finalizers_from_exits() -> None:
    """Do not run the finalizers that exist now at the exit of this process and of its forks."""
    for finalizer in list(_finalizers):
        finalizer.atexit = False


def update_in_python(variables: Mapping[str, str]) -> tuple[str, dict[Any, Any]]:
    """Return the name of a function, and its argument, that do what `set_in_python` does.

    `pkgutil.resolve_name` finds the function, in a process without parawrap too.
    """
    if raw_environ is os.environ:
        return "os:environ.update", dict(variables)
    encoded = {os.fsencode(name): os.fsencode(value) for name, value in variables.items()}
    return "os:environ._data.update", encoded


def set_in_python(name: str, value: str) -> None:
    """Set a variable in `os.environ`, and not in the environment that other programs get."""
    if raw_environ is os.environ:
        os.environ[name] = value
    else:
        raw_environ[os.fsencode(name)] = os.fsencode(value)


def process_configuration() -> dict[str, Any]:
    """Return the settings that children of multiprocessing get as a copy."""
    configuration: dict[str, Any] = _of_process(multiprocessing.current_process())
    return configuration


def imports_main() -> bool:
    """True while a child of multiprocessing runs the main script again, to find definitions.

    A launch is refused then. Nothing public shows it.
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

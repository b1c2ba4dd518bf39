"""parawrap makes PyTorch code parallel without rewriting it.

>>> import torch
>>> from parawrap import parallel
>>> model = torch.nn.Linear(3, 2)
>>> with parallel(model, ["cpu", "cpu"]):
...     y = model(torch.randn(9, 3))
>>> y.shape
torch.Size([9, 2])
"""

# The files of this folder, the packages, and the tests under tests/ that keep their promises. The
# docstring of each package has the same map of its files. A package imports errors.py, _public.py,
# _private_names.py, and the packages that tests/test_package_rules.py allows. tests/cuda/ runs
# blocks and ranks on GPUs, tests/devices/ on simulated ones. tests/fuzz/ compares random models and
# calls with plain calls, and tests/engine/test_entries.py counts the functions of a warm call.
#
# file              | contents                                  | tests
# ----------------- | ----------------------------------------- | ----------------------------------
# __init__.py       | public names, each imported when it is    | test_package_rules.py
#                   | first used                                |
# __main__.py       | `python -m parawrap`                      | cli/test_main.py
# _private_names.py | private names of torch, Python, and       | test_private_names.py
#                   | cloudpickle, each with its reason         |
# _public.py        | the decorator with which public names     | test_package_rules.py
#                   | report `parawrap` as their module         |
# _version.py       | the version, readable without torch       | cli/test_main.py
# cpu.py            | `keep_freed_memory`: malloc keeps freed   | test_cpu.py
#                   | buffers inside the block                  |
# errors.py         | all exceptions, and the texts that they   | test_errors.py
#                   | end with                                  |
# neuron.py         | `parawrap.neuron`: NeuronCores under the  | neuroncores/test_neuron.py
#                   | vendor's names                            | neuron_devices/test_parallel.py
# py.typed          | marks the package as typed                | typing/api.py
# testing.py        | `parawrap.testing`: `check_rowwise` and   | api/test_check_rowwise.py
#                   | `neuron_host`                             | neuroncores/test_choose_runtime.py
# tree.py           | nested values: flatten, rebuild, and give | test_tree.py
#                   | each leaf an address                      |
# api/              | public classes and functions: they check  | api/
#                   | arguments and delegate                    |
# backends/         | devices, the `devices` argument, copies   | backends/
#                   | between devices, warnings at the user's   | devices/
#                   | line                                      |
# cli/              | the command `parawrap`                    | cli/
# displays/         | timelines as pages and traces, tables for | displays/
#                   | notebooks                                 |
# engine/           | a call in lanes: plan, replicas, cut,     | engine/
#                   | join, streams; resumed streams            | api/parallel/
# functional/       | helpers inside a rank: seeds, loaders,    | functional/
#                   | averages, metrics                         |
# launch/           | platforms, launches, ranks that stay,     | launch/
#                   | launchers (local, torchrun, Slurm, Ray)   | contract/
# neuroncores/      | the engine on NeuronCores: the vendor's   | neuroncores/
#                   | runtimes, and emulated cores              |
# processes/        | other processes: the server that forks,   | processes/
#                   | ranks, their pool, messages, pickles      |
# workers/          | lanes in other processes, on this machine | workers/
#                   | or on Ray                                 |

import importlib
from typing import TYPE_CHECKING

from parawrap._version import __version__
from parawrap.errors import (
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    LaunchCancelledError,
    LaunchError,
    LaunchTimeoutError,
    ParawrapError,
    PlatformError,
    RankDiedError,
    ReplicaError,
    ResumeError,
    SessionError,
    ShapeError,
    ShardError,
    UnsendableError,
    VerifyError,
)

if TYPE_CHECKING:
    from parawrap import cpu, functional, neuron
    from parawrap.api.collate import default_collate, tp_collate
    from parawrap.api.collect import collect
    from parawrap.api.compare import compare
    from parawrap.api.data_parallel import DataParallel, data_parallel
    from parawrap.api.move_to_device import Batch, cuda_attrs, recursive_cuda, recursive_to
    from parawrap.api.parallel import Parallel, parallel
    from parawrap.api.parallel_wrapper import ParallelWrapper
    from parawrap.api.scatter_gather import (
        gather,
        parallel_apply,
        replicate,
        scatter,
        scatter_kwargs,
    )
    from parawrap.api.sweep import Sweep
    from parawrap.api.tuple_parallel import TupleParallel, tuple_fn
    from parawrap.api.tuples import cat, transpose
    from parawrap.api.tuplewise import Tuplewise
    from parawrap.api.wrapper import Wrapper, wrapper
    from parawrap.engine.rules.registry import register_split
    from parawrap.launch import (
        Device,
        Launch,
        OneRank,
        Platform,
        Rank,
        RankResults,
        Ranks,
        current_rank,
    )
    from parawrap.workers import build

__all__ = [
    "Batch",
    "DataParallel",
    "Device",
    "DeviceListError",
    "DeviceUnavailableError",
    "GatherError",
    "Launch",
    "LaunchCancelledError",
    "LaunchError",
    "LaunchTimeoutError",
    "OneRank",
    "Parallel",
    "ParallelWrapper",
    "ParawrapError",
    "Platform",
    "PlatformError",
    "Rank",
    "RankDiedError",
    "RankResults",
    "Ranks",
    "ReplicaError",
    "ResumeError",
    "SessionError",
    "ShapeError",
    "ShardError",
    "Sweep",
    "TupleParallel",
    "Tuplewise",
    "UnsendableError",
    "VerifyError",
    "Wrapper",
    "__version__",
    "build",
    "cat",
    "collect",
    "compare",
    "cpu",
    "cuda_attrs",
    "current_rank",
    "data_parallel",
    "default_collate",
    "functional",
    "gather",
    "neuron",
    "parallel",
    "parallel_apply",
    "recursive_cuda",
    "recursive_to",
    "register_split",
    "replicate",
    "scatter",
    "scatter_kwargs",
    "tp_collate",
    "transpose",
    "tuple_fn",
    "wrapper",
]

_MODULES = ("cpu", "functional", "neuron")
_NAMES_IN = {
    "parawrap.api.collate": ("default_collate", "tp_collate"),
    "parawrap.api.collect": ("collect",),
    "parawrap.api.compare": ("compare",),
    "parawrap.api.data_parallel": ("DataParallel", "data_parallel"),
    "parawrap.api.move_to_device": ("Batch", "cuda_attrs", "recursive_cuda", "recursive_to"),
    "parawrap.api.parallel": ("Parallel", "parallel"),
    "parawrap.api.parallel_wrapper": ("ParallelWrapper",),
    "parawrap.api.scatter_gather": (
        "gather",
        "parallel_apply",
        "replicate",
        "scatter",
        "scatter_kwargs",
    ),
    "parawrap.api.sweep": ("Sweep",),
    "parawrap.api.tuple_parallel": ("TupleParallel", "tuple_fn"),
    "parawrap.api.tuples": ("cat", "transpose"),
    "parawrap.api.tuplewise": ("Tuplewise",),
    "parawrap.api.wrapper": ("Wrapper", "wrapper"),
    "parawrap.launch": (
        "Device",
        "Launch",
        "OneRank",
        "Platform",
        "Rank",
        "RankResults",
        "Ranks",
        "current_rank",
    ),
    "parawrap.engine.rules.registry": ("register_split",),
    "parawrap.workers": ("build",),
}
_MODULE_OF = {name: module for module, names in _NAMES_IN.items() for name in names}


def __getattr__(name: str) -> object:
    """Import a submodule when one of its names is first used.

    ``parawrap --help`` then does not wait for torch.
    """
    if name in _MODULES:
        return importlib.import_module(f"parawrap.{name}")
    if name not in _MODULE_OF:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

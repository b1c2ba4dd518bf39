"""parawrap makes PyTorch code parallel without rewriting it.

>>> import torch
>>> from parawrap import parallel
>>> model = torch.nn.Linear(3, 2)
>>> with parallel(model, ["cpu", "cpu"]):
...     y = model(torch.randn(9, 3))
>>> y.shape
torch.Size([9, 2])
"""

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

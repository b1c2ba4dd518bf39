"""parawrap makes PyTorch code parallel without rewriting it.

>>> import torch
>>> from parawrap import parallel
>>> model = torch.nn.Linear(3, 2)
>>> with parallel(model, ["cpu", "cpu"]):
...     y = model(torch.randn(8, 3))
>>> y.shape
torch.Size([8, 2])
"""

from parawrap._version import __version__
from parawrap.errors import (
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    LaunchError,
    LaunchTimeoutError,
    ParawrapError,
    PlatformError,
    RankDiedError,
    ReplicaError,
    SessionError,
    ShapeError,
    ShardError,
    UnsendableError,
    VerifyError,
)
from parawrap.faces.collate import default_collate, tp_collate
from parawrap.faces.data_parallel import DataParallel, data_parallel
from parawrap.faces.moving import Batch, cuda_attrs, recursive_cuda, recursive_to
from parawrap.faces.parallel import Parallel, parallel
from parawrap.faces.parallel_wrapper import ParallelWrapper
from parawrap.faces.tuple_parallel import TupleParallel, tuple_fn
from parawrap.faces.tuples import cat, transpose
from parawrap.faces.tuplewise import Tuplewise
from parawrap.shards import register_split

__all__ = [
    "Batch",
    "DataParallel",
    "DeviceListError",
    "DeviceUnavailableError",
    "GatherError",
    "LaunchError",
    "LaunchTimeoutError",
    "Parallel",
    "ParallelWrapper",
    "ParawrapError",
    "PlatformError",
    "RankDiedError",
    "ReplicaError",
    "SessionError",
    "ShapeError",
    "ShardError",
    "TupleParallel",
    "Tuplewise",
    "UnsendableError",
    "VerifyError",
    "__version__",
    "cat",
    "cuda_attrs",
    "data_parallel",
    "default_collate",
    "parallel",
    "recursive_cuda",
    "recursive_to",
    "register_split",
    "tp_collate",
    "transpose",
    "tuple_fn",
]

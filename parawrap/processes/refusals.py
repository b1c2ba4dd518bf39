"""Values that pickle may accept, but that lose their meaning in another process."""

from __future__ import annotations

import io
import sys
from typing import Any

import torch

from parawrap._private_names import FAKE_TENSOR, SHARDED_TENSOR, count_dispatch_modes, loaded_class

_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_DTENSOR = "torch.distributed.tensor.DTensor"
_FSDP = "torch.distributed.fsdp.FullyShardedDataParallel"
_FSDP_2 = "torch.distributed.fsdp.FSDPModule"
_WHOLE_STATE = (
    "torch.distributed.checkpoint.state_dict.get_model_state_dict(model, options="
    "StateDictOptions(full_state_dict=True, cpu_offload=True))"
)


def reason_to_refuse(value: Any) -> str | None:
    """Return why a value is refused as a whole, and the cure; None for other values.

    torch loads the classes of sharded and fake tensors late. A class that is not loaded has no
    instances.
    """
    # Exact classes: a subclass may support pickle. cloudpickle sends both streams by their names
    if type(value) in _FILES and value is not sys.stdout and value is not sys.stderr:
        return "an open file belongs to its process: send the path, and open the file there"
    if isinstance(value, torch.Tensor):
        return _reason_for_tensor(value)
    if isinstance(value, torch.nn.parallel.DistributedDataParallel):
        return (
            "DistributedDataParallel belongs to the process group of its rank: send "
            "functional.unwrap(model) instead"
        )
    if isinstance(value, torch.nn.Module) and isinstance(
        value, (loaded_class(_FSDP), loaded_class(_FSDP_2))
    ):
        return (
            "the module belongs to the process group of its rank, and has only this rank's shard "
            f"of the parameters: on every rank, call {_WHOLE_STATE}, and send the state instead"
        )
    return None


def _reason_for_tensor(tensor: torch.Tensor) -> str | None:
    if isinstance(tensor, loaded_class(_DTENSOR)):
        return (
            "a DTensor has only this rank's shard: on every rank, call its full_tensor(), or for "
            f"the state of a model {_WHOLE_STATE}, and send the result instead"
        )
    if isinstance(tensor, loaded_class(SHARDED_TENSOR)):
        return (
            "a ShardedTensor has only this rank's shard: for the state of a model, call "
            f"{_WHOLE_STATE} on every rank, and send that instead"
        )
    if isinstance(tensor, loaded_class(FAKE_TENSOR)):
        return (
            "a fake tensor has no values: make it outside of FakeTensorMode, and leave the mode "
            "before the launch"
        )
    return reason_of_mode()


def reason_of_mode() -> str | None:
    """Return why tensors cannot be sent or received now; None outside of FakeTensorMode."""
    # FakeTensorMode is a dispatch mode, and makes each new tensor a fake one. The count takes 50
    # ns, and is 0 in most programs, which then make no tensor here
    if count_dispatch_modes() and isinstance(torch.empty(0), loaded_class(FAKE_TENSOR)):
        return (
            "FakeTensorMode is active, in which copies of tensors have no values: leave the mode "
            "before the launch"
        )
    return None

"""The plain answer to a call, found without a trace: what `verify` compares with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.shards import FlatCall, ShardPlan

__all__ = ["plain_output"]


def plain_output(
    run: Callable[..., Any], plan: ShardPlan, flat: FlatCall, home: torch.device, devices: Sequence[torch.device]
) -> Any:
    """What `run` returns for the whole call, on copies of its tensors, with random numbers that are drawn again after it.

    `run` is a module's copy with buffers of its own; a callable's own side effects are done twice.
    """
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    (shard,) = plan.uncut().scatter(FlatCall(copies, flat.spec), [home])
    with backend_of(devices[0].type).forked_rng(devices):
        return run(*shard.args, **shard.kwargs)

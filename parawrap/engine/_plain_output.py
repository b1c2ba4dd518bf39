"""Compute the plain output of a call for `verify`, without side effects on arguments and random state."""

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
    """Return the output of `run` for the whole call, on copies of its tensors, and restore the random state.

    `run` is a replica that shares no buffer with the model. Side effects of any other callable happen twice.
    """
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in flat.leaves]
    (shard,) = plan.uncut().scatter(FlatCall(copies, flat.spec), [home])
    with backend_of(devices[0].type).forked_rng(devices):
        return run(*shard.args, **shard.kwargs)

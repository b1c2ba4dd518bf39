"""Join 0-d outputs as torch.nn.DataParallel and torch_neuronx.DataParallel do: into a vector."""

from __future__ import annotations

import torch

from parawrap.backends import warn_caller


def vector(values: torch.Tensor) -> torch.Tensor:
    """Return the vector of the shards' 0-d outputs, and warn about it."""
    warn_caller(
        "the module returned 0-d tensors. Like torch.nn.DataParallel, parawrap joins them into a vector with one value per "
        'shard. For their mean, use parallel(module, reduce="mean")'
    )
    return values

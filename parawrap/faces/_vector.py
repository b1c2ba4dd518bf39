"""What torch.nn.DataParallel and the vendor's make of 0-d outputs."""

from __future__ import annotations

import torch

from parawrap.backends import warn_caller

__all__ = ["vector"]


def vector(values: torch.Tensor) -> torch.Tensor:
    """The 0-d outputs of the shards, as they are, and a warning that they are so."""
    warn_caller(
        "the module returned 0-d tensors: they are joined into a vector with one value a shard, as torch.nn.DataParallel "
        'does; parallel(module, reduce="mean") gives their mean'
    )
    return values

"""Helpers used inside a rank: seeds, averages, sharded loaders, metrics, equal models.

Each helper reads the rank from `current_rank` or from torch.distributed. Outside a rank, the
process is the only rank.
"""

from parawrap.functional._averages import average_params_grads
from parawrap.functional._gather_rows import gather_rows
from parawrap.functional._rank_samplers import get_dataset_sampler
from parawrap.functional._reduce_metrics import reduce_metrics
from parawrap.functional._seeds_and_modules import (
    device,
    has_batch_norm,
    optimiser_to,
    seed_generators,
    set_default_device,
    to,
    unwrap,
)
from parawrap.functional._shard_loader import shard_loader
from parawrap.functional._sync import sync

__all__ = [
    "average_params_grads",
    "device",
    "gather_rows",
    "get_dataset_sampler",
    "has_batch_norm",
    "optimiser_to",
    "reduce_metrics",
    "seed_generators",
    "set_default_device",
    "shard_loader",
    "sync",
    "to",
    "unwrap",
]

"""Helpers used inside a rank: seeds, averages, sharded loaders, metrics, equal models.

Each helper reads the rank from `current_rank` or from torch.distributed. Outside a rank, the
process is the only rank.
"""

# The helpers know ranks and process groups. They do not know how ranks start.
#
# file                  | contents                            | tests
# --------------------- | ----------------------------------- | ------------------------------------
# _averages.py          | `average_params_grads`: the mean of | functional/test_averages.py
#                       | parameters and gradients            |
# _collectives.py       | the place of a process in its       | functional/test_gather_rows.py
#                       | group; compare and gather objects   | launch/test_torchrun.py
#                       | of ranks                            |
# _gather_rows.py       | `gather_rows`: results of all rows, | functional/test_gather_rows.py
#                       | in dataset order                    |
# _rank_samplers.py     | `get_dataset_sampler`: the rows of  | functional/test_rank_samplers.py
#                       | a dataset that a rank reads         |
# _reduce_metrics.py    | `reduce_metrics`: weighted means    | functional/test_reduce_metrics.py
#                       | and sums over ranks                 |
# _seeds_and_modules.py | `seed_generators`, `optimiser_to`,  | functional/test_seeds_and_modules.py
#                       | `has_batch_norm`, `to`, `unwrap`,   |
#                       | `device`, `set_default_device`      |
# _shard_loader.py      | `shard_loader`: a DataLoader of     | functional/test_shard_loader.py
#                       | which each rank reads its share     |
# _sync.py              | `sync`: the training state of one   | functional/test_sync.py
#                       | rank for all ranks                  |

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

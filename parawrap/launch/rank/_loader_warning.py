"""A warning about DataLoaders that give every rank the same rows."""

from __future__ import annotations

import warnings
from typing import Any

from parawrap.launch._rank import current_rank, inside_a_rank

__all__ = ["watch_loaders"]

_is_watching = False
_has_warned = False


def watch_loaders() -> None:
    """Warn once per process if a rank iterates a shuffled DataLoader that is not sharded.

    All ranks have the same seed by default. So such a loader gives each rank all rows, in the same order.
    """
    global _is_watching
    if _is_watching:
        return
    _is_watching = True
    from torch.utils.data import DataLoader, RandomSampler

    iterate = DataLoader.__iter__

    def iterate_and_warn(self: DataLoader[Any]) -> Any:
        global _has_warned
        is_shared = inside_a_rank() and current_rank().world_size > 1
        if is_shared and isinstance(self.sampler, RandomSampler) and not _has_warned:
            _has_warned = True
            msg = (
                "this DataLoader(shuffle=True) gives every rank all rows: use functional.shard_loader(loader), or a "
                "DistributedSampler, to give each rank its own share"
            )
            warnings.warn(msg, UserWarning, stacklevel=2)
        return iterate(self)

    DataLoader.__iter__ = iterate_and_warn  # type: ignore[method-assign]  # pyright: ignore

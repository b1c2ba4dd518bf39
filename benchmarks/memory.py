"""The memory that each further lane adds. Lanes on the CPU share the parameters.

The figure is the memory that only this process holds (USS): Private_Clean and Private_Dirty in /proc/self/smaps_rollup.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from benchmarks._measure import Row
from benchmarks._process import in_process
from parawrap import parallel

__all__ = ["private_bytes", "rows"]

_LANES = (2, 10)
_WIDTH, _LAYERS = 2048, 4
_CALLS = 3
_ROLLUP = Path("/proc/self/smaps_rollup")
_WANTED = 0.1
_MB = 1e6


def rows() -> list[Row]:
    """Compare few lanes with many. Each call runs in its own process."""
    if not _ROLLUP.exists():
        return [Row("memory per lane", {}, f"not measured: {_ROLLUP} does not exist", f"under {_WANTED:.0%}", held=True)]
    few, many = _LANES
    per_lane = {}
    for name, copies in (("parawrap", False), ("a deepcopy per worker", True)):
        least, most = (in_process(f"{__name__}:private_bytes", lanes=lanes, copies=copies) for lanes in _LANES)
        per_lane[name] = (most - least) / (many - few)
    size = sum(parameter.nbytes for parameter in _model().parameters())
    return [
        Row(
            f"memory of each further lane, from {few} to {many}, for a model of {size / _MB:.0f} MB",
            {},
            "; ".join(f"{name}: {each / _MB:.1f} MB" for name, each in per_lane.items()),
            f"under {_WANTED:.0%} of the model",
            per_lane["parawrap"] < _WANTED * size,
            peers=f"torch {torch.__version__}, one copy per worker of a ThreadPoolExecutor",
            extra={"bytes_per_lane": per_lane, "model_bytes": size},
        )
    ]


def private_bytes(*, lanes: int, copies: bool) -> int:
    """Return this process's own memory after some calls over lanes, or over as many workers with a copy each."""
    model, x = _model(), torch.randn(4 * lanes, _WIDTH)
    block = _over_copies(model, lanes) if copies else parallel(model, ["cpu"] * lanes, out_dims=0)
    with torch.no_grad(), block as call:
        for _ in range(_CALLS):
            call(x)
        gc.collect()
        lines = [line.split() for line in _ROLLUP.read_text().splitlines()[1:]]
    return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))


@contextmanager
def _over_copies(model: nn.Module, workers: int) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    copies = [model, *(deepcopy(model) for _ in range(workers - 1))]

    def work(each: nn.Module, shard: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return each(shard)

    with ThreadPoolExecutor(workers) as pool:
        yield lambda x: torch.cat(list(pool.map(work, copies, x.chunk(workers))))


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

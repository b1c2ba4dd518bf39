"""The memory that each further lane adds. Lanes on the CPU share the parameters.

The memory is that which only this process holds (USS): Private_Clean and Private_Dirty in
/proc/self/smaps_rollup.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn

from benchmarks._measure import Result, Row
from benchmarks._process import in_process
from parawrap import parallel

__all__ = ["private_bytes", "rows"]

_LANES = (2, 10)
_WIDTH, _LAYERS = 2048, 4
_CALLS = 3
_ROLLUP = Path("/proc/self/smaps_rollup")
_MOST_OF_MODEL = 10.0  # percent
_MB = 1e6


def rows() -> list[Row]:
    """Compare few lanes with many, each in its own process."""
    if not _ROLLUP.exists():
        return [Row("memory per lane", {}, [], note=f"not measured: {_ROLLUP} does not exist")]
    few, many = _LANES
    per_lane = {}
    for name, copies in (("parawrap", False), ("a deepcopy per worker", True)):
        least, most = (
            in_process(f"{__name__}:private_bytes", lanes=lanes, copies=copies) for lanes in _LANES
        )
        per_lane[name] = (most - least) / (many - few)
    size = sum(parameter.nbytes for parameter in _model().parameters())
    return [memory_row(per_lane, size)]


def memory_row(per_lane: Mapping[str, float], size: int) -> Row:
    """Return the row for these bytes per lane of a model of `size` bytes."""
    few, many = _LANES
    share = Result("parawrap, as a share of the model", 100 * per_lane["parawrap"] / size, "%")
    return Row(
        f"memory of each further lane, from {few} to {many} lanes",
        {},
        [
            Result("model", size / _MB, "MB"),
            *(Result(name, each / _MB, "MB") for name, each in per_lane.items()),
            share.held_to("under", _MOST_OF_MODEL),
        ],
        peers=f"torch {torch.__version__}, one copy per worker of a ThreadPoolExecutor",
    )


def private_bytes(*, lanes: int, copies: bool) -> int:
    """Return this process's own memory after calls over lanes, or over workers with a copy each if
    `copies` is true.
    """
    model, x = _model(), torch.randn(4 * lanes, _WIDTH)
    block = _over_copies(model, lanes) if copies else parallel(model, ["cpu"] * lanes, out_dims=0)
    with torch.no_grad(), block as call:
        for _ in range(_CALLS):
            call(x)
        gc.collect()
        lines = [line.split() for line in _ROLLUP.read_text().splitlines()[1:]]
    return sum(
        int(line[1]) * 1024 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:")
    )


@contextmanager
def _over_copies(
    model: nn.Module, workers: int
) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    copies = [model, *(deepcopy(model) for _ in range(workers - 1))]

    def work(each: nn.Module, shard: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return each(shard)

    with ThreadPoolExecutor(workers) as pool:
        yield lambda x: torch.cat(list(pool.map(work, copies, x.chunk(workers))))


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

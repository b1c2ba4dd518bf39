"""What each further lane adds to the memory of the process: lanes on the CPU share the parameters.

Counted by Linux: the pages that this process alone has (USS; /proc/self/smaps_rollup, Private_Clean and Private_Dirty).
"""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks._apart import Apart, all_apart
from benchmarks._measure import Row

__all__ = ["Resident", "rows"]

_LANES = (2, 10)
_WIDTH, _LAYERS = 2048, 4
_CALLS = 3
_ROLLUP = Path("/proc/self/smaps_rollup")
_WANTED = 0.1
_MB = 1e6
_WAYS = {"parawrap": "lanes", "a deepcopy of the model a worker": "copies"}


def rows() -> list[Row]:
    """A call over few lanes and over many, each in a process of its own."""
    if not _ROLLUP.exists():
        return [Row("memory a lane", {}, f"not measured: there is no {_ROLLUP}", f"under {_WANTED:.0%}", held=True)]
    few, many = _LANES
    starts = {
        f"{way} {lanes}": partial(Apart, f"{__package__}.memory:Resident", way=way, lanes=lanes)
        for way in _WAYS.values()
        for lanes in _LANES
    }
    with all_apart(starts, processes=1) as processes:
        used = {name: process.ask("used") for (name, _), process in processes.items()}
    a_lane = {name: (used[f"{way} {many}"] - used[f"{way} {few}"]) / (many - few) for name, way in _WAYS.items()}
    size = sum(parameter.nbytes for parameter in _model().parameters())
    ours = a_lane["parawrap"]
    return [
        Row(
            f"memory of each further lane, from {few} to {many}, for a model of {size / _MB:.0f} MB",
            {},
            "; ".join(f"{name}: {each / _MB:.1f} MB" for name, each in a_lane.items()),
            f"under {_WANTED:.0%} of the model",
            ours < _WANTED * size,
            peers=f"torch {torch.__version__}, one copy a worker of a ThreadPoolExecutor",
            extra={"bytes_a_lane": a_lane, "model_bytes": size},
        )
    ]


class Resident:
    """A process that calls a model over so many lanes, or over as many workers with a copy each."""

    def __init__(self, way: str, lanes: int) -> None:
        torch.set_grad_enabled(False)
        self._model = _model()
        self._x = torch.randn(4 * lanes, _WIDTH)
        self._lanes = lanes
        self._call = self._over_lanes() if way == "lanes" else self._over_copies()

    def used(self) -> int:
        """The bytes that this process alone has, after some calls."""
        for _ in range(_CALLS):
            self._call()
        gc.collect()
        lines = [line.split() for line in _ROLLUP.read_text().splitlines()[1:]]
        return sum(int(line[1]) * 1024 for line in lines if line[0] in ("Private_Clean:", "Private_Dirty:"))

    def _over_lanes(self) -> Any:
        from parawrap import parallel

        block = parallel(self._model, ["cpu"] * self._lanes, plan="lanes").__enter__()  # it ends with the process
        return lambda: block(self._x)

    def _over_copies(self) -> Any:
        pool = ThreadPoolExecutor(self._lanes)
        copies = [self._model, *(deepcopy(self._model) for _ in range(self._lanes - 1))]
        taken = itertools.cycle(copies)

        def work(model: nn.Module, shard: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return model(shard)

        return lambda: torch.cat(list(pool.map(work, itertools.islice(taken, self._lanes), self._x.chunk(self._lanes))))


def _model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))

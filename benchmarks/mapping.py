"""`map` over two lanes, compared with a ThreadPoolExecutor of two workers and with loops.

Each arm has its own module, because a module is parallel everywhere while its block is open. Lanes
and workers use one thread each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import nn

from benchmarks._measure import Result, Row, arm_of, ratio_of, threads, times_in_turn
from benchmarks.nets import SMALL_ENCODER, Net
from parawrap import parallel

__all__ = ["IN_FLIGHT", "LANES", "executor", "map_row", "rows", "windowed"]

LANES, IN_FLIGHT = 2, 4
_ROWS, _BATCHES = 4, 32
_LEAST_SPEED = 0.95
_ONE, _LOOP, _MAP, _POOL = "loop, one thread", f"loop, {LANES} threads", "map", "ThreadPoolExecutor"


def rows(net: Net = SMALL_ENCODER, rounds: int = 60, batches: int = _BATCHES) -> list[Row]:
    """Measure the traced net, which has a goal, and the net as it is."""
    return [_row(net, rounds, batches, traced=True), _row(net, rounds, batches, traced=False)]


def _row(net: Net, rounds: int, count: int, *, traced: bool) -> Row:
    batches = [net.batch(_ROWS) for _ in range(count)]
    with torch.no_grad(), threads(LANES), executor() as pool:
        plain, ours, theirs = (_model(net, batches[0], traced=traced) for _ in range(3))

        def loop_on_one_thread() -> None:
            with threads(1):
                _loop(plain, batches)

        with parallel(ours, ["cpu"] * LANES, out_dims=0) as p:
            times = times_in_turn(
                {
                    _ONE: loop_on_one_thread,
                    _LOOP: lambda: _loop(plain, batches),
                    _POOL: lambda: list(windowed(pool, theirs, batches)),
                    _MAP: lambda: list(p.map(batches, buffersize=IN_FLIGHT)),
                },
                rounds=rounds,
                settle=1,
            )
    kind = "traced" if traced else "not traced"
    name = f"map: {net.name}, {kind}, {count} batches of {_ROWS}, {LANES} lanes"
    return map_row(name, times, judged=traced)


def map_row(name: str, times: dict[str, list[float]], *, judged: bool) -> Row:
    """Return the row of these times from the same rounds. The goal applies if `judged` is true."""
    results = []
    for arm in [arm for arm in times if arm != _MAP]:
        gain = ratio_of(times[arm], times[_MAP])
        result = Result(f"speed-up of map over {arm}", gain.median, "ratio", gain.low, gain.high)
        results.append(
            result.held_to("at least", _LEAST_SPEED) if judged and arm == _POOL else result
        )
    return Row(
        name,
        {arm: arm_of(values) for arm, values in times.items()},
        results,
        peers=f"concurrent.futures, {LANES} workers, {IN_FLIGHT} batches in flight; torch "
        f"{torch.__version__}",
    )


def _model(net: Net, example: torch.Tensor, *, traced: bool) -> nn.Module:
    model = net.make().eval()
    return torch.jit.trace(model, example) if traced else model


def _loop(model: nn.Module, batches: Iterable[torch.Tensor]) -> None:
    for batch in batches:
        model(batch)


def executor() -> ThreadPoolExecutor:
    """Return a pool with one worker per lane. Operators use one thread in each worker."""

    def begin() -> None:
        torch.get_num_threads()  # torch drops the setting of a thread that has not read it once
        torch.set_num_threads(1)

    return ThreadPoolExecutor(LANES, initializer=begin)


def windowed(pool: ThreadPoolExecutor, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield outputs in order with `IN_FLIGHT` batches in flight.

    Executor.map would read all batches at once.
    """
    pending: deque[Future[Any]] = deque()
    try:
        for batch in batches:
            pending.append(pool.submit(_without_gradients, model, batch))
            if len(pending) >= IN_FLIGHT:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        wait(pending)


def _without_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    with torch.no_grad():
        return model(batch)

"""The latency of one small call from `submit` to its result, while all lanes are busy with a stream
of batches.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks._measure import Result, Row, arm_of, in_turn, threads, wall_us
from benchmarks.mapping import IN_FLIGHT, LANES, executor, windowed
from benchmarks.nets import SMALL_ENCODER, Net
from parawrap import parallel

__all__ = ["rows"]

_BATCH, _REQUESTS = 8, 40
_IDLE, _OURS, _POOL = ", idle", "parawrap", "ThreadPoolExecutor"

Submit = Callable[[torch.Tensor], Future[Any]]


def rows(net: Net = SMALL_ENCODER, rounds: int = 12, requests: int = _REQUESTS) -> list[Row]:
    """Compare lanes with a ThreadPoolExecutor, busy and idle.

    The percentiles are those of the latencies of all rounds.
    """
    ours, theirs = (net.make().eval() for _ in range(2))
    small, large = net.batch(1), net.batch(_BATCH)
    with (
        torch.no_grad(),
        threads(LANES),
        executor() as pool,
        parallel(ours, ["cpu"] * LANES, out_dims=0) as p,
    ):

        def submit_to_pool(x: torch.Tensor) -> Future[Any]:
            return pool.submit(torch.no_grad()(theirs), x)

        def in_pool() -> Iterator[Any]:
            return windowed(pool, theirs, itertools.repeat(large))

        def in_lanes() -> Iterator[Any]:
            return p.map(itertools.repeat(large), buffersize=IN_FLIGHT)

        arms = {
            _OURS: partial(_under_load, in_lanes, p.submit, small, requests),
            _POOL: partial(_under_load, in_pool, submit_to_pool, small, requests),
            _OURS + _IDLE: partial(_latencies, p.submit, small, requests),
            _POOL + _IDLE: partial(_latencies, submit_to_pool, small, requests),
        }
        for arm in arms.values():
            arm()
        bursts = in_turn(arms, rounds)
    latencies = {
        arm: [latency for burst in given for latency in burst] for arm, given in bursts.items()
    }
    p99 = {arm: statistics.quantiles(values, n=100)[98] for arm, values in latencies.items()}
    medians = {arm: statistics.median(values) for arm, values in latencies.items()}
    return [
        Row(
            f"submit: {net.name}, one row, while {LANES} lanes map batches of {_BATCH}",
            {arm: arm_of(values) for arm, values in latencies.items()},
            [
                Result(
                    "speed-up over the executor, median", medians[_POOL] / medians[_OURS], "ratio"
                ),
                Result(
                    "speed-up over the executor, 99th percentile", p99[_POOL] / p99[_OURS], "ratio"
                ),
                *(Result(f"99th percentile, {arm}", value, "us") for arm, value in p99.items()),
            ],
            peers=f"concurrent.futures, {LANES} workers, {IN_FLIGHT} batches in flight",
        )
    ]


def _latencies(submit: Submit, x: torch.Tensor, requests: int) -> list[float]:
    return [wall_us(lambda: submit(x).result()) for _ in range(requests)]


def _under_load(
    stream: Callable[[], Iterator[Any]], submit: Submit, x: torch.Tensor, requests: int
) -> list[float]:
    with _load(stream):
        return _latencies(submit, x, requests)


@contextmanager
def _load(stream: Callable[[], Iterator[Any]]) -> Iterator[None]:
    """Consume the stream in a thread until the block ends."""
    busy, over = threading.Event(), threading.Event()

    def consume() -> None:
        with torch.no_grad():
            for done, _ in enumerate(stream()):
                if done == IN_FLIGHT:
                    busy.set()
                if over.is_set():
                    return

    thread = threading.Thread(target=consume)
    thread.start()
    busy.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()

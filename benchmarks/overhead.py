"""The overhead of a parallel call over the plain call, compared with hand-written lanes and thread
pools.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from benchmarks._measure import Arm, Result, Row, take_turns
from parawrap import parallel

__all__ = ["OURS", "PLAIN", "bare_lanes", "overhead_row", "rows"]

LANES = 4
PLAIN, OURS, BARE, POOL = "plain", "parawrap", "bare lanes", "persistent ThreadPoolExecutor"
_POOL_PER_CALL, _THREADS_PER_CALL = "ThreadPoolExecutor per call", "thread per lane per call"
_SLEEP_S = 200e-6
_MOST_OF_BARE = 1.3
_MOST_ADDED_US = 5.0

Call = Callable[[torch.Tensor], torch.Tensor]


class Sleeping(torch.nn.Module):
    """Identity that sleeps, so that each lane's thread must wake up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(_SLEEP_S)
        return x


def rows(rounds: int = 400) -> list[Row]:
    """Compare four lanes with their peers, and measure one lane and one row."""
    return [
        _four_lanes("model that sleeps 200 us", Sleeping, rounds, judged=True),
        _four_lanes("identity", torch.nn.Identity, rounds, judged=False),
        _bypassed("one lane", 1, 64, rounds),
        _bypassed("one row on 4 lanes", LANES, 1, rounds),
    ]


def _four_lanes(
    name: str, make: Callable[[], torch.nn.Module], rounds: int, *, judged: bool
) -> Row:
    ours, other, x = make(), make(), torch.randn(64, 16)
    with (
        parallel(ours, ["cpu"] * LANES, out_dims=0),
        bare_lanes(other) as bare,
        ThreadPoolExecutor(LANES) as pool,
    ):
        calls: dict[str, Call] = {
            PLAIN: other,
            OURS: ours,
            BARE: bare,
            POOL: partial(_submit_each, pool, other),
            _POOL_PER_CALL: partial(_pool_per_call, other),
            _THREADS_PER_CALL: partial(_threads_per_call, other),
        }
        arms = take_turns(
            {arm: partial(call, x) for arm, call in calls.items()}, rounds=rounds, calls=5
        )
    return overhead_row(f"overhead: {name}, 64 rows of 16, 4 lanes", arms, judged=judged)


def overhead_row(name: str, arms: Mapping[str, Arm], *, judged: bool) -> Row:
    """Return the row of these times. The goals apply if `judged` is true."""
    added = {
        arm: times.median_us - arms[PLAIN].median_us for arm, times in arms.items() if arm != PLAIN
    }
    to_bare, to_pool = (
        Result(f"overhead of {OURS} divided by that of {peer}", added[OURS] / added[peer], "ratio")
        for peer in (BARE, POOL)
    )
    if judged:
        to_bare, to_pool = to_bare.held_to("at most", _MOST_OF_BARE), to_pool.held_to("under", 1)
    return Row(
        name,
        arms,
        [*(Result(f"overhead, {arm}", us, "us") for arm, us in added.items()), to_bare, to_pool],
        peers="hand-written lanes; concurrent.futures; the methods of torch_neuronx.DataParallel "
        f"(pool per call) and torch {torch.__version__} (thread per lane per call)",
    )


def _bypassed(name: str, lanes: int, size: int, rounds: int) -> Row:
    ours, other, x = torch.nn.Identity(), torch.nn.Identity(), torch.randn(size, 16)
    with parallel(ours, ["cpu"] * lanes, out_dims=0):
        arms = take_turns(
            {PLAIN: partial(other, x), OURS: partial(ours, x)}, rounds=rounds, calls=50
        )
    added = arms[OURS].median_us - arms[PLAIN].median_us
    return Row(
        f"overhead: {name}",
        arms,
        [Result("overhead", added, "us").held_to("under", _MOST_ADDED_US)],
        peers="the plain call",
    )


@contextmanager
def bare_lanes(model: Call) -> Iterator[Call]:
    """Yield a call over four lanes: three threads that each block on a queue, and the caller."""
    inboxes: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(LANES - 1)]
    done: SimpleQueue[tuple[int, torch.Tensor]] = SimpleQueue()

    def work(lane: int) -> None:
        while (shard := inboxes[lane].get()) is not None:
            done.put((lane, model(shard)))

    def call(x: torch.Tensor) -> torch.Tensor:
        *others, last = torch.split(x, len(x) // LANES)
        for inbox, shard in zip(inboxes, others, strict=True):
            inbox.put(shard)
        outputs = [*others, model(last)]
        for _ in others:
            lane, output = done.get()
            outputs[lane] = output
        return torch.cat(outputs)

    started = [threading.Thread(target=work, args=(lane,)) for lane in range(LANES - 1)]
    for thread in started:
        thread.start()
    try:
        yield call
    finally:
        for inbox in inboxes:
            inbox.put(None)
        for thread in started:
            thread.join()


def _submit_each(pool: ThreadPoolExecutor, model: Call, x: torch.Tensor) -> torch.Tensor:
    futures = [pool.submit(model, shard) for shard in x.chunk(LANES)]
    return torch.cat([future.result() for future in futures])


def _pool_per_call(model: Call, x: torch.Tensor) -> torch.Tensor:
    with ThreadPoolExecutor(2 * LANES) as pool:
        return torch.cat(list(pool.map(model, x.chunk(LANES))))


def _threads_per_call(model: Call, x: torch.Tensor) -> torch.Tensor:
    shards = x.chunk(LANES)
    outputs: list[torch.Tensor] = list(shards)

    def work(lane: int) -> None:
        outputs[lane] = model(shards[lane])

    started = [threading.Thread(target=work, args=(lane,)) for lane in range(LANES)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return torch.cat(outputs)

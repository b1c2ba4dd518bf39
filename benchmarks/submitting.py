"""How long one small call takes from `submit` to its result while all lanes are at work on a stream of batches."""

from __future__ import annotations

import statistics
from functools import partial

from benchmarks._apart import KEPT, Apart, all_apart
from benchmarks._measure import Row, arm_of, in_turn
from benchmarks.zoo_nets import ZOO
from parawrap.backends.cpu import usable_cores

__all__ = ["rows"]

_NET, _BATCH = "encoder", 8
_REQUESTS, _ROUNDS, _WARM_CALLS = 40, 12, 20
_ARMS = {
    "parawrap": ("map", _BATCH),
    "ThreadPoolExecutor": ("executor", _BATCH),
    "parawrap, lanes idle": ("map", 0),
    "ThreadPoolExecutor, idle": ("executor", 0),
}


def rows() -> list[Row]:
    """Every latency counts, not a burst's median: the last percent is what a server is judged by."""
    made = f"{__package__}.zoo_arms:Requests"
    starts = {arm: partial(Apart, made, KEPT, net=_NET, way=way, rows=size) for arm, (way, size) in _ARMS.items()}
    with all_apart(starts, processes=1) as processes:
        for process in processes.values():
            process.ask("burst", calls=_WARM_CALLS)
        bursts = in_turn(
            {arm: partial(process.ask, "burst", calls=_REQUESTS) for (arm, _), process in processes.items()}, _ROUNDS
        )
    latencies = {arm: [latency for burst in given for latency in burst] for arm, given in bursts.items()}
    last = {arm: statistics.quantiles(values, n=100)[98] for arm, values in latencies.items()}
    ours, theirs = (statistics.median(latencies[arm]) for arm in ("parawrap", "ThreadPoolExecutor"))
    return [
        Row(
            f"submit under load: {ZOO[_NET].title}, one row, while {usable_cores()} lanes map batches of {_BATCH}",
            {arm: arm_of(values) for arm, values in latencies.items()},
            "<br>".join(f"{arm}: p99 {value:,.0f} us" for arm, value in last.items())
            + f"<br>{theirs / ours:.2f} times the executor's speed at the median, "
            f"{last['ThreadPoolExecutor'] / last['parawrap']:.2f} at p99",
            "reported",
            held=True,
            peers="concurrent.futures, with as many workers and batches in flight",
            extra={"p99_us": last},
        )
    ]

"""The overhead of a call over emulated NeuronCores, and the throughput of requests compared with
the ideal.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from benchmarks._measure import Arm, Result, Row, arm_of, in_turn, overheads, take_turns
from parawrap import neuron, parallel
from parawrap.testing import neuron_host

_CORES = 4
_PEER = (
    "torch_neuronx.DataParallel's documented method: a ThreadPoolExecutor with num_workers threads "
    "per forward"
)

_SERVING_CORES, _CLIENTS, _REQUESTS = 8, 16, 100
_LATENCY_S = 5e-3
_ROUNDS = 5
_LEAST_RATIO = 4.0


def rows() -> list[Row]:
    """Measure the overhead of a call, and a stream of single-row requests."""
    return [_overhead(_CORES), _overhead(4 * _CORES), _serving()]


def _overhead(batch: int) -> Row:
    """Run the same inferences on the same cores in every arm.

    The plain arm runs them in sequence, in one thread.
    """
    x = torch.randn(batch, 16)
    with neuron_host(cores=_CORES) as host:
        compiled = neuron.trace(torch.nn.Identity(), x[:1])
        net = neuron.DataParallel(compiled)
        replicas = [neuron.dynamic_batch(host.place(compiled, core, 1)) for core in range(_CORES)]
        shards = x.chunk(_CORES)
        arms = take_turns(
            {
                "plain": lambda: [
                    replica(shard) for replica, shard in zip(replicas, shards, strict=True)
                ],
                "parawrap": lambda: net(x),
                "pool per call": lambda: _pool_per_call(replicas, x),
            },
            rounds=400,
            calls=5,
        )
        net.close()
    return overhead_row(batch, arms)


def overhead_row(batch: int, arms: Mapping[str, Arm]) -> Row:
    """Return the row for these times of a batch of `batch` rows."""
    added = {
        name: arms[name].median_us - arms["plain"].median_us
        for name in ("parawrap", "pool per call")
    }
    ours, theirs = added.items()
    return Row(
        f"neuron: identity, {batch} rows of 16, {_CORES} emulated cores",
        arms,
        overheads(ours, theirs, _LEAST_RATIO),
        peers=_PEER,
    )


def _pool_per_call(
    replicas: Sequence[Callable[[torch.Tensor], torch.Tensor]], x: torch.Tensor
) -> torch.Tensor:
    with ThreadPoolExecutor(2 * len(replicas)) as pool:
        return torch.cat(
            list(pool.map(lambda replica, shard: replica(shard), replicas, x.chunk(len(replicas))))
        )


def _serving() -> Row:
    """Measure clients that each send one row and wait for its output.

    An idle emulated core starts a pending input at once, like hardware with a queue.
    """
    with neuron_host(cores=_SERVING_CORES, latency_s=_LATENCY_S):
        model = neuron.trace(torch.nn.Identity(), torch.zeros(1, 16))
        with torch.no_grad(), parallel(model, "neuron") as block:
            _serve(lambda x: block.submit(x).result(), 2)
            runs = in_turn(
                {"submit": lambda: _serve(lambda x: block.submit(x).result(), _REQUESTS)}, _ROUNDS
            )["submit"]
    ideal_rate = _SERVING_CORES / _LATENCY_S
    # Each request waits for the other clients of its core
    ideal_s = _LATENCY_S * _CLIENTS / _SERVING_CORES
    share = statistics.median(_CLIENTS * _REQUESTS / wall_s / ideal_rate for wall_s, _ in runs)
    p99_s = statistics.median(statistics.quantiles(latencies, n=100)[98] for _, latencies in runs)
    middle: Arm = arm_of([latency * 1e6 for _, latencies in runs for latency in latencies])
    return Row(
        f"neuron: {_CLIENTS} threads submit single rows, {_SERVING_CORES} cores of "
        f"{_LATENCY_S * 1e3:.0f} ms",
        {"latency per request": middle},
        serving_results(share, p99_s, ideal_rate, ideal_s),
    )


def serving_results(share: float, p99_s: float, ideal_rate: float, ideal_s: float) -> list[Result]:
    """Return the results for this share of the ideal rate, and this 99th
    percentile of the latency.
    """
    most_us = 3 * _LATENCY_S * 1e6  # three inferences
    return [
        Result(
            f"share of the ideal rate of {ideal_rate:,.0f} requests per second", 100 * share, "%"
        ).held_to("at least", 95),
        Result("99th percentile of the latency", p99_s * 1e6, "us").held_to("under", most_us),
        Result(
            "99th percentile of the latency divided by the ideal latency", p99_s / ideal_s, "ratio"
        ),
    ]


def _serve(request: Callable[[torch.Tensor], object], requests: int) -> tuple[float, list[float]]:
    """Return the seconds until all clients finished, and the latency of each request."""
    latencies: list[list[float]] = [[] for _ in range(_CLIENTS)]
    ready = threading.Barrier(_CLIENTS + 1)

    def client(mine: list[float]) -> None:
        x = torch.randn(1, 16)
        ready.wait()
        for _ in range(requests):
            start = time.perf_counter()
            request(x)
            mine.append(time.perf_counter() - start)

    threads = [threading.Thread(target=client, args=(mine,)) for mine in latencies]
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    ready.wait()
    for thread in threads:
        thread.join()
    return time.perf_counter() - start, [latency for mine in latencies for latency in mine]

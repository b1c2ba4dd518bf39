"""`map` over two worker processes, compared with loops, lanes in threads, and the process pools of
torch and joblib.

The models hold the interpreter lock. The processes of each arm build or receive their model once;
every process uses one thread. The peers get batches with `imap`, and with a generator of joblib's
loky backend if joblib is installed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing as plain_multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import multiprocessing, nn

from benchmarks._measure import Result, Row, Work, arm_of, ratio_of, threads, times_in_turn
from benchmarks.nets import Net
from parawrap import Platform, parallel

__all__ = ["rows"]

_WORKERS, _IN_FLIGHT, _CHUNKSIZE = 2, 4, 8
_BATCHES, _SMALL_BATCHES, _LARGE_BATCHES = 128, 512, 8
_LEAST_COPY_SPEED, _LEAST_OVER_BYTES, _MOST_OVER_ACTORS = 1.0, 0.5, 1.2
_ONE, _LOOP, _LANES, _COPY = (
    "loop, one thread",
    f"loop, {_WORKERS} threads",
    "map, lanes in threads",
    "clone of each batch",
)
_COPY_INTO = "copy of each batch into one tensor"
_ON_RAY, _ACTORS = "map, Ray workers", "ray.util.ActorPool"
_OURS, _ALONE = "map, workers", "map, workers, chunksize=1"
_BYTES = f"multiprocessing.Pool.imap of bytes, chunksize={_CHUNKSIZE}"
_POOL, _JOBLIB = "torch.multiprocessing.Pool", "joblib, loky"


class Recurrent(nn.Module):
    """A GRU cell in a Python loop over 64 steps."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(x.shape[0], 64)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return state


def small_operators() -> nn.Module:
    """Return 80 operators that each take a few microseconds."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(40)])


def eager_encoder() -> nn.Module:
    """Return six small encoder layers."""
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0), 6
    )


# The goals are ratios of the best loop's time to that of `map`.
NETS = (
    (Net("GRU cell, 64 steps", Recurrent, (64, 64), 8), 1.6),
    (Net("80 small operators", small_operators, (32,), 8), 1.35),
    (Net("eager encoder, 6 layers", eager_encoder, (32, 128), 4), 1.3),
)
# The same loop with batches of another cost. No goals: they show which batches are too small for
# workers.
SIZES = tuple(Net(f"GRU cell, {steps} steps", Recurrent, (steps, 64), 8) for steps in (4, 16, 256))
_KIBIBYTE = Net("identity, batches of 1 KiB", nn.Identity, (), 256)
_MEBIBYTES = Net("identity, batches of 64 MiB", nn.Identity, (), 16 << 20)


def rows(rounds: int = 12) -> list[Row]:
    """Measure three nets, one of them by the cost of a batch, and the cost of a worker by small and
    by large batches.
    """
    nets = [_net_row(net, goal, rounds) for net, goal in (*NETS, *((net, None) for net in SIZES))]
    on_ray = [_ray_row(rounds)] if importlib.util.find_spec("ray") else []
    return [*nets, _small_row(rounds), _large_row(rounds), *on_ray]


def _net_row(net: Net, goal: float | None, rounds: int) -> Row:
    times = _times(net, _BATCHES, rounds, (_ONE, _LOOP, _LANES, _ALONE))
    best = min((_ONE, _LOOP), key=lambda arm: arm_of(times[arm]).median_us)
    gain = _gain(times, best)
    if goal is not None:
        gain = gain.held_to("at least", goal)
    alone = _gain(times, best, _ALONE)
    return _row(net, times, [gain, alone, _gain(times, _LANES), *_over_peers(times, 1.0)], _BATCHES)


def _small_row(rounds: int) -> Row:
    times = _times(_KIBIBYTE, _SMALL_BATCHES, rounds, (_ALONE, _BYTES))
    each = {arm: arm_of([time / _SMALL_BATCHES for time in times[arm]]) for arm in (_OURS, _ALONE)}
    costs = [
        Result(f"time per batch, {arm}", of.median_us, "us", of.low_us, of.high_us)
        for arm, of in each.items()
    ]
    over_bytes = _gain(times, _BYTES).held_to("at least", _LEAST_OVER_BYTES)
    return _row(_KIBIBYTE, times, [*costs, over_bytes, *_over_peers(times, 1.5)], _SMALL_BATCHES)


def _large_row(rounds: int) -> Row:
    times = _times(_MEBIBYTES, _LARGE_BATCHES, rounds, (_COPY, _COPY_INTO))
    speeds = [
        _gain(times, arm).held_to("at least", _LEAST_COPY_SPEED) for arm in (_COPY, _COPY_INTO)
    ]
    note = (
        "torch moves each batch into shared memory in its first round, and copies nothing in later "
        "rounds"
    )
    return _row(_MEBIBYTES, times, [*speeds, *_over_peers(times, None)], _LARGE_BATCHES, note)


def _ray_row(rounds: int) -> Row:
    """Compare actors of a block with a bare ActorPool, both on a Ray cluster of this machine."""
    ray = importlib.import_module("ray")
    batches = [_KIBIBYTE.batch(_KIBIBYTE.usual) for _ in range(_SMALL_BATCHES)]
    platform = Platform(device="ray", n_cpus=_WORKERS)
    ray.init(
        num_cpus=2 * _WORKERS, include_dashboard=False, log_to_driver=False, logging_level="ERROR"
    )
    try:
        with torch.inference_mode(), parallel(_KIBIBYTE.make(), platform, out_dims=0) as block:
            actors = [ray.remote(_RayActor).remote(_KIBIBYTE) for _ in range(_WORKERS)]
            pool = importlib.import_module("ray.util").ActorPool(actors)
            works: dict[str, Work] = {
                _ON_RAY: lambda: _read(block.map(batches)),
                _ACTORS: lambda: _read(
                    pool.map(lambda actor, batch: actor.run.remote(batch), batches)
                ),
            }
            times = times_in_turn(works, rounds=rounds)
    finally:
        ray.shutdown()
    ratio = ratio_of(times[_ON_RAY], times[_ACTORS])
    result = Result(
        "time per batch over that of a bare ActorPool", ratio.median, "ratio", ratio.low, ratio.high
    )
    return Row(
        f"workers: {_KIBIBYTE.name}, {_SMALL_BATCHES} batches of {_KIBIBYTE.usual}, {_WORKERS} "
        "actors on Ray",
        {arm: arm_of(values) for arm, values in times.items()},
        [result.held_to("at most", _MOST_OVER_ACTORS)],
        peers=f"ray {ray.__version__}",
    )


class _RayActor:
    """A bare actor with a net."""

    def __init__(self, net: Net) -> None:
        torch.set_num_threads(1)
        self._model = net.make().eval()

    def run(self, batch: torch.Tensor) -> Any:
        with torch.inference_mode():
            return self._model(batch)


def _row(
    net: Net, times: dict[str, list[float]], results: list[Result], count: int, note: str = ""
) -> Row:
    return Row(
        f"workers: {net.name}, {count} batches of {net.usual}, {_WORKERS} workers",
        {arm: arm_of(values) for arm, values in times.items()},
        results,
        peers=f"torch {torch.__version__}, {_joblib_version()}",
        note=note,
    )


def _gain(times: dict[str, list[float]], arm: str, ours: str = _OURS) -> Result:
    gain = ratio_of(times[arm], times[ours])
    return Result(f"speed-up of {ours} over {arm}", gain.median, "ratio", gain.low, gain.high)


def _over_peers(times: dict[str, list[float]], goal: float | None) -> list[Result]:
    gains = [_gain(times, peer) for peer in (_POOL, _JOBLIB) if peer in times]
    return gains if goal is None else [gain.held_to("at least", goal) for gain in gains]


def _times(net: Net, count: int, rounds: int, others: tuple[str, ...]) -> dict[str, list[float]]:
    """Return the times of the worker arm, the peers, and the other arms.

    All make the same batches' outputs.
    """
    batches = [net.batch(net.usual) for _ in range(count)]
    plain, ours, laned = (net.make().eval() for _ in range(3))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(threads(_WORKERS))
        block = stack.enter_context(
            parallel(ours, ["cpu"] * _WORKERS, out_dims=0, workers="process")
        )
        works: dict[str, Work] = {
            _ONE: partial(_on_one_thread, lambda: _loop(plain, batches)),
            _LOOP: lambda: _loop(plain, batches),
            _COPY: lambda: _loop(torch.clone, batches),
            _COPY_INTO: lambda: _loop(torch.empty_like(batches[0]).copy_, batches),
        }
        if _LANES in others:
            lanes = stack.enter_context(parallel(laned, ["cpu"] * _WORKERS, out_dims=0))
            works[_LANES] = lambda: _read(lanes.map(batches, buffersize=_IN_FLIGHT))
        works[_ALONE] = partial(_on_one_thread, lambda: _read(block.map(batches, chunksize=1)))
        if _BYTES in others:
            works[_BYTES] = stack.enter_context(_bytes_pool(batches))
        works = {arm: works[arm] for arm in others}
        works[_OURS] = partial(_on_one_thread, lambda: _read(block.map(batches)))
        works[_POOL] = stack.enter_context(_pool(net, batches))
        if importlib.util.find_spec("joblib") is not None:
            works[_JOBLIB] = stack.enter_context(_loky(net, batches))
        return times_in_turn(works, rounds=rounds)


def _on_one_thread(work: Work) -> None:
    with threads(1):
        work()


def _loop(model: Callable[..., Any], batches: list[torch.Tensor]) -> None:
    for batch in batches:
        model(batch)


def _read(outputs: Iterator[Any]) -> None:
    deque(outputs, maxlen=0)


@contextmanager
def _pool(net: Net, batches: list[torch.Tensor]) -> Iterator[Work]:
    run = partial(_in_worker, net)
    with multiprocessing.get_context("forkserver").Pool(_WORKERS) as pool:
        yield lambda: _read(pool.imap(run, batches))


@contextmanager
def _bytes_pool(batches: list[torch.Tensor]) -> Iterator[Work]:
    """The least that a batch can cost: its bytes there and back, without tensors, a model, and
    modes.
    """
    of_bytes = [batch.numpy().tobytes() for batch in batches]
    with plain_multiprocessing.get_context("forkserver").Pool(_WORKERS) as pool:
        yield lambda: _read(pool.imap(_same, of_bytes, chunksize=_CHUNKSIZE))


def _same(value: bytes) -> bytes:
    return value


@contextmanager
def _loky(net: Net, batches: list[torch.Tensor]) -> Iterator[Work]:
    joblib = importlib.import_module("joblib")
    task = joblib.delayed(partial(_in_worker, net))
    with joblib.Parallel(
        _WORKERS, return_as="generator", batch_size=1, pre_dispatch=_IN_FLIGHT
    ) as run:
        yield lambda: _read(run(task(batch) for batch in batches))


def _joblib_version() -> str:
    if importlib.util.find_spec("joblib") is None:
        return "joblib is not installed"
    return f"joblib {importlib.import_module('joblib').__version__}"


def _in_worker(net: Net, batch: torch.Tensor) -> Any:
    """Run a batch in a process of a peer."""
    with torch.inference_mode():
        return _model_of(net)(batch)


@functools.cache
def _model_of(net: Net) -> nn.Module:
    torch.set_num_threads(1)
    return net.make().eval()

"""The overhead of a parallel call on a GPU over the plain call, compared with
torch.nn.DataParallel.

One GPU stands in for two: ``device_ids=[0, 0]`` cuts the batch, replicates the module, and runs two
threads, but copies no parameters between devices. Each call starts on an idle device. Two times are
taken: until the call returns ("issued"), and until the device is idle again. Each arm has its own
copy of the net.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import parawrap
from benchmarks._measure import Arm, Result, Row, Work, arm_of, in_turn, overheads
from benchmarks.cuda_target import Target
from benchmarks.nets import Net, encoder, mlp, resnet18

__all__ = ["OURS", "PLAIN", "THEIRS", "added_row", "compared_row", "rows"]

PLAIN, OURS, THEIRS = "plain", "parawrap.DataParallel", "nn.DataParallel"
PEERS = f"torch.nn.DataParallel of torch {torch.__version__}"
LEAST = 3.0
MOST_ADDED_US = 10.0
_WARM_UP = 10
NETS = (
    Net("MLP of 3 x 1024", mlp, (1024,), usual=8192, small=8),
    Net("ResNet-18 shape, 64x64 images", resnet18, (3, 64, 64), usual=256, small=4),
    Net("encoder of 12 x 768, 128 tokens", encoder, (128, 768), usual=64, small=4),
)

Times = Mapping[str, Arm]


def rows(target: Target, nets: Sequence[Net] = NETS, rounds: int = 200) -> list[Row]:
    """Measure each net in inference and training, and then a block of one lane."""
    return [
        *(row for net in nets for row in _rows_of(net, target, rounds)),
        _one_lane(nets[0], target, rounds * 2),
    ]


def _rows_of(net: Net, target: Target, rounds: int) -> Iterator[Row]:
    few = max(2, rounds // 5)
    for lanes, batch, least, turns in (
        (1, net.small, None, rounds),
        (2, net.small, LEAST, rounds),
        (1, net.usual, None, few),
        (2, net.usual, 1.0, few),
    ):
        yield _inference(net, batch, lanes, target, turns, least)
    yield _training(net, target, rounds // 2)


def _inference(
    net: Net, batch: int, lanes: int, target: Target, rounds: int, least: float | None
) -> Row:
    x = net.batch(batch).to(target.device)
    name = f"call: {net.name}, {batch:,} rows, device_ids={[0] * lanes}"
    with torch.no_grad(), _arms(net.make().eval(), lanes, target) as arms:
        calls = {arm: partial(model, x) for arm, model in arms.items()}
        return _compared(name, calls, target, rounds, least)


def _training(net: Net, target: Target, rounds: int) -> Row:
    x = net.batch(net.small).to(target.device)
    name = f"forward, backward and a step of SGD: {net.name}, {net.small:,} rows, device_ids=[0, 0]"
    with _arms(net.make().train(), 2, target) as arms:
        steps = {
            arm: partial(_step, model, torch.optim.SGD(model.parameters(), lr=1e-4), x)
            for arm, model in arms.items()
        }
        return _compared(name, steps, target, rounds, least=1.0)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()


@contextmanager
def _arms(model: nn.Module, lanes: int, target: Target) -> Iterator[dict[str, nn.Module]]:
    model = model.to(target.device)
    with closing(parawrap.DataParallel(deepcopy(model), target.lanes(lanes))) as ours:
        yield {PLAIN: model, OURS: ours, THEIRS: target.peer(deepcopy(model), lanes)}


def _compared(
    name: str, works: Mapping[str, Work], target: Target, rounds: int, least: float | None
) -> Row:
    """Time the arms. If the peer raises, time the other arms, and report the error in the row."""
    refusal = _refusal(works[THEIRS])
    able = {arm: work for arm, work in works.items() if refusal is None or arm != THEIRS}
    issued, finished = issued_and_finished(able, target.synchronize, rounds)
    return compared_row(name, issued, finished, least, refusal)


def _refusal(work: Work) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 (the row reports any error)
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return None


def issued_and_finished(
    works: Mapping[str, Work], synchronize: Work, rounds: int, warm_up: int = _WARM_UP
) -> tuple[dict[str, Arm], dict[str, Arm]]:
    """Time each work from an idle device until the call returns, and until the device is idle
    again.
    """
    for work in works.values():
        for _ in range(warm_up):
            work()
        synchronize()
    pairs = in_turn(
        {name: partial(_timed, work, synchronize) for name, work in works.items()}, rounds
    )
    issued, finished = (
        {name: arm_of([pair[which] for pair in values]) for name, values in pairs.items()}
        for which in (0, 1)
    )
    return issued, finished


def _timed(
    work: Work, synchronize: Work, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    start = clock()
    kept = work()  # freed after the clock is read
    issued = clock()
    synchronize()
    finished = clock()
    del kept
    return (issued - start) * 1e6, (finished - start) * 1e6


def compared_row(
    name: str, issued: Times, finished: Times, least: float | None, refusal: str | None = None
) -> Row:
    """Return the row for these times.

    `least` is the goal: the least ratio of the peer's overhead to parawrap's.

    A refusal by the peer misses the goal.
    """
    until_issued = [
        Result(f"overhead until the call returns, {arm}", _beyond_plain(issued, arm), "us")
        for arm in (OURS, THEIRS)
        if arm in issued
    ]
    if refusal is None:
        ours, theirs = ((arm, _beyond_plain(finished, arm)) for arm in (OURS, THEIRS))
        return Row(
            name, _both(issued, finished), [*overheads(ours, theirs, least), *until_issued], PEERS
        )
    own = Result(f"overhead, {OURS}", _beyond_plain(finished, OURS), "us")
    if least is not None:
        own = replace(own, goal=f"compared with {THEIRS}", met=False)
    return Row(
        name,
        _both(issued, finished),
        [own, *until_issued],
        PEERS,
        note=f"{THEIRS} raises {refusal}",
    )


def _one_lane(net: Net, target: Target, rounds: int) -> Row:
    """Measure a block of one lane, on the net's device."""
    x = net.batch(net.small).to(target.device)
    model = net.make().eval().to(target.device)
    untouched = deepcopy(model)
    with torch.no_grad(), parawrap.parallel(model, target.lanes(1)):
        works = {PLAIN: partial(untouched, x), "parawrap.parallel": partial(model, x)}
        issued, finished = issued_and_finished(works, target.synchronize, rounds)
    return added_row(f"one lane: {net.name}, {net.small:,} rows", issued, finished)


def added_row(name: str, issued: Times, finished: Times) -> Row:
    """Return the row for the overhead of one lane, when the call returns and when the device is
    idle.
    """
    at_return, at_end = (_beyond_plain(times, "parawrap.parallel") for times in (issued, finished))
    results = [
        Result("overhead", at_end, "us").held_to("under", MOST_ADDED_US),
        Result("overhead until the call returns", at_return, "us").held_to("under", MOST_ADDED_US),
    ]
    return Row(name, _both(issued, finished), results)


def _beyond_plain(times: Times, arm: str) -> float:
    return times[arm].median_us - times[PLAIN].median_us


def _both(issued: Times, finished: Times) -> dict[str, Arm]:
    return {
        key: arm
        for name in finished
        for key, arm in ((name, finished[name]), (f"{name}, issued", issued[name]))
    }

"""The CUDA suite on a stand-in for the GPU: its rows, results, and goals. No test depends on a time."""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import nn

from benchmarks import cuda_calls, cuda_map
from benchmarks._measure import Arm
from benchmarks.cuda_calls import OURS, PLAIN, THEIRS
from benchmarks.cuda_map import COPIES, KERNELS, LOOP, MAPS, MatmulChain, RowMean, Stream, streamed_row
from benchmarks.cuda_target import Target
from benchmarks.nets import Net


class StandInPeer(nn.Module):
    """Stand-in for the peer that calls the module and counts the calls."""

    calls = 0

    def __init__(self, module, lanes):
        super().__init__()
        self.module = module

    def forward(self, x):
        type(self).calls += 1
        return self.module(x)


class RefusingPeer(StandInPeer):
    """A peer that raises."""

    def forward(self, x):
        raise NotImplementedError("not with these devices\nand more")


def target(peer=StandInPeer):
    """Return the CPU as a target with a clock that reads one millisecond for any work."""

    def elapsed_us(work):
        work()
        return 1000.0

    return Target("cpu", synchronize=lambda: None, elapsed_us=elapsed_us, pin=lambda tensor: tensor, peer=peer)


def at(**medians):
    """Return times with these medians."""
    return {name: Arm(median, median, median) for name, median in medians.items()}


def times(plain, ours, theirs):
    return at(**{PLAIN: plain, OURS: ours, THEIRS: theirs})


TINY = Net("tiny", lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), small=4, usual=6)


def test_a_failing_peer_misses_the_goal():
    """The other arms are measured."""
    rows = cuda_calls.rows(target(RefusingPeer), [TINY], rounds=2)
    compared = rows[1]
    assert THEIRS not in compared.arms
    assert OURS in compared.arms
    assert not compared.met
    assert compared.note == "nn.DataParallel raises NotImplementedError: not with these devices"


def test_calls_have_all_arms():
    """Every arm is measured when it returns and when the device is idle, and its calls reach the peer."""
    StandInPeer.calls = 0
    *compared, one_lane = cuda_calls.rows(target(), [TINY], rounds=2)
    for row in compared:
        assert list(row.arms) == [name for arm in (PLAIN, OURS, THEIRS) for name in (arm, f"{arm}, issued")]
    assert list(one_lane.arms) == [PLAIN, f"{PLAIN}, issued", "parawrap.parallel", "parawrap.parallel, issued"]
    assert [result.goal for result in one_lane.results if result.goal] == ["under 10"] * 2
    assert StandInPeer.calls > 0
    json.dumps([row.as_json() for row in (*compared, one_lane)])


def test_both_times_of_a_call():
    """The output is freed after the device is idle."""
    ticks, order = iter([1.0, 3.0, 7.0]), []

    class Returned:
        def __del__(self):
            order.append("freed")

    def work():
        order.append("work")
        return Returned()

    assert cuda_calls._timed(work, lambda: order.append("wait"), lambda: next(ticks)) == (2e6, 6e6)
    assert order == ["work", "wait", "freed"]


TRANSFER = Stream("transfer", RowMean, (4, 8), torch.float32, distinct=2, times=2)
COMPUTE = Stream("compute", partial(MatmulChain, 8, 3), (4, 8), torch.bfloat16, distinct=2, times=2)


def test_streams_have_all_arms():
    """Each model reads from both kinds of memory. The arms are the limit, the plain loop, and map over one lane and two."""
    rows = cuda_map.rows(target(), TRANSFER, COMPUTE, rounds=2)
    for row, limit in zip(rows, [COPIES, COPIES, KERNELS, KERNELS], strict=True):
        assert list(row.arms) == [limit, LOOP, *MAPS]
        assert row.arms[limit].median_us == 1000.0 / 4  # a pass is four batches
    goals = [[result.goal for result in row.results if result.goal] for row in rows]
    assert goals == [["at least 90"] * len(MAPS), [], [], []]
    json.dumps([row.as_json() for row in rows])


def test_shares_of_the_limit():
    """64 MiB in 1,000 us are 67.1 GB/s. Each map has its own goal."""
    arms = at(**{COPIES: 1000.0, LOOP: 2000.0, "map, 1 lane": 1100.0, "map, 2 lanes": 1250.0})
    row = streamed_row("map", arms, 64 * 2**20, least=0.9)
    found = [(result.quantity, round(result.value, 1), result.unit, result.met) for result in row.results]
    assert found == [
        ("rate, copies alone", 67.1, "GB/s", True),
        ("rate, plain loop", 33.6, "GB/s", True),
        ("rate, map, 1 lane", 61.0, "GB/s", True),
        ("rate, map, 2 lanes", 53.7, "GB/s", True),
        ("rate, plain loop, as a share of copies alone", 50.0, "%", True),
        ("rate, map, 1 lane, as a share of copies alone", 90.9, "%", True),
        ("rate, map, 2 lanes, as a share of copies alone", 80.0, "%", False),
    ]
    assert not row.met
    assert streamed_row("map", arms, 64 * 2**20, least=0.8).met
    assert not any(result.goal for result in streamed_row("map", arms, 64 * 2**20).results)

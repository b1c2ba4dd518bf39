"""The CUDA suite on a stand-in for the GPU: its rows, results, and goals. No test depends on a time."""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import nn

from benchmarks import cuda_calls, cuda_map
from benchmarks.cuda_calls import OURS, PLAIN, THEIRS
from benchmarks.cuda_map import COPIES, KERNELS, LOOP, MAPS, MatmulChain, RowMean, Stream
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


def target(peer=StandInPeer):
    """Return the CPU as a target with a clock that reads one millisecond for any work."""

    def elapsed_us(work):
        work()
        return 1000.0

    return Target("cpu", synchronize=lambda: None, elapsed_us=elapsed_us, pin=lambda tensor: tensor, peer=peer)


TINY = Net("tiny", lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), small=4, usual=6)


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

"""The rows of benchmarks: their arms, results, and goals.

The CPU stands in for the GPU. No test depends on a time.
"""

from __future__ import annotations

import json
from functools import partial

import torch
from torch import nn

from benchmarks import cuda_calls, cuda_map, lanes, mapping, submitting, training
from benchmarks.cuda_calls import OURS, PLAIN, THEIRS
from benchmarks.cuda_map import COPIES, KERNELS, LOOP, MAPS, MatmulChain, RowMean, Stream
from benchmarks.cuda_target import Target
from benchmarks.nets import Net

TINY = Net(
    "tiny", lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), small=4, usual=6
)


def elapsed_us(work):
    work()
    return 1000.0


GPU = Target(
    "cpu",
    synchronize=lambda: None,
    elapsed_us=elapsed_us,
    pin=lambda tensor: tensor,
    peer=lambda net, lanes: net,
)


def test_rows_have_their_arms():
    """One short round of each benchmark leaves the number of threads as it was."""
    before = torch.get_num_threads()
    mapped = mapping.rows(TINY, rounds=1, batches=5)
    submitted = submitting.rows(TINY, rounds=1, requests=2)
    trained = training.rows([TINY], rounds=1, lanes=2)
    assert [list(row.arms) for row in mapped] == [
        ["loop, one thread", "loop, 2 threads", "ThreadPoolExecutor", "map"]
    ] * 2
    assert len(submitted[0].arms) == 4
    assert list(trained[0].arms) == ["plain", "lanes"]
    assert torch.get_num_threads() == before
    json.dumps([row.as_json() for row in mapped + submitted + trained])


def test_lanes_have_their_arms():
    """Bare threads have replicas over the parameters of the model.

    The goals are those of two lanes without the lock.
    """
    job = lanes.Job("tiny", lambda: nn.Linear(4, 4), (4, 4), 4, 1.5, 1.2)
    (row,) = lanes.rows([job], lanes=[2], rounds=1)
    loops = ["loop, one thread", "loop, 2 threads"]
    others = ["bare threads", "map", "map, workers", "cut calls", "plain calls of the cut batches"]
    assert list(row.arms) == [*loops, *others]
    is_judged = lanes.build().endswith("t")
    assert [result.goal for result in row.results if result.goal] == [
        "at least 1",
        "at least 1.5",
        "at least 1.2",
    ] * is_judged
    replica = lanes.replica_of(model := nn.Linear(4, 4))
    assert replica.weight is model.weight
    json.dumps(row.as_json())


def test_calls_on_a_gpu():
    """Every arm is measured when it returns and when the device is idle."""
    *compared, one_lane = cuda_calls.rows(GPU, [TINY], rounds=2)
    for row in compared:
        assert list(row.arms) == [
            name for arm in (PLAIN, OURS, THEIRS) for name in (arm, f"{arm}, issued")
        ]
    assert list(one_lane.arms) == [
        PLAIN,
        f"{PLAIN}, issued",
        "parawrap.parallel",
        "parawrap.parallel, issued",
    ]
    assert [result.goal for result in one_lane.results if result.goal] == ["under 10"] * 2
    json.dumps([row.as_json() for row in (*compared, one_lane)])


def test_streams_on_a_gpu():
    """Each model reads from both kinds of memory.

    The arms are the limit, the plain loop, and map over one lane and two.
    """
    transfer = Stream("transfer", RowMean, (4, 8), torch.float32, distinct=2, times=2)
    compute = Stream(
        "compute", partial(MatmulChain, 8, 3), (4, 8), torch.bfloat16, distinct=2, times=2
    )
    rows = cuda_map.rows(GPU, transfer, compute, rounds=2)
    for row, limit in zip(rows, [COPIES, COPIES, KERNELS, KERNELS], strict=True):
        assert list(row.arms) == [limit, LOOP, *MAPS]
        assert row.arms[limit].median_us == 1000.0 / 4  # a pass is four batches
    goals = [[result.goal for result in row.results if result.goal] for row in rows]
    assert goals == [["at least 90"] * len(MAPS), [], [], []]
    json.dumps([row.as_json() for row in rows])

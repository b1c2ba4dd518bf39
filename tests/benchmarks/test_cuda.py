"""The CUDA suite on a stand-in for the GPU: its rows, results, and goals. No test depends on a time."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import cuda_calls, cuda_map
from benchmarks._measure import Arm
from benchmarks.cuda_calls import OURS, PLAIN, THEIRS, added_row, compared_row
from benchmarks.cuda_map import COPIES, KERNELS, LOOP, MAPS, MatmulChain, RowMean, Stream, streamed_row
from benchmarks.cuda_target import Target, missing
from benchmarks.nets import Net, encoder, mlp, plain_attention, resnet18


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


def test_overheads_are_differences_from_the_plain_call():
    """Both overheads have two times, and the first have a ratio."""
    row = compared_row("call", times(40, 60, 240), times(100, 150, 400), least=3)
    assert {result.quantity: result.value for result in row.results} == {
        "overhead, parawrap.DataParallel": 50,
        "overhead, nn.DataParallel": 300,
        "overhead of nn.DataParallel divided by that of parawrap.DataParallel": 6,
        "overhead until the call returns, parawrap.DataParallel": 20,
        "overhead until the call returns, nn.DataParallel": 200,
    }
    assert row.met
    assert row.results[2].goal == "at least 3"
    assert row.arms[f"{OURS}, issued"].median_us == 60


@pytest.mark.parametrize(
    ("ours", "theirs", "ratios"), [(150, 400, [6.0]), (150, 140, [0.8]), (99, 300, []), (100, 300, [])]
)
def test_an_overhead_that_is_not_positive_has_no_ratio(ours, theirs, ratios):
    """The other overheads have one, also if parawrap's is larger."""
    given = times(100, ours, theirs)
    row = compared_row("call", given, given, least=3)
    assert [result.value for result in row.results if result.unit == "ratio"] == ratios


@pytest.mark.parametrize(
    ("ours", "theirs", "least", "met"),
    [
        (200, 400, 3, True),  # exactly 3 times
        (201, 400, 3, False),
        (200, 200, 1, True),
        (200, 199, 1, False),
        (100, 101, 3, True),  # no overhead
        (99, 98, 1, False),  # both negative, the peer's smaller
        (900, 200, None, True),  # no goal
    ],
)
def test_the_goal_of_a_call_applies_to_its_overhead(ours, theirs, least, met):
    """Overheads are compared, not whole times. If parawrap adds no time, the overheads are compared directly."""
    given = times(100, ours, theirs)
    assert compared_row("call", given, given, least).met is met


def test_the_error_of_a_peer_is_noted_and_misses_the_goal():
    """The other arms are measured."""
    rows = cuda_calls.rows(target(RefusingPeer), [TINY], rounds=10)
    compared = rows[1]
    assert THEIRS not in compared.arms
    assert OURS in compared.arms
    assert not compared.met
    assert compared.note == "nn.DataParallel raises NotImplementedError: not with these devices"


def test_the_calls_of_a_net_have_all_arms():
    """Inference over one and two lanes with either batch, training, and one lane; every arm issued and finished."""
    StandInPeer.calls = 0
    rows = cuda_calls.rows(target(), [TINY], rounds=10)
    assert [row.name for row in rows] == [
        "call: tiny, 4 rows, device_ids=[0]",
        "call: tiny, 4 rows, device_ids=[0, 0]",
        "call: tiny, 6 rows, device_ids=[0]",
        "call: tiny, 6 rows, device_ids=[0, 0]",
        "forward, backward and a step of SGD: tiny, 4 rows, device_ids=[0, 0]",
        "one lane: tiny, 4 rows",
    ]
    for row in rows[:-1]:
        assert list(row.arms) == [name for arm in (PLAIN, OURS, THEIRS) for name in (arm, f"{arm}, issued")]
        assert row.peers == f"torch.nn.DataParallel of torch {torch.__version__}"
    assert list(rows[-1].arms) == [PLAIN, f"{PLAIN}, issued", "parawrap.parallel", "parawrap.parallel, issued"]
    goals = [[result.goal for result in row.results if result.goal] for row in rows]
    assert [len(goal) for goal in goals] == [0, 1, 0, 1, 1, 2]
    assert goals[-1] == ["under 10"] * 2
    assert StandInPeer.calls > 0
    json.dumps([row.as_json() for row in rows])


@pytest.mark.parametrize(("issued", "finished", "met"), [(29.9, 109.9, True), (30.0, 101.0, False), (21.0, 110.0, False)])
def test_one_lane_has_a_goal_for_each_of_its_times(issued, finished, met):
    """Under 10 us above the plain call when the call returns, and when the device is idle."""
    name = "parawrap.parallel"
    row = added_row("one lane", at(**{PLAIN: 20.0, name: issued}), at(**{PLAIN: 100.0, name: finished}))
    assert row.met is met
    assert [result.value for result in row.results] == pytest.approx([finished - 100, issued - 20])


def test_a_call_is_timed_when_it_returns_and_when_the_device_is_idle():
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


def test_the_streams_have_all_arms_and_their_limit():
    """Each model reads from both kinds of memory. The arms are the limit, the plain loop, and map over one lane and two."""
    rows = cuda_map.rows(target(), TRANSFER, COMPUTE, rounds=2)
    assert [row.name for row in rows] == [
        "map: transfer, pinned",
        "map: transfer, pageable",
        "map: compute, pinned",
        "map: compute, pageable",
    ]
    for row, limit in zip(rows, [COPIES, COPIES, KERNELS, KERNELS], strict=True):
        assert list(row.arms) == [limit, LOOP, *MAPS]
        assert row.arms[limit].median_us == 1000.0 / 4  # a pass is four batches
    goals = [[result.goal for result in row.results if result.goal] for row in rows]
    assert goals == [["at least 90"] * len(MAPS), [], [], []]
    json.dumps([row.as_json() for row in rows])


def test_every_arm_of_a_stream_gives_every_batch_to_the_model():
    """The loop and map read all batches of a pass, and the copies fill the buffer with each."""
    seen = []

    class Watching(RowMean):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

    batches = [torch.ones(4, 8)] * 4
    cuda_map._row(TRANSFER._replace(make=Watching), "pinned", batches, (COPIES, lambda: None), target(), rounds=2)
    assert seen == [(4, 8)] * 4 * 3 * 3  # three arms, a warm-up and two rounds


def test_a_share_is_of_the_limit_and_the_rate_of_the_bytes():
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


def test_the_batches_have_their_named_sizes():
    """64 MiB and 16 MiB per batch in the real streams."""
    assert [stream.bytes_per_batch for stream in (cuda_map.TRANSFER, cuda_map.COMPUTE)] == [64 * 2**20, 16 * 2**20]


def test_the_nets_have_their_named_shapes():
    """Parameter counts agree with the literature, and each row gives one output."""
    with torch.device("meta"), torch.no_grad(), plain_attention():
        for make, row, parameters, output in (
            (mlp, (1024,), 3 * (1024 * 1024 + 1024), (2, 1024)),
            (resnet18, (3, 64, 64), 11_689_512, (2, 1000)),
            (encoder, (5, 768), 12 * 7_087_872, (2, 5, 768)),
        ):
            net = make().eval()
            assert sum(parameter.numel() for parameter in net.parameters()) == parameters
            assert net(torch.empty(2, *row)).shape == output


def test_the_fused_attention_path_is_off_inside_the_block_only():
    """The end of the block restores the setting."""
    before = torch.backends.mha.get_fastpath_enabled()
    with plain_attention():
        assert not torch.backends.mha.get_fastpath_enabled()
    assert torch.backends.mha.get_fastpath_enabled() is before


@pytest.mark.parametrize(
    ("seen", "cuda", "reason"),
    [
        (True, "13.0", None),
        (False, "13.0", "is built for CUDA 13.0 and sees no GPU"),
        (False, None, "is built without CUDA"),
    ],
)
def test_a_machine_without_a_gpu_reports_the_reason(monkeypatch, seen, cuda, reason):
    """No GPU, or a torch without CUDA."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    why = missing()
    assert why is None if reason is None else why.endswith(reason)

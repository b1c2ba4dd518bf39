"""Lanes work on their own streams, ordered with the caller's streams by events.

The simulated devices report every memory access that no event orders, and they delay copies as long
as the program allows. A fixture in conftest.py fails a test if a device reports a race; some tests
check only this.
"""

from __future__ import annotations

import copy
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from torch import nn

from parawrap import DataParallel, ReplicaError, parallel
from tests.helpers.device_models import (
    SIMS,
    Holder,
    assert_same_gradients,
    mlp,
    rows,
    settle,
    side_stream,
)
from tests.helpers.waiting import PATIENCE_S

TWICE = ["sim:0", "sim:0"]


class Where(nn.Module):
    """Records the input's device, its current stream, and the current device for each shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append(
            (
                str(x.device),
                torch.sim.current_stream(x.device).stream_id,
                torch.sim.current_device(),
            )
        )
        return x * self.weight


def streamed(work, device="sim:0"):
    """Run `work` on a new stream of the device."""
    with torch.sim.stream(side_stream(device)):
        return work()


def in_a_thread(work):
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()


@pytest.mark.parametrize("devices", [SIMS, TWICE], ids=str)
def test_each_lane_has_its_own_stream(devices):
    """The stream of a lane is not the caller's, and stays the same from call to call.

    The device of the lane is the current one.
    """
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, devices):
        model(rows(11))
        first = sorted(model.seen)
        model.seen.clear()
        model(rows(11))
    assert len({(device, stream) for device, stream, _ in first}) == len(devices)
    assert all(stream != 0 and f"sim:{current}" == device for device, stream, current in first)
    assert sorted(model.seen) == first


def test_later_blocks_reuse_streams():
    """A block reuses the streams of closed blocks, because torch keeps memory for each stream that
    was ever used.
    """
    model = Where().to("sim:0")
    for _ in range(10):
        with torch.no_grad(), parallel(model, TWICE) as p:
            model(rows(9))
            list(p.map([rows(8)] * 4))
    # Two for compute and two for input copies
    assert len({stream for _, stream, _ in model.seen}) <= 4


def test_callers_keep_their_streams():
    model = mlp().to("sim:0")
    stream = side_stream("sim:2")
    with torch.no_grad(), parallel(model, SIMS), torch.sim.stream(stream):
        model(rows())
        with pytest.raises(RuntimeError):
            model(rows(width=4))
        assert torch.sim.current_device() == 2
        assert torch.sim.current_stream("sim:2") == stream
        assert [
            torch.sim.current_stream(device).stream_id for device in ("sim:0", "sim:1", "sim:3")
        ] == [0, 0, 0]


def test_lanes_do_not_share_casts():
    """Lanes on one device, each on its own stream, cast shared parameters separately under
    autocast.
    """
    model = nn.Linear(64, 64).to("sim:0")
    x = torch.ones(9, 64, device="sim:0")
    with torch.no_grad(), parallel(model, TWICE), torch.autocast("sim", dtype=torch.bfloat16):
        for _ in range(20):
            assert model(x).dtype is torch.bfloat16
        assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:2", "sim:1"]], ids=str)
def test_training_on_changing_streams(devices):
    """The caller can change its stream between two training steps without a warning from torch
    about gradients.
    """
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    side = side_stream()
    torch.set_warn_always(True)
    try:
        with parallel(model, devices):
            for stream in (
                torch.sim.default_stream("sim:0"),
                side,
                side,
                torch.sim.default_stream("sim:0"),
            ):
                settle()
                with torch.sim.stream(stream):
                    x = rows(9).to("sim:0")
                    for each in (model, plain):
                        each.zero_grad()
                        each(x).square().sum().backward()
                    assert_same_gradients(model, plain)
    finally:
        torch.set_warn_always(False)


class Program:
    """Random calls of all kinds, and changes of the model, on random streams, each compared with a
    plain copy.

    The program orders its own reads and writes of the model, and nothing else.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.model = Holder().eval()
        self.plain = copy.deepcopy(self.model)
        self.devices = self.random.choice(
            [["sim:1"], ["sim:2", "sim:1"], ["sim:0", "sim:1"], TWICE, [*SIMS, "sim:0"]]
        )
        self.other = DataParallel(self.model, [0, 2, 1])
        self.readers, self.writer = [], torch.sim.default_stream("sim:0")

    def run(self, steps):
        settle()
        with parallel(self.model, self.devices, out_dims=0) as self.block:
            for _ in range(steps):
                work = self.random.choice([self.infer, self.infer, self.infer, self.write])
                streams = [
                    self.random.choice([torch.sim.default_stream, side_stream])(device)
                    for device in SIMS
                ]
                run = self.random.choice([in_a_thread, lambda work: work()])
                run(lambda work=work, streams=streams: self.on(streams, work))
        self.other.close()
        settle()

    def on(self, streams, work):
        with ExitStack() as active:
            for stream in reversed(streams):
                active.enter_context(torch.sim.stream(stream))
            for earlier in [self.writer] if work == self.infer else [self.writer, *self.readers]:
                streams[0].wait_stream(earlier)
            work()
        self.readers.append(streams[0])
        if work != self.infer:
            self.readers, self.writer = [], streams[0]

    def infer(self):
        x = rows(self.random.choice([1, 7, 9]))
        expected = self.plain(x.to("sim:0"))
        place = self.random.choice(["cpu", "sim:0", "sim:3"])
        ways = [self.model, self.block, self.other, lambda x: self.block.submit(x).result()]
        with torch.no_grad():
            output = self.random.choice([*ways, lambda x: list(self.block.map([x, x]))[-1]])(
                x.to(place)
            )
        torch.testing.assert_close(output, expected.detach())

    def write(self):
        which = self.random.choice(
            [lambda m: m.linear.weight, lambda m: m.factor, lambda m: m.scale]
        )
        with torch.no_grad():
            for each in (self.model, self.plain):
                which(each).mul_(1.1)


@pytest.mark.parametrize("seed", range(4))
def test_calls_in_any_order(seed):
    """Outputs are right, and no device reports a race, whatever calls and changes came before."""
    Program(seed).run(steps=30)


def test_callers_in_several_threads():
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model).cpu()
    settle()
    # Draw the batches first: numbers that another thread draws during a call count as drawn by the
    # call.
    work = [[rows(13) for _ in range(8)] for _ in range(4)]

    def calls(batches):
        with torch.no_grad(), torch.sim.stream(side_stream()):
            for x in batches:
                torch.testing.assert_close(model(x.to("sim:0")).cpu(), plain(x))

    with parallel(model, ["sim:0", "sim:0", "sim:1"]), ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(calls, batches) for batches in work]:
            each.result()


@pytest.mark.parametrize("place", [None, "sim:3"], ids=str)
def test_results_may_be_read_anywhere(place):
    """A thread, or a callback, that reads a future's result can use it at once on any stream of its
    device.
    """
    model = mlp().to("sim:0")
    x = rows(9)
    expected = model(x.to("sim:0")).detach().cpu()
    settle()
    kept, added, there = [], threading.Event(), threading.Event()

    def keep(future):
        kept.append(future.result())
        there.set()

    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"], output_device=place) as p:
        for future in [p.submit(x) for _ in range(6)]:
            total = in_a_thread(
                lambda future=future: streamed(
                    lambda: (future.result() * 2).cpu(), place or "sim:0"
                )
            )
            torch.testing.assert_close(total, 2 * expected)
        # The lanes wait, so that the callback runs in one of them, and not in this thread
        for lane in p._session.lanes.all:
            lane.inbox.put(lambda _: added.wait(PATIENCE_S))
        p.submit(x).add_done_callback(keep)
        added.set()
        assert there.wait(PATIENCE_S)
        torch.testing.assert_close(
            streamed(lambda: (kept[0] + 0).cpu(), place or "sim:0"), expected
        )


def test_changes_between_submissions():
    """A call uses the parameters of its submission, or is refused if it has not begun when they
    change.
    """
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64).to("sim:0")
    x = torch.ones(4, 5, dtype=torch.float64)
    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        model.weight.fill_(1)
        before = [p.submit(x) for _ in range(4)]
        model.weight.fill_(2)
        after = [p.submit(x) for _ in range(4)]
        for future in before:
            error = future.exception()
            assert (
                isinstance(error, ReplicaError)
                if error
                else future.result().unique().tolist() == [5.0]
            )
        assert all(future.result().unique().tolist() == [10.0] for future in after)

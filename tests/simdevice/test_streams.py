"""Streams of the simulated device: the order of work, reports of races, and late copies.

``DEVICE`` has a default stream, and the tests queue work on other streams. Tensors are ``settled`` when the host
has waited for them, so that the set-up of a test cannot race with the test.
"""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from . import reset_stats, stats

DEVICE = "sim:1"
OTHER = "sim:2"


def settled(tensor):
    """Return a tensor without pending work."""
    torch.accelerator.synchronize(tensor.device)
    return tensor


def ones(*shape, device=DEVICE):
    return settled(torch.ones(shape, device=device))


def pinned(*values):
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def poisoned(tensor):
    """Return True if all elements have the value of fresh and freed memory."""
    return bool(tensor.isnan().all())


def write(x):
    x.add_(1)


def read(x):
    x.sum()


@pytest.fixture
def side(sim):
    """A second stream of DEVICE, which is the current device."""
    with sim.device(DEVICE):
        yield sim.Stream()


def test_current_stream(sim):
    """A stream context makes the stream and its device current, and then brings back the ones before."""
    stream = sim.Stream("sim:2")
    with sim.stream(stream):
        assert sim.current_device() == 2
        assert sim.current_stream() == torch.accelerator.current_stream() == stream
    assert sim.current_device() == 0
    assert sim.current_stream("sim:2") == sim.default_stream("sim:2") != stream


def test_pools_of_streams(sim):
    """New streams are those of their priority's pool in turn, never the default stream."""
    streams = [sim.Stream("sim:2") for _ in range(64)]
    assert len(set(streams)) == 32
    assert streams[:32] == streams[32:]
    urgent = [sim.Stream("sim:2", priority=-1) for _ in range(16)]
    assert len(set(urgent)) == 8
    assert not {sim.default_stream("sim:2"), *urgent} & set(streams)


# ---------------------------------------------------------------- races


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (write, read, "aten::sum on stream {} of sim:1 reads what aten::add on the default stream of sim:1 wrote"),
        (read, write, "aten::add on stream {} of sim:1 overwrites what aten::sum on the default stream of sim:1 read"),
        (write, write, "aten::add on stream {} of sim:1 overwrites what aten::add on the default stream of sim:1 wrote"),
        (read, read, None),
    ],
)
def test_unordered_uses_race(first, second, found, side, sim):
    """Two unordered uses on two streams race if one writes, and the report is one sentence."""
    x = ones(4)
    first(x)
    with sim.stream(side):
        second(x)
    end = ", and nothing orders the two: an event is missing"
    assert stats().races == (() if found is None else (found.format(side.stream_id) + end,))


def wait_stream(sim, side):
    side.wait_stream(sim.default_stream())


def wait_roundabout(sim, side):
    between = sim.Stream(OTHER)
    between.wait_stream(sim.default_stream())
    side.wait_stream(between)


def no_order(sim, side):
    sim.default_stream().record_event()


ORDERS = [
    wait_stream,
    wait_roundabout,
    lambda sim, side: side.wait_event(sim.default_stream().record_event()),
    lambda sim, side: sim.default_stream().record_event().query(),
    lambda sim, side: sim.default_stream().record_event().synchronize(),
    lambda sim, side: sim.default_stream().synchronize(),
    lambda sim, side: torch.accelerator.synchronize(),
    lambda sim, side: ones(1).item(),
    lambda sim, side: torch.ones(1, device=DEVICE).cpu(),
    lambda sim, side: torch.ones(1).to(DEVICE),
]
OTHER_WAITS = [
    no_order,
    lambda sim, side: sim.default_stream().wait_stream(side),
    lambda sim, side: side.synchronize(),
    lambda sim, side: sim.synchronize(OTHER),
    lambda sim, side: torch.ones(1).to(DEVICE, non_blocking=True),
]


@pytest.mark.parametrize(("order", "races"), [*((order, 0) for order in ORDERS), *((order, 1) for order in OTHER_WAITS)])
def test_orders(order, races, side, sim):
    """Only a wait of the second stream or of the host for the first stream orders later uses."""
    x = ones(4)
    write(x)
    order(sim, side)
    with sim.stream(side):
        write(x)
    assert len(stats().races) == races


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda x: x[:2], lambda x: x[2:]),
        (lambda x: x[:, 1:3], lambda x: x[:, 3:]),
        (lambda x: x[::2], lambda x: x[1::2]),
        (lambda x: x.t()[:3], lambda x: x.t()[3:]),
    ],
)
def test_disjoint_slices(mine, theirs, side, sim):
    """Parts of one tensor that share no element may be written on two streams; those that share one may not."""
    x = ones(4, 6)
    write(mine(x))
    with sim.stream(side):
        write(theirs(x))
        assert stats().races == ()
        write(x)
    assert len(stats().races) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: torch._foreach_add_([y, x], 1.0),
        lambda x, y: torch.cat([y, x]),
        lambda x, y: x[torch.tensor([0])],
        lambda x, y: x.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
        lambda x, y: x.resize_(1000),
        lambda x, y: x.cpu(),
        lambda x, y: x[0].item(),
        lambda x, y: x.to(torch.float64),
        lambda x, y: copy.deepcopy(x),
        lambda x, y: y.copy_(x),
        lambda x, y: x.copy_(torch.zeros(4)),
        lambda x, y: x.to(OTHER),
        lambda x, y: torch.equal(x, y),
    ],
)
def test_every_kind_of_use(use, side, sim):
    """Operators of all kinds race if they are unordered, with one report, and do not race if they are ordered."""
    for order in (no_order, wait_stream):
        sim.synchronize()
        reset_stats()
        x, y = ones(4), ones(4)
        write(x)
        order(sim, side)
        with sim.stream(side):
            use(x, y)
        assert len(stats().races) == (1 if order is no_order else 0)


CURES = [
    lambda x, main, side: x.record_stream(side),
    lambda x, main, side: main.wait_stream(side),
    lambda x, main, side: side.synchronize(),
]


@pytest.mark.parametrize("cure", [None, *CURES])
def test_early_frees(cure, side, sim):
    """Memory freed while another stream may use it is a race as soon as its own stream allocates again."""
    x = ones(4)
    with sim.stream(side):
        read(x)
    if cure is not None:
        cure(x, sim.default_stream(), side)
    del x
    assert stats().races == ()
    torch.empty(1000, device=DEVICE)
    found = (
        f"16 bytes of the default stream of sim:1 were freed while aten::sum on stream {side.stream_id} of sim:1 "
        "may still read them: record_stream or an event is missing"
    )
    assert stats().races == ((found,) if cure is None else ())


# ---------------------------------------------------------------- late copies


def test_late_copies_to_the_device(side, sim):
    """A copy from pinned memory happens before its own stream's next work, or that of a stream that waits for it."""
    for wait in (False, True):
        reset_stats()
        source = pinned(1, 2, 3)
        with sim.stream(side):
            x = source.to(DEVICE, non_blocking=True)
        if wait:
            sim.default_stream().wait_stream(side)
        seen = x * 1
        assert stats().late == 1
        assert len(stats().races) == (0 if wait else 1)
        assert poisoned(seen) != wait
        with sim.stream(side):
            assert (x * 1).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "wait",
    [
        lambda sim, event: event.synchronize(),
        lambda sim, event: event.query(),
        lambda sim, event: sim.current_stream().synchronize(),
        lambda sim, event: torch.zeros(1, device=DEVICE),
        lambda sim, event: torch.ones(1).to(DEVICE, non_blocking=True),
    ],
)
def test_late_copies_to_the_host(wait, side, sim):
    """A late copy runs when the host waits, or when its stream gets a kernel or another kind of copy."""
    host = ones(3).to("cpu", non_blocking=True)
    event = sim.current_stream().record_event()
    assert poisoned(host)
    sim.synchronize(OTHER)
    assert poisoned(host)
    wait(sim, event)
    assert host.tolist() == [1, 1, 1]


def test_pinned_memory():
    """A late copy reads its pinned source when it runs. Freed pinned memory is not reused until then."""
    source = pinned(1, 2)
    x = source.to(DEVICE, non_blocking=True)
    source.fill_(7)
    assert x.tolist() == [7, 7]
    copies = [pinned(*range(100)).to(DEVICE, non_blocking=True) for _ in range(10)]
    others = [torch.zeros(100).pin_memory() for _ in range(10)]
    assert all(x.tolist() == list(range(100)) for x in copies)
    assert not any(other.any() for other in others)


def test_sources_freed_too_early(side, sim):
    """A late copy of memory that was freed brings poison, and a race; with record_stream it brings the numbers."""
    for records in (False, True):
        reset_stats()
        x = ones(3)
        with sim.stream(side):
            host = x.to("cpu", non_blocking=True)
        if records:
            x.record_stream(side)
        del x
        torch.zeros(3, device=DEVICE)
        side.synchronize()
        assert poisoned(host) != records
        assert len(stats().races) == (0 if records else 1)


@pytest.mark.parametrize("side_of", [DEVICE, OTHER])
def test_copies_between_devices(side_of, sim):
    """A stream of either device that was not current at the copy sees it only after a wait."""
    for waits in (False, True):
        sim.synchronize(DEVICE)
        sim.synchronize(OTHER)
        reset_stats()
        x, y = ones(3), torch.empty(3, device=OTHER)
        y.copy_(x, non_blocking=True)
        stream = sim.Stream(side_of)
        if waits:
            stream.wait_stream(sim.default_stream(OTHER))
        with sim.stream(stream):
            if side_of == DEVICE:
                x.fill_(9)
            else:
                assert poisoned(y * 1) != waits
        sim.synchronize(OTHER)
        assert y.tolist() == ([9, 9, 9] if side_of == DEVICE and not waits else [1, 1, 1])
        assert len(stats().races) == (0 if waits else 1)


# ---------------------------------------------------------------- whole programs


def test_backward_over_two_streams(side, sim):
    """A backward pass follows the streams of the forward pass. One that forgets a wait races."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    model(x).square().sum().backward()
    twin = copy.deepcopy(model).to(DEVICE)
    for waits in (True, False):
        twin.zero_grad()
        sim.synchronize()
        reset_stats()
        side.wait_stream(sim.current_stream())
        inputs = x.to(DEVICE)
        with sim.stream(side):
            hidden = twin[0](inputs)
        if waits:
            sim.current_stream().wait_stream(side)
        hidden.record_stream(sim.current_stream())
        twin[2](twin[1](hidden)).square().sum().backward()
        for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
        assert (stats().races == ()) == waits


class Program:
    """A program over six streams of two devices that waits whenever it must, and knows what each tensor holds."""

    def __init__(self, seed, forgets):
        self.random = random.Random(seed)
        self.forgets = forgets
        self.streams = [torch.Stream(device) for device in (DEVICE, OTHER) for _ in range(3)]
        self.tensors = []

    def uses(self, stream):
        """Return a tensor of the stream's device, ready for its use, and the value in it."""
        here = [entry for entry in self.tensors if entry[0].device == stream.device]
        tensor, value, users = self.random.choice(here)
        if self.random.random() >= self.forgets:
            for user in users - {stream}:
                stream.wait_stream(user)
            tensor.record_stream(stream)
        users.add(stream)
        return tensor, value

    def makes(self, tensor, value, stream):
        self.tensors.append((tensor, value, {stream}))
        if len(self.tensors) > 30:
            self.tensors.pop(self.random.randrange(5, 30))

    def step(self):
        stream, other = self.random.sample(self.streams, 2)
        value = float(self.random.randrange(100))
        with other, stream:
            kind = self.random.choice(["bring", "compute", "move"])
            if kind == "bring" or all(t.device != stream.device for t, _, _ in self.tensors):
                source = torch.full((8,), value).pin_memory()
                self.makes(source.to(stream.device, non_blocking=True), value, stream)
            elif kind == "compute":
                tensor, value = self.uses(stream)
                self.makes(tensor + 1, value + 1, stream)
            elif stream.device != other.device:
                tensor, value = self.uses(stream)
                self.makes(tensor.to(other.device), value, other)

    def mistakes(self):
        torch.accelerator.synchronize(DEVICE)
        torch.accelerator.synchronize(OTHER)
        return sum(tensor.tolist() != [value] * 8 for tensor, value, _ in self.tensors)


@pytest.mark.parametrize("seed", range(3))
def test_programs(seed):
    """A random program that orders its work has no race and right results; one that forgets a tenth of it races."""
    for forgets in (0.0, 0.1):
        reset_stats()
        program = Program(seed, forgets)
        for _ in range(500):
            program.step()
        assert stats().late > 100
        mistakes = program.mistakes()
        assert bool(stats().races) == bool(forgets)
        assert mistakes == 0 or forgets

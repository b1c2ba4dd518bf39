"""The simulated accelerator counts copies, and finds races and copies that come too early.

``DEVICE`` has a default stream, and the tests queue work on other streams. The host has waited for
``ones``, so that the set-up of a test cannot race with the test.
"""

from __future__ import annotations

import gc

import pytest
import torch

from tests.helpers.tiers import require

from . import available, install, reset_stats, stats

DEVICE = "sim:1"


@pytest.fixture(autouse=True)
def sim():
    """The device module, with idle devices and counters at zero."""
    require("sim", available())
    module = install(4)
    gc.collect()  # what earlier tests left has memory there
    for index in range(4):
        module.synchronize(index)
    reset_stats()
    return module


@pytest.fixture
def side(sim):
    """A second stream of DEVICE, which is the current device."""
    with sim.device(DEVICE):
        yield sim.Stream()


def ones(*shape):
    """Return a settled tensor on DEVICE."""
    tensor = torch.ones(shape, device=DEVICE)
    torch.accelerator.synchronize(DEVICE)
    return tensor


def test_copies_are_counted():
    """Copies between devices are counted with the bytes that arrive."""
    x = torch.ones(3, 5).to("sim:0").to("sim:1")
    x.t()[:2].cpu()
    assert x.sum().item() == 15
    now = stats()
    assert (now.h2d_bytes, now.d2d_bytes, now.d2h_bytes, now.scalar_reads) == (60, 60, 24, 1)


def write(x):
    x.add_(1)


def read(x):
    x.sum()


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (write, read, ("sum", "reads", "add", "wrote")),
        (read, write, ("add", "overwrites", "sum", "read")),
        (write, write, ("add", "overwrites", "add", "wrote")),
        (read, read, None),
    ],
)
def test_unordered_uses_race(first, second, found, side, sim):
    """Two unordered uses on two streams race if one writes, and the report is one sentence."""
    x = ones(4)
    first(x)
    with sim.stream(side):
        second(x)
    reports = ()
    if found is not None:
        now, uses, before, used = found
        report = (
            f"aten::{now} on stream {side.stream_id} of sim:1 {uses} what aten::{before} on the "
            f"default stream of sim:1 {used}, and nothing orders the two: an event is missing"
        )
        reports = (report,)
    assert stats().races == reports


@pytest.mark.parametrize(
    ("order", "races"),
    [
        (lambda sim, side: side.wait_stream(sim.default_stream()), 0),
        (lambda sim, side: side.wait_event(sim.default_stream().record_event()), 0),
        (lambda sim, side: sim.default_stream().synchronize(), 0),
        (lambda sim, side: torch.ones(1, device=DEVICE).cpu(), 0),
        (lambda sim, side: sim.default_stream().record_event(), 1),
        (lambda sim, side: sim.default_stream().wait_stream(side), 1),
        (lambda sim, side: side.synchronize(), 1),
        (lambda sim, side: torch.ones(1).to(DEVICE, non_blocking=True), 1),
    ],
)
def test_waits_order_uses_of_memory(order, races, side, sim):
    """A wait of the second stream or of the host for the first stream orders later uses, and
    nothing else does.
    """
    x = ones(4)
    write(x)
    order(sim, side)
    with sim.stream(side):
        write(x)
    assert len(stats().races) == races


@pytest.mark.parametrize(
    "cure",
    [
        None,
        lambda x, main, side: x.record_stream(side),
        lambda x, main, side: main.wait_stream(side),
    ],
)
def test_early_frees_are_reported(cure, side, sim):
    """Memory freed while another stream may use it is a race as soon as its own stream allocates
    again.
    """
    x = ones(4)
    with sim.stream(side):
        read(x)
    if cure is not None:
        cure(x, sim.default_stream(), side)
    del x
    assert stats().races == ()
    torch.empty(1000, device=DEVICE)
    found = (
        "16 bytes of the default stream of sim:1 were freed while aten::sum on stream "
        f"{side.stream_id} of sim:1 may still read them: record_stream or an event is missing"
    )
    assert stats().races == ((found,) if cure is None else ())


@pytest.mark.parametrize("waits", [False, True])
def test_late_copies_to_the_device(waits, side, sim):
    """A copy from pinned memory happens before its own stream's next work, or that of a stream that
    waits for it.
    """
    source = torch.tensor([1.0, 2.0, 3.0]).pin_memory()
    with sim.stream(side):
        x = source.to(DEVICE, non_blocking=True)
    source.fill_(7)
    if waits:
        sim.default_stream().wait_stream(side)
    seen = x * 1
    assert stats().late == 1
    assert len(stats().races) == (0 if waits else 1)
    assert bool(seen.isnan().all()) != waits  # fresh memory holds NaN
    with sim.stream(side):
        assert (x * 1).tolist() == [7, 7, 7]

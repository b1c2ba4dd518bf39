"""Streams of the simulated device: the order of work, reports of races, and late copies.

``DEVICE`` has a default stream, and the tests queue work on other streams. Work is ``settled`` when the host
has waited for it, so that the set-up of a test cannot race with the test.
"""

from __future__ import annotations

import copy
import io
import random
import threading
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from . import reset_stats, stats

DEVICE = "sim:1"
OTHER = "sim:2"


def settled(tensor: Tensor) -> Tensor:
    """Return a tensor without pending work."""
    torch.accelerator.synchronize(tensor.device)
    return tensor


def ones(*shape: int, device: str = DEVICE) -> Tensor:
    return settled(torch.ones(shape, device=device))


def pinned(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).pin_memory()


def poisoned(tensor: Tensor) -> bool:
    """Return True if all elements have the value of fresh and freed memory."""
    return bool(tensor.isnan().all())


@pytest.fixture(name="side")
def _side(sim: ModuleType) -> Iterator[torch.Stream]:
    """A second stream of DEVICE, which is the current device."""
    with sim.device(DEVICE):
        yield sim.Stream()


# ---------------------------------------------------------------- streams


def test_current_stream_is_set_and_restored(sim: ModuleType) -> None:
    """A stream context makes the stream and its device current, and then brings back what was."""
    stream = sim.Stream("sim:2")
    with sim.stream(stream):
        assert sim.current_device() == 2
        assert sim.current_stream() == torch.accelerator.current_stream() == stream
        with sim.stream(None), stream:
            assert sim.current_stream("sim:2") == stream
    assert sim.current_device() == 0
    assert sim.current_stream("sim:2") == sim.default_stream("sim:2") != stream
    assert isinstance(sim.current_stream(), sim.Stream)


def test_set_stream(sim: ModuleType) -> None:
    """Setting a stream makes it current on its device, and its device current, in that thread alone."""
    seen: list[object] = []

    def work() -> None:
        stream = sim.Stream("sim:3")
        sim.set_stream(stream)
        seen.extend([sim.current_device(), sim.current_stream() == stream])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [3, True]
    assert (sim.current_device(), sim.current_stream("sim:3")) == (0, sim.default_stream("sim:3"))


def test_streams_come_from_a_pool(sim: ModuleType) -> None:
    """New streams are those of their priority's pool in turn, never the default stream, and a device has its own."""
    streams = [sim.Stream("sim:2") for _ in range(64)]
    assert len(set(streams)) == 32
    assert streams[:32] == streams[32:]
    urgent = [sim.Stream("sim:2", priority=-1) for _ in range(16)]
    assert len(set(urgent)) == 8
    assert not {sim.default_stream("sim:2"), *urgent} & set(streams)
    assert {stream.device for stream in streams} == {torch.device("sim:2")}
    assert torch.Stream("sim:2").device_index == 2


def test_event_belongs_to_the_device_it_was_recorded_on(sim: ModuleType) -> None:
    """An event recorded on one device cannot be recorded on another, but any stream may wait for it."""
    event = sim.Event(enable_timing=True)
    event.record(sim.Stream("sim:1"))
    sim.Stream("sim:2").wait_event(event)
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(sim.Stream("sim:2"))
    later = sim.Event(enable_timing=True)
    later.record(sim.Stream("sim:1"))
    assert event.query()
    assert event.elapsed_time(later) >= 0


# ---------------------------------------------------------------- races


def write(x: Tensor) -> None:
    x.add_(1)


def read(x: Tensor) -> None:
    x.sum()


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (write, read, "aten::sum on stream {} of sim:1 reads what aten::add on the default stream of sim:1 wrote"),
        (read, write, "aten::add on stream {} of sim:1 overwrites what aten::sum on the default stream of sim:1 read"),
        (write, write, "aten::add on stream {} of sim:1 overwrites what aten::add on the default stream of sim:1 wrote"),
    ],
)
def test_unordered_uses_race(
    first: Callable[[Tensor], None], second: Callable[[Tensor], None], found: str, side: torch.Stream, sim: ModuleType
) -> None:
    """Two unordered uses on two streams race if one writes, and the report is one sentence."""
    x = ones(4)
    first(x)
    with sim.stream(side):
        second(x)
    (race,) = stats().races
    assert race == found.format(side.stream_id) + ", and nothing orders the two: an event is missing"
    reset_stats()
    assert stats().races == ()


def test_two_reads_do_not_race(side: torch.Stream, sim: ModuleType) -> None:
    """Two streams may read one tensor in any order."""
    x = ones(4)
    read(x)
    with sim.stream(side):
        read(x)
    assert stats().races == ()


def wait_stream(sim: ModuleType, side: torch.Stream) -> None:
    side.wait_stream(sim.default_stream())


def wait_event(sim: ModuleType, side: torch.Stream) -> None:
    side.wait_event(sim.default_stream().record_event())


def wait_roundabout(sim: ModuleType, side: torch.Stream) -> None:
    between = sim.Stream(OTHER)
    between.wait_stream(sim.default_stream())
    side.wait_stream(between)


def poll(sim: ModuleType, side: torch.Stream) -> None:
    assert sim.default_stream().record_event().query()


ORDERS: list[Callable[[ModuleType, torch.Stream], object]] = [
    wait_stream,
    wait_event,
    wait_roundabout,
    poll,
    lambda sim, side: sim.default_stream().synchronize(),
    lambda sim, side: sim.default_stream().record_event().synchronize(),
    lambda sim, side: sim.synchronize(),
    lambda sim, side: torch.accelerator.synchronize(),
    lambda sim, side: ones(1).item(),
    lambda sim, side: torch.ones(1, device=DEVICE).cpu(),
    lambda sim, side: torch.ones(1, device=DEVICE).nonzero(),
    lambda sim, side: torch.ones(1).to(DEVICE),
]


@pytest.mark.parametrize("order", ORDERS)
def test_ordered_uses_do_not_race(
    order: Callable[[ModuleType, torch.Stream], object], side: torch.Stream, sim: ModuleType
) -> None:
    """If the second stream or the host waits for the first stream, later uses do not race."""
    x = ones(4)
    write(x)
    order(sim, side)
    with sim.stream(side):
        write(x)
    assert stats().races == ()


def no_order(sim: ModuleType, side: torch.Stream) -> None:
    sim.default_stream().record_event()


def wait_backwards(sim: ModuleType, side: torch.Stream) -> None:
    sim.default_stream().wait_stream(side)


def wait_for_early_event(sim: ModuleType, side: torch.Stream) -> None:
    event = sim.default_stream().record_event()
    write(torch.ones(4, device=DEVICE))
    side.wait_event(event)


@pytest.mark.parametrize(
    "order",
    [
        no_order,
        wait_backwards,
        lambda sim, side: side.synchronize(),
        lambda sim, side: sim.synchronize(OTHER),
        lambda sim, side: torch.ones(1).to(DEVICE, non_blocking=True),
    ],
)
def test_other_waits_do_not_order(
    order: Callable[[ModuleType, torch.Stream], object], side: torch.Stream, sim: ModuleType
) -> None:
    """An event without a wait, a wait in the other direction, and a wait for another stream order nothing."""
    x = ones(4)
    write(x)
    order(sim, side)
    with sim.stream(side):
        write(x)
    assert len(stats().races) == 1


def test_event_covers_what_was_before_it(side: torch.Stream, sim: ModuleType) -> None:
    """An event orders the work given to its stream before it was recorded, and no later work."""
    early, late = ones(4), ones(4)
    write(early)
    event = sim.default_stream().record_event()
    write(late)
    side.wait_event(event)
    with sim.stream(side):
        read(early)
        assert stats().races == ()
        read(late)
    assert len(stats().races) == 1


def test_work_follows_the_stream_of_its_tensors_device(side: torch.Stream, sim: ModuleType) -> None:
    """An operator runs on the current stream of its tensors' device, whichever device is current."""
    x = ones(4)
    write(x)
    with sim.stream(side), sim.device(OTHER):
        read(x)
    assert len(stats().races) == 1


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda x: x[:2], lambda x: x[2:]),
        (lambda x: x[:, 1:3], lambda x: x[:, 3:]),
        (lambda x: x[::2], lambda x: x[1::2]),
        (lambda x: x.view(-1)[:7], lambda x: x.view(-1)[7:]),
        (lambda x: x.t()[:3], lambda x: x.t()[3:]),
    ],
)
def test_disjoint_slices_do_not_race(
    mine: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor], side: torch.Stream, sim: ModuleType
) -> None:
    """Parts of one tensor that share no element may be written on two streams; those that share one may not."""
    x = ones(4, 6)
    write(mine(x))
    with sim.stream(side):
        write(theirs(x))
    assert stats().races == ()
    sim.synchronize()
    write(mine(x))
    with sim.stream(side):
        write(x[-1:])
        write(x.view(-1)[-4:])
        write(x[:1, 1:2])
    assert len(stats().races) == 1


def test_small_write_does_not_hide_a_larger_one(side: torch.Stream, sim: ModuleType) -> None:
    """A write is remembered until a later write covers all of it."""
    x = ones(8)
    write(x)
    with sim.stream(side):
        side.wait_stream(sim.default_stream())
        write(x[:2])
        write(x[::3])
    third = sim.Stream()
    third.wait_stream(sim.default_stream())
    with sim.stream(third):
        write(x[5:6])
        assert stats().races == ()
        read(x[6:7])
    assert len(stats().races) == 1


def test_views_are_no_uses(side: torch.Stream, sim: ModuleType) -> None:
    """Making a view reads nothing, on whichever stream is current."""
    x = ones(4, 6)
    write(x)
    with sim.stream(side):
        views = [x[1:], x.t(), x.unfold(0, 2, 1), x.view(-1), x.expand(2, 4, 6), x.detach(), x.diagonal(), *x.split(2)]
        other = torch.empty(0, device=DEVICE).set_(x.untyped_storage(), 0, x.size(), x.stride())
    assert stats().races == ()
    with sim.stream(side):
        read(views[2])
        read(other)
    assert len(stats().races) == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x, y: torch.add(y, 1, out=x),
        lambda x, y: torch._foreach_add_([y, x], 1.0),
        lambda x, y: torch._foreach_mul([y, x], 2.0),
        lambda x, y: torch.cat([y, x]),
        lambda x, y: x[torch.tensor([0])],
        lambda x, y: x.index_put_((torch.tensor([0]),), torch.tensor(3.0)),
        lambda x, y: x.resize_(1000),
        lambda x, y: x.untyped_storage().resize_(1000),
        lambda x, y: x.cpu(),
        lambda x, y: x[0].item(),
        lambda x, y: x.to(torch.float64),
        lambda x, y: x.clone(),
        lambda x, y: copy.deepcopy(x),
        lambda x, y: y.copy_(x),
        lambda x, y: x.copy_(torch.zeros(4)),
        lambda x, y: x.to(OTHER),
        lambda x, y: torch.equal(x, y),
    ],
)
def test_every_kind_of_use_is_seen(use: Callable[[Tensor, Tensor], object], side: torch.Stream, sim: ModuleType) -> None:
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


def test_running_statistics_are_written(side: torch.Stream, sim: ModuleType) -> None:
    """Batch normalisation writes its statistics in training, and reads them in evaluation."""
    norm, x = nn.BatchNorm1d(3).to(DEVICE), ones(4, 3)
    norm.num_batches_tracked = None
    settled(x)
    for training in (False, True):
        sim.synchronize()
        norm.train(training)
        norm(x)
        with sim.stream(side):
            norm(x)
        assert bool(stats().races) == training


def test_host_threads_need_no_event(sim: ModuleType) -> None:
    """A thread may use a tensor after another thread has waited for it and set an event."""
    done = threading.Event()
    x = ones(4)

    def work() -> None:
        with sim.stream(sim.Stream(DEVICE)):
            write(x)
            sim.current_stream().synchronize()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    done.wait()
    write(x)
    thread.join()
    assert stats().races == ()
    assert x.tolist() == [3, 3, 3, 3]


def test_races_are_bounded(side: torch.Stream, sim: ModuleType) -> None:
    """The first twenty sentences are kept, each once."""
    for _ in range(30):
        x = ones(4)
        write(x)
        with sim.stream(sim.Stream()):
            write(x)
            write(x)
    assert len(stats().races) == 20
    assert len(set(stats().races)) == 20


# ---------------------------------------------------------------- freed memory


@pytest.mark.parametrize("writes", [False, True])
def test_freed_while_another_stream_may_use_it(writes: bool, side: torch.Stream, sim: ModuleType) -> None:
    """Memory freed while another stream may use it is a race as soon as its own stream allocates again."""
    x = ones(4)
    with sim.stream(side):
        (write if writes else read)(x)
    del x
    assert stats().races == ()
    torch.empty(1000, device=DEVICE)
    (race,) = stats().races
    assert race == (
        f"16 bytes of the default stream of sim:1 were freed while aten::{'add' if writes else 'sum'} on stream "
        f"{side.stream_id} of sim:1 may still {'write' if writes else 'read'} them: record_stream or an event is missing"
    )


@pytest.mark.parametrize(
    "cure",
    [
        lambda x, main, side: x.record_stream(side),
        lambda x, main, side: main.wait_stream(side),
        lambda x, main, side: side.synchronize(),
    ],
)
def test_freed_in_order(
    cure: Callable[[Tensor, torch.Stream, torch.Stream], object], side: torch.Stream, sim: ModuleType
) -> None:
    """Memory may be freed after record_stream, after a wait for the other stream, or after all work."""
    x = ones(4)
    with sim.stream(side):
        read(x)
    cure(x, sim.default_stream(), side)
    del x
    torch.empty(1000, device=DEVICE)
    assert stats().races == ()


def test_freed_before_the_wait(side: torch.Stream, sim: ModuleType) -> None:
    """A wait between the end of the memory and the next allocation is in time."""
    x = ones(4)
    with sim.stream(side):
        read(x)
    del x
    sim.default_stream().wait_stream(side)
    torch.empty(1000, device=DEVICE)
    assert stats().races == ()


def test_another_stream_allocates(side: torch.Stream, sim: ModuleType) -> None:
    """Freed memory goes back to the stream it was made on: other streams may allocate meanwhile."""
    with sim.stream(side):
        x = torch.ones(4, device=DEVICE)
    sim.default_stream().wait_stream(side)
    read(x)
    del x
    torch.empty(4, device=DEVICE)
    assert stats().races == ()
    with sim.stream(side):
        torch.empty(4, device=DEVICE)
    assert len(stats().races) == 1


def test_fresh_memory_is_poisoned(sim: ModuleType) -> None:
    """Memory holds NaN before the first write."""
    assert poisoned(torch.empty(100, device=DEVICE))
    assert poisoned(torch.empty(100, pin_memory=True))


def test_memory_of_late_copies_is_given_back(side: torch.Stream, sim: ModuleType) -> None:
    """Freed memory that a copy is still to use is no longer live."""
    x, host = ones(1000), torch.empty(1000, pin_memory=True)
    before = stats().live
    host.copy_(x, non_blocking=True)
    del x
    assert stats().live == before - 1
    sim.synchronize()
    assert host.tolist() == [1.0] * 1000


# ---------------------------------------------------------------- late copies


def test_late_copy_to_the_device(side: torch.Stream, sim: ModuleType) -> None:
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
        assert (x * 1).tolist() == [1, 2, 3]


def test_late_copy_to_the_host(sim: ModuleType) -> None:
    """A copy to pinned memory has not happened until the host waits for it."""
    x = ones(3)
    host = x.to("cpu", non_blocking=True)
    assert host.is_pinned()
    assert poisoned(host)
    sim.synchronize(OTHER)
    assert poisoned(host)
    sim.synchronize(DEVICE)
    assert host.tolist() == [1, 1, 1]
    assert stats().races == ()


@pytest.mark.parametrize(
    "wait",
    [
        lambda sim, event: event.synchronize(),
        lambda sim, event: event.query(),
        lambda sim, event: sim.current_stream().query(),
        lambda sim, event: sim.current_stream().synchronize(),
        lambda sim, event: torch.accelerator.synchronize(),
        lambda sim, event: torch.zeros(1, device=DEVICE),
        lambda sim, event: torch.ones(1).to(DEVICE, non_blocking=True),
    ],
)
def test_what_makes_a_late_copy_happen(
    wait: Callable[[ModuleType, torch.Event], object], side: torch.Stream, sim: ModuleType
) -> None:
    """A late copy runs when the host waits, or when its stream gets a kernel or another kind of copy."""
    host = ones(3).to("cpu", non_blocking=True)
    event = sim.current_stream().record_event()
    assert poisoned(host)
    wait(sim, event)
    assert host.tolist() == [1, 1, 1]


def test_stream_that_waits_runs_nothing_until_a_kernel(side: torch.Stream, sim: ModuleType) -> None:
    """A stream that waits for late copies makes them happen with its next kernel, up to the event and no further."""
    source = ones(2)
    awaited = [source.to("cpu", non_blocking=True) for _ in range(2)]
    side.wait_stream(sim.current_stream())
    later = source.to("cpu", non_blocking=True)
    with sim.stream(side):
        other = pinned(1).to(DEVICE, non_blocking=True)
        assert all(poisoned(host) for host in awaited)
        other.add_(1)
    assert [host.tolist() for host in awaited] == [[1, 1], [1, 1]]
    assert poisoned(later)


def test_pinned_memory_overwritten_too_early(sim: ModuleType) -> None:
    """A late copy reads its pinned source when it runs, but pageable memory is read at once."""
    for source, expected in ((pinned(1, 2), [7, 7]), (torch.tensor([1.0, 2.0]), [1, 2])):
        x = source.to(DEVICE, non_blocking=True)
        source.fill_(7)
        assert x.tolist() == expected
    source = pinned(1, 2)
    x = source.to(DEVICE, non_blocking=True)
    sim.synchronize(DEVICE)
    source.fill_(7)
    assert x.tolist() == [1, 2]


def test_pinned_memory_freed_too_early(sim: ModuleType) -> None:
    """Freed pinned memory is not reused until the copies from it are done."""
    copies = [pinned(*range(100)).to(DEVICE, non_blocking=True) for _ in range(10)]
    others = [torch.zeros(100).pin_memory() for _ in range(10)]
    assert all(x.tolist() == list(range(100)) for x in copies)
    assert all(not other.any() for other in others)


def test_scattered_pinned_memory_is_read_at_once(sim: ModuleType) -> None:
    """A pinned source that does not lie together goes through a pageable tensor, which reads it at once."""
    source = pinned(1, 2, 3, 4)
    x, y = source[::2].to(DEVICE, non_blocking=True), torch.empty(3, 4, device=DEVICE)
    y.copy_(source, non_blocking=True)
    source.zero_()
    assert x.tolist() == [1, 3]
    assert y[2].tolist() == [1, 2, 3, 4]


def test_copy_to_pageable_memory_blocks(side: torch.Stream, sim: ModuleType) -> None:
    """A copy to pageable memory is complete when the call returns, and so is all earlier work."""
    x, host = ones(2), torch.zeros(2)
    write(x)
    host.copy_(x, non_blocking=True)
    assert host.tolist() == [2, 2]
    with sim.stream(side):
        write(x)
    assert stats().races == ()


def test_source_freed_before_a_late_copy(side: torch.Stream, sim: ModuleType) -> None:
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


def test_source_freed_on_its_own_stream(sim: ModuleType) -> None:
    """A late copy may outlive its source if both belong to one stream, and to whatever that stream waits for."""
    with sim.device(DEVICE):
        host = (ones(3) * 2).to("cpu", non_blocking=True)
        torch.zeros(3, device=DEVICE)
    moved = (ones(3) * 3).to(OTHER)
    torch.zeros(3, device=OTHER)
    sim.synchronize(DEVICE)
    assert host.tolist() == [2, 2, 2]
    assert moved.tolist() == [3, 3, 3]
    assert stats().races == ()


def test_source_overwritten_before_a_late_copy(side: torch.Stream, sim: ModuleType) -> None:
    """A late copy of memory that another stream overwrites meanwhile brings what it finds, and a race."""
    x = ones(3)
    with sim.stream(side):
        host = x.to("cpu", non_blocking=True)
    x.fill_(5)
    side.synchronize()
    assert host.tolist() == [5, 5, 5]
    assert len(stats().races) == 1


def test_pinned_memory_is_ordered_too(side: torch.Stream, sim: ModuleType) -> None:
    """A copy out of pinned memory that another stream is still to fill is a race, and brings poison."""
    host = torch.empty(3, pin_memory=True)
    host.copy_(ones(3), non_blocking=True)
    with sim.stream(side):
        x = host.to(DEVICE, non_blocking=True)
        assert poisoned(x)
    assert len(stats().races) == 1


# ---------------------------------------------------------------- between devices


def test_copy_between_devices_is_ordered_on_both(sim: ModuleType) -> None:
    """A copy between devices follows the current streams of both, which then follow it."""
    x, y = ones(3), ones(3, device=OTHER)
    with sim.stream(sim.Stream(DEVICE)), sim.stream(sim.Stream(OTHER)):
        x.mul_(2)
        y.mul_(5)
        y.copy_(x)
        x.mul_(2)
        y.add_(1)
        assert (x.tolist(), y.tolist()) == ([4, 4, 4], [3, 3, 3])
    assert stats().late == 1
    assert stats().races == ()


@pytest.mark.parametrize("side_of", [DEVICE, OTHER])
def test_copy_between_devices_knows_no_other_streams(side_of: str, sim: ModuleType) -> None:
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


# ---------------------------------------------------------------- reading


def through_file(x: Tensor) -> Tensor:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    loaded: Tensor = torch.load(buffer, map_location="cpu")
    return loaded


@pytest.mark.parametrize(
    "get",
    [
        Tensor.tolist,
        lambda x: x.cpu().numpy().tolist(),
        lambda x: [x[i].item() for i in range(3)],
        lambda x: through_file(x).tolist(),
        lambda x: copy.deepcopy(x).tolist(),
        lambda x: torch.stack(list(x)).tolist(),
        lambda x: [float(v) for v in repr(x).split("[")[1].split("]")[0].split(",")],
        lambda x: [1, 2, 3] if torch.equal(x, torch.tensor([1.0, 2.0, 3.0]).to(x.device)) else None,
    ],
)
def test_the_host_reads_what_late_copies_bring(get: Callable[[Tensor], list[float]], sim: ModuleType) -> None:
    """Whatever reads a device tensor on the host waits for it first."""
    x = pinned(1, 2, 3).to(DEVICE, non_blocking=True).to(OTHER, non_blocking=True)
    assert get(x) == [1, 2, 3]
    assert stats().races == ()


# ---------------------------------------------------------------- autograd


def test_backward_over_two_streams(side: torch.Stream, sim: ModuleType) -> None:
    """A backward pass follows the streams of the forward pass, and is ordered with the caller's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    twin = copy.deepcopy(model).to(DEVICE)
    for _ in range(3):
        twin.zero_grad()
        side.wait_stream(sim.current_stream())
        inputs = x.to(DEVICE)
        with sim.stream(side):
            hidden = twin[0](inputs)
        sim.current_stream().wait_stream(side)
        hidden.record_stream(sim.current_stream())
        loss = twin[2](twin[1](hidden)).square().sum()
        loss.backward()
        for p, gradient in zip(twin.parameters(), expected, strict=True):
            assert p.grad is not None
            torch.testing.assert_close(p.grad.cpu(), gradient)
        del hidden, loss
    assert stats().races == ()


def test_backward_over_streams_of_several_devices(sim: ModuleType) -> None:
    """A backward pass over copies between devices is ordered, whichever streams those were made on."""
    a = ones(3).requires_grad_()
    b = pinned(1, 2, 3).requires_grad_()
    with sim.stream(sim.Stream(DEVICE)), sim.stream(sim.Stream(OTHER)):
        product = (a * 2).to(OTHER, non_blocking=True) * b.to(OTHER, non_blocking=True)
        total = product.sum()
    total.backward()
    sim.synchronize(DEVICE)
    sim.synchronize(OTHER)
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.tolist(), b.grad.tolist()) == ([2, 4, 6], [2, 2, 2])
    assert stats().races == ()


def test_forgotten_wait_in_a_forward_pass(side: torch.Stream, sim: ModuleType) -> None:
    """A forward pass that forgets a wait races, though its results are right."""
    x = ones(3).requires_grad_()
    with sim.stream(side):
        hidden = x * 2
    (hidden * hidden).sum().backward()
    assert stats().races != ()


# ---------------------------------------------------------------- programs


class Program:
    """A program over six streams of two devices that waits whenever it must, and knows what each tensor holds."""

    def __init__(self, seed: int, forgets: float) -> None:
        self.random = random.Random(seed)
        self.forgets = forgets
        self.streams = [torch.Stream(device) for device in (DEVICE, OTHER) for _ in range(3)]
        self.tensors: list[tuple[Tensor, float, set[torch.Stream]]] = []

    def uses(self, stream: torch.Stream) -> tuple[Tensor, float]:
        """Return a tensor of the stream's device, ready for its use, and the value in it."""
        here = [entry for entry in self.tensors if entry[0].device == stream.device]
        tensor, value, users = self.random.choice(here)
        if self.random.random() >= self.forgets:
            for user in users - {stream}:
                stream.wait_stream(user)
            tensor.record_stream(stream)
        users.add(stream)
        return tensor, value

    def makes(self, tensor: Tensor, value: float, stream: torch.Stream) -> None:
        self.tensors.append((tensor, value, {stream}))
        if len(self.tensors) > 30:
            self.tensors.pop(self.random.randrange(5, 30))

    def step(self) -> None:
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

    def mistakes(self) -> int:
        torch.accelerator.synchronize(DEVICE)
        torch.accelerator.synchronize(OTHER)
        return sum(tensor.tolist() != [value] * 8 for tensor, value, _ in self.tensors)


@pytest.mark.parametrize("seed", range(5))
def test_programs(seed: int, sim: ModuleType) -> None:
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


# ---------------------------------------------------------------- threads


def test_kernels_of_two_streams_run_at_once(sim: ModuleType) -> None:
    """Kernels on two streams of one device run side by side: each waits for the other to have begun."""
    meeting = threading.Barrier(2, timeout=60)
    with torch.library._scoped_library("simdevice_test", "FRAGMENT") as library:
        library.define("meet(Tensor x) -> Tensor")

        def meet(x: Tensor) -> Tensor:
            meeting.wait()
            return x + 1

        library.impl("meet", meet, "CPU")
        results: list[list[float]] = []

        def work() -> None:
            with sim.stream(sim.Stream(DEVICE)):
                results.append(torch.ops.simdevice_test.meet(torch.ones(1, device=DEVICE)).tolist())

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [[2], [2]]
    assert stats().races == ()


def test_many_threads(sim: ModuleType) -> None:
    """Eight threads copy data to two devices and back, each on its own stream, and get their own data."""
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            start.wait()
            here, there = ("sim:0", "sim:3")[:: 1 if index % 2 else -1]
            with sim.stream(sim.Stream(there)), sim.stream(sim.Stream(here)):
                for step in range(50):
                    x = torch.full((100,), float(index * 1000 + step)).pin_memory().to(here, non_blocking=True)
                    y = (x.to(there, non_blocking=True) + 1).to(here)
                    host = (x + y).to("cpu", non_blocking=True)
                    sim.current_stream().record_event().synchronize()
                    assert host.tolist() == [2.0 * (index * 1000 + step) + 1] * 100
        except BaseException as error:
            start.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert stats().races == ()

"""Lanes work on their own streams, ordered with the caller's streams by events.

The simulated devices report every memory access that no event orders, and they delay copies as long as the program
allows. A fixture in conftest.py fails a test if a device reports a race. The tests in this file look at the streams
themselves, or remove one ordering and expect a race.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.backends import _transfer as backend_streams
from parawrap.backends import backend_of
from parawrap.engine import _lane_calls
from parawrap.lanes import _lane_streams as lane_streams
from tests import simdevice
from tests.devices.zoo import SIMS, assert_same_gradients, mlp, parameter_bytes, rows, side_stream

TWICE = ["sim:0", "sim:0"]
MANY = 1 << 14  # this many rows of 5 doubles are too large to be copied to a device without staging


class Where(nn.Module):
    """Records the input's device, its current stream, and the current device for each shard."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        type(self).seen = []  # on the class, because a replica has its own attributes

    def forward(self, x):
        self.seen.append((str(x.device), torch.sim.current_stream(x.device).stream_id, torch.sim.current_device()))
        return x * self.weight


# -- which stream a lane uses


def test_up_to_32_lanes_on_a_device_share_no_stream():
    """Torch hands out 32 streams per device in turn. A lane skips streams in use, and shares one only if all are in use."""
    shelf, device = lane_streams._Shelf(), torch.device("sim:0")
    taken = {shelf.take(device)}
    for lanes in range(2, 33):
        for _ in range(31):  # the next stream from torch is then the first one again
            torch.sim.Stream(device)
        taken.add(shelf.take(device))
        assert len(taken) == lanes
    assert shelf.take(device) in taken


@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:1", "sim:1", "sim:2"]], ids=str)
def test_each_lane_has_its_own_stream(devices):
    """Lanes on one device have different streams, none of them the caller's, and keep them from call to call."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, devices):
        model(rows(11))
        first = sorted(model.seen)
        model.seen.clear()
        model(rows(11))
    assert len({(device, stream) for device, stream, _ in first}) == len(devices)
    assert all(stream != 0 and f"sim:{current}" == device for device, stream, current in first)
    assert sorted(model.seen) == first


def test_with_gradients_lanes_on_the_models_device_use_the_callers_stream():
    """Torch adds up parameter gradients on the caller's stream, and warns about gradients from other streams."""
    model = Where().to("sim:0")
    stream = side_stream()
    with parallel(model, ["sim:0", "sim:0", "sim:1"]), torch.sim.stream(stream):
        model(rows(7)).sum().backward()
    at_home = {each for device, each, _ in model.seen if device == "sim:0"}
    assert at_home == {stream.stream_id}
    assert model.weight.grad is not None


def test_the_caller_keeps_its_device_and_stream():
    """After a call, also a failed one, the caller's current device and streams are unchanged."""
    model = mlp().to("sim:0")
    stream = side_stream("sim:2")
    with torch.no_grad(), parallel(model, SIMS), torch.sim.stream(stream):
        model(rows())
        with pytest.raises(RuntimeError):
            model(rows(width=4))
        assert torch.sim.current_device() == 2
        assert torch.sim.current_stream("sim:2") == stream
        assert [torch.sim.current_stream(device).stream_id for device in ("sim:0", "sim:1", "sim:3")] == [0, 0, 0]


# -- ordering between the caller and the lanes


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:2", "sim:1"]], ids=str)
def test_a_caller_on_a_side_stream(devices, grad):
    """Lanes run after the work that the caller queued before the call; the caller's later work runs after theirs."""
    model = mlp().to("sim:0")
    plain = mlp().to("sim:0")
    plain.load_state_dict(model.state_dict())
    stream = side_stream()
    torch.sim.synchronize("sim:0")
    with parallel(model, devices), torch.sim.stream(stream), torch.set_grad_enabled(grad):
        for _ in range(3):
            x = rows(9).pin_memory().to("sim:0", non_blocking=True)
            for each in (model, plain):
                with torch.no_grad():
                    each[2].bias.add_(x.mean())
            output, expected = model(x), plain(x)
            torch.testing.assert_close(output, expected)
            if grad:
                output.square().sum().backward()
                expected.square().sum().backward()
                assert_same_gradients(model, plain)


def test_training_on_one_stream_and_then_on_another():
    """The caller can change its stream between two training steps without a warning from torch about gradients."""
    model = mlp().to("sim:0")
    plain = mlp().to("sim:0")
    plain.load_state_dict(model.state_dict())
    side = side_stream()
    torch.set_warn_always(True)
    try:
        with parallel(model, SIMS):
            for stream in (torch.sim.default_stream("sim:0"), side, side, torch.sim.default_stream("sim:0")):
                torch.sim.synchronize("sim:0")
                with torch.sim.stream(stream):
                    x = rows(9).to("sim:0")
                    for each in (model, plain):
                        each.zero_grad()
                        each(x).square().sum().backward()
                    assert_same_gradients(model, plain)
    finally:
        torch.set_warn_always(False)


def test_lanes_on_one_device_do_not_share_autocast_casts():
    """Lanes on one device, each on its own stream, cast shared parameters separately."""
    model = nn.Linear(64, 64).to("sim:0")
    x = torch.ones(9, 64, device="sim:0")
    with torch.no_grad(), parallel(model, TWICE), torch.autocast("sim", dtype=torch.bfloat16):
        for _ in range(20):
            assert model(x).dtype is torch.bfloat16
        assert torch.is_autocast_cache_enabled()


def test_successive_blocks_reuse_streams():
    """A block reuses the streams of closed blocks, because torch keeps memory for each stream that was ever used."""
    model = Where().to("sim:0")
    for _ in range(10):
        with torch.no_grad(), parallel(model, TWICE) as p:
            model(rows(9))
            list(p.map([rows(8)] * 4))
    assert len({stream for _, stream, _ in model.seen}) <= 4  # two for compute and two for input copies


def test_callers_in_several_threads_on_separate_streams():
    """Each caller gets its own output."""
    model = mlp().to("sim:0")
    plain = model[2].weight.detach().clone(), mlp()
    plain[1].load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})

    def calls(batches):
        stream = side_stream()
        stream.wait_stream(torch.sim.default_stream("sim:0"))
        with torch.no_grad(), torch.sim.stream(stream):
            for x in batches:
                torch.testing.assert_close(model(x.to("sim:0")).cpu(), plain[1](x))

    with parallel(model, ["sim:0", "sim:0", "sim:1"]), ThreadPoolExecutor(4) as threads:
        # Draw the batches first: numbers that another thread draws during a call count as drawn by the call.
        work = [[rows(13) for _ in range(8)] for _ in range(4)]
        for each in [threads.submit(calls, batches) for batches in work]:
            each.result()


def test_a_result_may_be_used_by_any_thread_on_any_stream():
    """A thread that reads a future's result can use it at once on its own stream."""
    model = mlp().to("sim:0")
    x = rows(MANY)
    expected = model(x.to("sim:0")).cpu()
    sums = []

    def uses(future):
        with torch.no_grad(), torch.sim.stream(side_stream()):
            sums.append((future.result() * 2).cpu())

    with torch.no_grad(), parallel(model, SIMS) as p:
        for future in [p.submit(x) for _ in range(6)]:
            thread = threading.Thread(target=uses, args=[future])
            thread.start()
            thread.join()
    assert len(sums) == 6
    for each in sums:
        torch.testing.assert_close(each, 2 * expected.detach())


def test_a_callback_gets_a_complete_result():
    """In a callback, `result()` waits for the device, because the callback may pass the result to any stream."""
    model = mlp().to("sim:0")
    results, there = [], threading.Event()

    def keep(future):
        results.append(future.result())
        there.set()

    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        x = rows(9)
        p.submit(x).add_done_callback(keep)
        assert there.wait(30)
        torch.testing.assert_close(results[0] + 0, model(x))


def test_futures_work_with_as_completed():
    """Futures from `submit` work with concurrent.futures.as_completed."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        futures = {p.submit(torch.full((5, 5), float(i), dtype=torch.float64)): i for i in range(8)}
        for future in as_completed(futures):
            x = torch.full((5, 5), float(futures[future]), dtype=torch.float64)
            torch.testing.assert_close(future.result(), model(x))


@pytest.mark.parametrize("place", ["cpu", "pinned", "sim:0", "sim:3"])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:1"]], ids=str)
def test_map_of_batches_that_the_source_releases(devices, place):
    """`map` keeps batches alive until a lane has read them, even if the source drops its references."""
    model = mlp().to("sim:0")
    batches = [rows(MANY + i) for i in range(9)]
    expected = [model(batch.to("sim:0")).detach().cpu() for batch in batches]

    def source():
        for batch in batches:
            copy = batch.clone().pin_memory() if place == "pinned" else batch.to(place, copy=True)
            yield copy
            del copy
            if place not in ("cpu", "pinned"):
                torch.zeros(MANY, 5, dtype=torch.float64, device=place)  # would reuse the batch's memory if it were free

    with torch.no_grad(), parallel(model, devices) as p:
        for output, answer in zip(p.map(source()), expected, strict=True):
            torch.testing.assert_close(output.cpu(), answer)


def test_a_parameter_change_between_submitted_calls():
    """A pending call uses either the old or the new parameters. Calls submitted after the change use the new ones."""
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64).to("sim:0")
    x = torch.ones(4, 5, dtype=torch.float64)
    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        model.weight.fill_(1)
        before = [p.submit(x) for _ in range(4)]
        model.weight.fill_(2)
        after = [p.submit(x) for _ in range(4)]
        assert all(future.result().unique().tolist() in ([5.0], [10.0]) for future in before)
        assert all(future.result().unique().tolist() == [10.0] for future in after)


def test_close_waits_for_submitted_calls_whose_result_is_not_read():
    """Submitted calls finish before their memory is reused, even if no thread reads their results."""
    model = mlp().to("sim:0")
    with torch.no_grad():
        with parallel(model, SIMS) as p:
            for _ in range(8):
                p.submit(rows(MANY))
        del model, p
        torch.ones(100, device="sim:0")
    torch.sim.synchronize()


def test_batches_are_spread_over_the_lanes():
    """`map` spreads batches over all lanes, even if the host is done with a batch long before the device is."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        for output in p.map([rows()] * 12, buffersize=1):
            del output
        assert [lane.rows for lane in p.stats().lanes] == [30] * 4


# -- transfers


def test_large_inputs_are_staged():
    """Large pageable inputs are copied through pinned memory, so the host does not wait. Small inputs are not staged."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS):
        model(rows(9))
        torch.sim.synchronize()
        simdevice.reset_stats()
        model(rows(9))
        small = simdevice.stats()
        simdevice.reset_stats()
        model(rows(MANY * 4))
        large = simdevice.stats()
    assert (small.h2d, large.h2d) == (4, 4)
    assert large.late - small.late == 4


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_outputs_are_copied_once_to_their_place(dim):
    """Without a graph, each lane's output is copied once, from device to device, to its place in the joined output."""
    model = nn.Identity()
    x = rows(12, 12).to("sim:2")
    with torch.no_grad(), parallel(model, SIMS, dim=dim, out_dims=dim, output_device="sim:2") as p:
        simdevice.reset_stats()
        y = p(x)
        stats = simdevice.stats()
        assert (stats.d2d, stats.d2h, stats.h2d) == (6, 0, 0)
        assert stats.d2d_bytes == 2 * x.nbytes * 3 // 4
    torch.testing.assert_close(y, x)


def test_small_parameters_are_copied_in_packs():
    """A refresh of many small parameters and buffers takes few copies. Gradients are copied one by one."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)) for _ in range(20))).to("sim:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 5, device="sim:0")

    def copies(work):
        simdevice.reset_stats()
        result = work()
        return simdevice.stats().d2d, result

    with parallel(model, ["sim:0", "sim:1", "sim:2"]):
        built, _ = copies(lambda: model(x))
        for _ in range(2):
            forward, y = copies(lambda: model(x))
            backward, _ = copies(lambda: y.sum().backward())  # noqa: B023
            optimizer.step()
    # Copies per device: rows there and back, and three packs (parameters, float buffers, and counters).
    assert built <= 2 * (2 + 3)
    assert forward <= 2 * (2 + 3)
    assert backward <= 2 * (2 + len(list(model.parameters())))


def test_large_parameters_are_copied_without_packing():
    """A refresh copies every byte once per device, also of tensors larger than 1 MiB, which are not packed."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 3)).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        model(torch.randn(9, 600))
        for parameter in model.parameters():
            parameter.add_(1)
        before = p.stats().copied_bytes
        torch.testing.assert_close(model(torch.ones(9, 600)), computed_plainly(model, torch.ones(9, 600)))
        assert p.stats().copied_bytes - before == 3 * parameter_bytes(model)


def computed_plainly(model, x):
    """Return the plain output, computed from the parameters."""
    x = x.to("sim:0")
    for layer in model:
        x = nn.functional.linear(x, layer.weight, layer.bias)
    return x


def test_no_lane_runs_far_ahead_of_its_device(monkeypatch):
    """A lane starts a submitted call only when the device has finished the call before the previous one."""
    model = mlp().to("sim:0")
    waited = []

    class RecordingEvent:
        def __init__(self, inner):
            self.inner = inner

        def query(self):
            return self.inner.query()

        def synchronize(self):
            waited.append(threading.current_thread().name)
            self.inner.synchronize()

    run_staged = lane_streams.LaneStreams.run_staged

    def record_waits(self, *given):
        value, reached = run_staged(self, *given)
        self._ahead[-1] = [(device, RecordingEvent(event)) for device, event in reached]
        return value, reached

    monkeypatch.setattr(lane_streams.LaneStreams, "run_staged", record_waits)
    with torch.no_grad(), parallel(model, ["sim:1"]) as p:
        futures = [p.submit(rows()) for _ in range(6)]
        for future in futures:
            future.result()
    assert len(waited) >= 4
    assert set(waited) == {"parawrap-lane 0 on sim:1"}


# -- graph capture


def test_a_captured_call_runs_plainly(monkeypatch):
    """While the caller's stream is captured into a graph, calls run plainly, because lanes cannot add to the graph."""
    model = Where().to("sim:0")
    monkeypatch.setattr(backend_of("sim").module, "is_current_stream_capturing", lambda: True, raising=False)
    with torch.no_grad(), parallel(model, SIMS) as p:
        model(rows(8).to("sim:0"))
        assert p.stats().plain == 1
    assert model.seen == [("sim:0", 0, 0)]


# -- every ordering is needed


def test_the_unmodified_engine_has_no_race():
    """The devices report no race for the unmodified engine."""
    work()
    assert simdevice.stats().races == ()


class Gated(nn.Linear):
    """Signals the start of a call, and computes when the test allows it."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.started, self.allowed = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, x):
        self.started.release()
        assert self.allowed.acquire(timeout=30)
        return super().forward(x)


def work():
    """Run a few calls of each kind, on a stream other than the default stream."""
    stream = side_stream()
    with torch.sim.stream(stream):
        stream.wait_stream(torch.sim.default_stream("sim:0"))
        train_and_map(mlp().to("sim:0"))
        release_input_and_output(Gated().to("sim:0"))


def train_and_map(model):
    """Run training steps, one call without gradients, and mapped batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, ["sim:0", "sim:0", "sim:1", "sim:2"]) as p:
        for _ in range(3):
            model(rows(9).to("sim:0")).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(rows(9).to("sim:0")).add_(1)
            for output in p.map(rows(MANY).to("sim:0") for _ in range(12)):
                output.add_(1)


def release_input_and_output(model):
    """Allocate memory after a lane's input, and then its output, is released, and before the lane's next task runs."""
    with torch.no_grad(), parallel(model, ["sim:0"]) as p:
        first, second = (p.submit(rows(MANY).to("sim:0")) for _ in range(2))
        model.allowed.release()
        for _ in range(2):
            assert model.started.acquire(timeout=30)
        torch.zeros(1, device="sim:0")  # the lane has started the second call and released the input of the first
        first.result().add_(1)
        del first
        model.allowed.release()  # the second call now allocates memory
        second.result()


def _nothing(*_, **__):
    return None


@pytest.mark.parametrize("without", ["the caller", "the lanes", "staging", "record_use of inputs", "record_use of outputs"])
def test_removing_an_ordering_causes_a_race(without, monkeypatch, races):
    """If one ordering is removed, the devices report a race."""
    if without == "the caller":  # lanes do not wait for the caller's queued work

        def at_once(self, device, mark):
            return mark.stream if mark.event is None else self._own_on(device)

        monkeypatch.setattr(lane_streams.LaneStreams, "_following", at_once)
    elif without == "the lanes":  # the caller does not wait for the lanes
        monkeypatch.setattr(lane_streams.LaneStreams, "be_waited_for", _nothing)
    elif without == "staging":  # the lane's stream does not wait for the copy of its input
        monkeypatch.setattr(lane_streams.LaneStreams, "_run_beside", stage_without_an_event)
    elif without == "record_use of inputs":
        monkeypatch.setattr(_lane_calls, "record_use", _nothing)
        monkeypatch.setattr(backend_streams, "_record", _nothing)
    else:
        monkeypatch.setattr(lane_streams, "record_use", _nothing)
    work()
    for device in SIMS:
        torch.sim.synchronize(device)  # memory freed after this point causes no race
    simdevice.reset_stats()
    assert races
    races.clear()


def stage_without_an_event(self, stage, mark, streams):
    """Copy a shard on a separate stream, as `LaneStreams` does, without making the lane's stream wait for it."""
    self._copying = self._copying or (self._backend.new_stream(self._device),)
    (copying,) = self._copying
    copying.wait_event(mark.event)
    with self._backend.activate(self._device, copying):
        stage()


# -- prepare


def test_prepared_batches_are_copied_to_their_lane_next_to_earlier_work():
    """`prepare` makes CPU tensors in the lane; the model gets them on its own device."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        source = [[float(index)] * 5 for index in range(6)]
        outputs = list(p.map(source, prepare=lambda batch: torch.tensor([batch], dtype=torch.float64)))
        assert sum(lane.rows for lane in p.stats().lanes) == 6
    assert [output.cpu()[0, 0].item() for output in outputs] == list(range(6))
    assert {device for device, *_ in model.seen} == set(SIMS)
    assert {str(output.device) for output in outputs} == {"sim:0"}


def test_prepare_may_read_what_the_caller_has_just_queued():
    """A tensor that `prepare` finds in a closure is ordered like an input, on any device of the block."""

    def shifted(turn):
        return x + sum(shift.cpu() for shift in shifts)

    model, x = Where().to("sim:0"), rows(4)
    with torch.no_grad(), parallel(model, SIMS) as p:
        for turn in range(1, 4):
            shifts = [torch.full((1,), float(turn), dtype=torch.float64).to(device) * 2 for device in SIMS]
            (output,) = p.map([turn], prepare=shifted)
            torch.testing.assert_close(output.cpu(), x + 2 * turn * len(SIMS))

"""Lanes work on streams of their own: nothing is used before it is there, or after it is gone, and nothing else waits.

The simulated devices tell of every use that no event orders, and copy as late as the program allows; the fixture of this
folder fails any test in which they told of one. Here are the tests that look at streams themselves, and those that take an
ordering away and see that it was needed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.backends import _streams as backend_streams
from parawrap.backends import backend_of
from parawrap.engine import _bring_and_run as bring_and_run
from parawrap.lanes import _streams as lane_streams
from tests import simdevice
from tests.devices.zoo import SIMS, assert_same_gradients, mlp, parameter_bytes, rows, side_stream

TWICE = ["sim:0", "sim:0"]
MANY = 1 << 14  # rows of 5 doubles: more than goes to a device without staging


class Where(nn.Module):
    """Notes the stream, device and thread that each shard is run on."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5, dtype=torch.float64))
        type(self).seen = []  # on the class: a replica has its own attributes

    def forward(self, x):
        self.seen.append((str(x.device), torch.sim.current_stream(x.device).stream_id, torch.sim.current_device()))
        return x * self.weight


# -- which stream


def test_lanes_share_no_stream_though_torch_hands_few_out_in_turn():
    """A stream that a lane has is passed over when torch comes to it again; one is shared only when lanes have them all."""
    shelf, device = lane_streams._Shelf(), torch.device("sim:0")
    taken = {shelf.take(device)}
    for lanes in range(2, 33):
        for _ in range(31):  # torch comes to the first one again
            torch.sim.Stream(device)
        taken.add(shelf.take(device))
        assert len(taken) == lanes
    assert shelf.take(device) in taken


@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:1", "sim:1", "sim:2"]], ids=str)
def test_each_lane_has_a_stream_of_its_own(devices):
    """No two lanes on a device share a stream, none has the caller's, and each keeps its own from call to call."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, devices):
        model(rows(9))  # the lanes run in turns
        first = sorted(model.seen)
        model.seen.clear()
        model(rows(9))  # each lane runs in its own thread
    assert len({(device, stream) for device, stream, _ in first}) == len(devices)
    assert all(stream != 0 and f"sim:{current}" == device for device, stream, current in first)
    assert sorted(model.seen) == first


def test_where_gradients_are_recorded_lanes_at_home_share_the_callers_stream():
    """Gradients of parameters are added up on the caller's stream: torch warns of others."""
    model = Where().to("sim:0")
    stream = side_stream()
    with parallel(model, ["sim:0", "sim:0", "sim:1"]), torch.sim.stream(stream):
        model(rows(6)).sum().backward()
    at_home = {each for device, each, _ in model.seen if device == "sim:0"}
    assert at_home == {stream.stream_id}
    assert model.weight.grad is not None


def test_the_caller_keeps_its_device_and_stream():
    """After a call, and after one that failed, the caller's device and streams are what they were."""
    model = mlp().to("sim:0")
    stream = side_stream("sim:2")
    with torch.no_grad(), parallel(model, SIMS), torch.sim.stream(stream):
        model(rows())
        with pytest.raises(RuntimeError):
            model(rows(width=4))
        assert torch.sim.current_device() == 2
        assert torch.sim.current_stream("sim:2") == stream
        assert [torch.sim.current_stream(device).stream_id for device in ("sim:0", "sim:1", "sim:3")] == [0, 0, 0]


# -- what is ordered


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:2", "sim:1"]], ids=str)
def test_a_caller_on_a_stream_of_its_own(devices, grad):
    """What the caller queued on its stream before the call is seen by all lanes; what it queues after sees their work."""
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
    """The caller may go over to another stream between two steps: torch warns of no gradient."""
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


def test_casts_of_autocast_are_shared_by_no_two_streams():
    """Lanes on one device, each on its own stream, cast the parameters that they share each for itself."""
    model = nn.Linear(64, 64).to("sim:0")
    x = torch.ones(8, 64, device="sim:0")
    with torch.no_grad(), parallel(model, TWICE), torch.autocast("sim", dtype=torch.bfloat16):
        for _ in range(20):
            assert model(x).dtype is torch.bfloat16
        assert torch.is_autocast_cache_enabled()


def test_blocks_in_turn_use_the_same_streams():
    """Torch keeps memory for each stream that it ever worked on: a block takes the streams that another has left."""
    model = Where().to("sim:0")
    for _ in range(10):
        with torch.no_grad(), parallel(model, TWICE) as p:
            model(rows(8))
            list(p.map([rows(8)] * 4))
    assert len({stream for _, stream, _ in model.seen}) <= 4  # two to work on, and two to bring batches over on


def test_threads_on_streams_of_their_own():
    """Callers in several threads, each on its own stream, each get their own answer."""
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
        # Drawn before: numbers that another thread draws during a call count as drawn by the call.
        work = [[rows(12) for _ in range(8)] for _ in range(4)]
        for each in [threads.submit(calls, batches) for batches in work]:
            each.result()


def test_a_result_may_be_used_by_any_thread_on_any_stream():
    """Whoever asks a future for its result may use it on its own stream at once."""
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


def test_a_callback_gets_a_result_that_is_there():
    """A callback asks in the lane's thread, for somebody on an unknown stream: the result is waited for."""
    model = mlp().to("sim:0")
    results, there = [], threading.Event()

    def keep(future):
        results.append(future.result())
        there.set()

    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        x = rows()
        p.submit(x).add_done_callback(keep)
        assert there.wait(30)
        torch.testing.assert_close(results[0] + 0, model(x))


def test_futures_as_they_complete():
    """Futures work with what the standard library has for them."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        futures = {p.submit(torch.full((2, 5), float(i), dtype=torch.float64)): i for i in range(8)}
        for future in as_completed(futures):
            x = torch.full((2, 5), float(futures[future]), dtype=torch.float64)
            torch.testing.assert_close(future.result(), model(x))


@pytest.mark.parametrize("place", ["cpu", "pinned", "sim:0", "sim:3"])
@pytest.mark.parametrize("devices", [SIMS, TWICE, ["sim:1"]], ids=str)
def test_map_of_batches_that_are_let_go_of(devices, place):
    """Batches that nobody else keeps are whole when a lane comes to them, wherever they lie."""
    model = mlp().to("sim:0")
    batches = [rows(MANY + i) for i in range(9)]
    expected = [model(batch.to("sim:0")).detach().cpu() for batch in batches]

    def source():
        for batch in batches:
            copy = batch.clone().pin_memory() if place == "pinned" else batch.to(place, copy=True)
            yield copy
            del copy
            if place not in ("cpu", "pinned"):
                torch.zeros(MANY, 5, dtype=torch.float64, device=place)  # what was freed may be handed out here

    with torch.no_grad(), parallel(model, devices) as p:
        for output, answer in zip(p.map(source()), expected, strict=True):
            torch.testing.assert_close(output.cpu(), answer)


def test_a_change_between_mapped_batches():
    """Parameters changed while batches are under way change for each of these wholly or not at all; later ones see them."""
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64).to("sim:0")
    x = torch.ones(4, 5, dtype=torch.float64)
    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        model.weight.fill_(1)
        before = [p.submit(x) for _ in range(4)]
        model.weight.fill_(2)
        after = [p.submit(x) for _ in range(4)]
        assert all(future.result().unique().tolist() in ([5.0], [10.0]) for future in before)
        assert all(future.result().unique().tolist() == [10.0] for future in after)


def test_close_comes_after_what_nobody_asked_for():
    """What was submitted and never asked for is over before memory that it used is handed out again."""
    model = mlp().to("sim:0")
    with torch.no_grad():
        with parallel(model, SIMS) as p:
            for _ in range(8):
                p.submit(rows(MANY))
        del model, p
        torch.ones(100, device="sim:0")
    torch.sim.synchronize()


def test_batches_are_spread_over_the_lanes():
    """A host that is done with a batch long before its device is gives the next one to another lane."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        for output in p.map([rows()] * 12, buffersize=1):
            del output
        assert [lane.rows for lane in p.stats().lanes] == [30] * 4


# -- transfers


def test_large_inputs_are_staged():
    """Large pageable inputs go by pinned memory, so their copies keep nobody waiting; small ones go directly."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS):
        model(rows(8))
        torch.sim.synchronize()
        simdevice.reset_stats()
        model(rows(8))
        small = simdevice.stats()
        simdevice.reset_stats()
        model(rows(MANY * 4))
        large = simdevice.stats()
    assert (small.h2d, large.h2d) == (4, 4)
    assert large.late - small.late == 4


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_outputs_are_written_straight_into_one(dim):
    """Without a graph each part is copied once, to its place on the output device, and never by the host."""
    model = nn.Identity()
    x = rows(12, 12).to("sim:2")
    with torch.no_grad(), parallel(model, SIMS, dim=dim, output_device="sim:2") as p:
        simdevice.reset_stats()
        y = p(x)
        stats = simdevice.stats()
        assert (stats.d2d, stats.d2h, stats.h2d) == (6, 0, 0)
        assert stats.d2d_bytes == 2 * x.nbytes * 3 // 4
    torch.testing.assert_close(y, x)


def test_many_small_parameters_travel_together():
    """However many parameters and buffers, a refresh is few copies; each gradient comes home by itself."""
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
    # For each of two devices: rows there and back, and the packs: parameters, float buffers and counters.
    assert built <= 2 * (2 + 3)
    assert forward <= 2 * (2 + 3)
    assert backward <= 2 * (2 + len(list(model.parameters())))


def test_large_parameters_travel_alone():
    """A tensor of more than a mebibyte is copied from where it lies, and every byte once a device."""
    model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600), nn.Linear(600, 3)).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        model(torch.randn(8, 600))
        for parameter in model.parameters():
            parameter.add_(1)
        before = p.stats().copied_bytes
        torch.testing.assert_close(model(torch.ones(8, 600)), parallel_free(model, torch.ones(8, 600)))
        assert p.stats().copied_bytes - before == 3 * parameter_bytes(model)


def parallel_free(model, x):
    """The plain output, computed from the parameters."""
    x = x.to("sim:0")
    for layer in model:
        x = nn.functional.linear(x, layer.weight, layer.bias)
    return x


def test_no_lane_runs_far_ahead_of_its_device(monkeypatch):
    """A lane begins submitted work once the work before the last one is done: what is queued stays bounded."""
    model = mlp().to("sim:0")
    waited = []

    class Noted:
        def __init__(self, inner):
            self.inner = inner

        def query(self):
            return self.inner.query()

        def synchronize(self):
            waited.append(threading.current_thread().name)
            self.inner.synchronize()

    run_staged = lane_streams.LaneStreams.run_staged

    def noting(self, *given):
        value, reached = run_staged(self, *given)
        self._ahead[-1] = [(device, Noted(event)) for device, event in reached]
        return value, reached

    monkeypatch.setattr(lane_streams.LaneStreams, "run_staged", noting)
    with torch.no_grad(), parallel(model, ["sim:1"]) as p:
        futures = [p.submit(rows()) for _ in range(6)]
        for future in futures:
            future.result()
    assert len(waited) >= 4
    assert set(waited) == {"parawrap-lane 0 on sim:1"}


# -- captures


def test_a_call_that_is_captured_runs_plainly(monkeypatch):
    """While the caller's stream is captured into a graph, which lanes cannot add to, the call is the plain one."""
    model = Where().to("sim:0")
    monkeypatch.setattr(backend_of("sim").module, "is_current_stream_capturing", lambda: True, raising=False)
    with torch.no_grad(), parallel(model, SIMS) as p:
        model(rows(8).to("sim:0"))
        assert p.stats().plain == 1
    assert model.seen == [("sim:0", 0, 0)]


# -- what is needed


def test_all_of_them_are_kept():
    """Nothing is told of the engine as it is."""
    work()
    assert simdevice.stats().races == ()


class Gated(nn.Linear):
    """Says that a call has begun, and computes when it is let."""

    def __init__(self):
        super().__init__(5, 3, dtype=torch.float64)
        self.begun, self.let = threading.Semaphore(0), threading.Semaphore(0)

    def forward(self, x):
        self.begun.release()
        assert self.let.acquire(timeout=30)
        return super().forward(x)


def work():
    """A few calls of each kind, on a stream that is not the default one."""
    stream = side_stream()
    with torch.sim.stream(stream):
        stream.wait_stream(torch.sim.default_stream("sim:0"))
        train_and_map(mlp().to("sim:0"))
        let_go_of_input_and_output(Gated().to("sim:0"))


def train_and_map(model):
    """Steps of training, a call, and batches on every lane."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, ["sim:0", "sim:0", "sim:1", "sim:2"]) as p:
        for _ in range(3):
            model(rows(9).to("sim:0")).square().sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(rows(9).to("sim:0")).add_(1)
            for output in p.map(rows(MANY).to("sim:0") for _ in range(12)):
                output.add_(1)


def let_go_of_input_and_output(model):
    """Memory is asked for after a lane's input, and then its output, was let go of, and before the lane's next work."""
    with torch.no_grad(), parallel(model, ["sim:0"]) as p:
        first, second = (p.submit(rows(MANY).to("sim:0")) for _ in range(2))
        model.let.release()
        for _ in range(2):
            assert model.begun.acquire(timeout=30)
        torch.zeros(1, device="sim:0")  # the lane has come to the second, and let go of the first's input
        first.result().add_(1)
        del first
        model.let.release()  # the second takes its memory now
        second.result()


def _nothing(*_, **__):
    return None


@pytest.mark.parametrize("without", ["the caller", "the lanes", "staging", "record_use of inputs", "record_use of outputs"])
def test_each_of_them_is_needed(without, monkeypatch, races):
    """With one ordering taken away the devices tell of a race."""
    if without == "the caller":  # lanes do not wait for what the caller has queued

        def at_once(self, device, mark):
            return mark.stream if mark.event is None else self._own_on(device)

        monkeypatch.setattr(lane_streams.LaneStreams, "_following", at_once)
    elif without == "the lanes":  # the caller does not wait for the lanes
        monkeypatch.setattr(lane_streams.LaneStreams, "be_waited_for", _nothing)
    elif without == "staging":  # the lane's stream does not wait for what was brought over beside it
        monkeypatch.setattr(lane_streams.LaneStreams, "_run_beside", beside_without_an_event)
    elif without == "record_use of inputs":
        monkeypatch.setattr(bring_and_run, "record_use", _nothing)
        monkeypatch.setattr(backend_streams, "_record", _nothing)
    else:
        monkeypatch.setattr(lane_streams, "record_use", _nothing)
    work()
    for device in SIMS:
        torch.sim.synchronize(device)  # what is freed from here on is no race
    simdevice.reset_stats()
    assert races
    races.clear()


def beside_without_an_event(self, stage, mark, streams):
    """What brings a shard over on a stream that nobody waits for."""
    self._copying = self._copying or (self._backend.new_stream(self._device),)
    (copying,) = self._copying
    copying.wait_event(mark.event)
    with self._backend.activate(self._device, copying):
        stage()

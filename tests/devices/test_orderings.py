"""Whoever calls, from whichever thread and stream, after whatever change: the answer is the module's as it is then.

Each test is one way in which that was once not so. The fixture of this folder fails any test in which the simulated devices
told of a race; where a test asserts nothing else, that is what it is about.
"""

from __future__ import annotations

import copy
import gc
import threading
from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap import DataParallel, TupleParallel, parallel, tuple_fn
from parawrap.backends import backend_of, bring
from parawrap.lanes import LanePool, Modes
from parawrap.lanes import _streams as lane_streams
from parawrap.replicas import _parcel
from tests import simdevice
from tests.devices.zoo import SIMS, Average, Holder, Masked, mlp, rows, side_stream

PATIENCE_S = 30  # how long a thread waits for one that never comes


def settle():
    """Wait for all devices, so that only what comes after is looked at."""
    for device in SIMS:
        torch.sim.synchronize(device)


def in_a_thread(work):
    """Run `work` in a new thread, to its end; what it raised."""
    raised = []

    def noting():
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=noting)
    thread.start()
    thread.join()
    assert raised == []


def called(p, x):
    """The answer of a call that is cut."""
    return p(x)


def submitted(p, x):
    """The answer of a call that one lane runs whole."""
    return p.submit(x).result()


WAYS = pytest.mark.parametrize("ask", [called, submitted])
PLACES = pytest.mark.parametrize("devices", [["sim:1"], ["sim:2", "sim:1"], ["sim:0", "sim:1"]], ids=str)


# ---------------------------------------------------------------- changes that lanes follow


def learning_turned_off(model):
    model.requires_grad_(False)


def learning_toggled_in_part(model):
    model.weight.requires_grad_(False)
    model.weight.requires_grad_(True)
    model.bias.requires_grad_(False)


def another_shape(model):
    for name, shape in (("weight", (3, 4)), ("bias", (3,))):
        getattr(model, name).data = torch.randn(shape, device=model.weight.device)


def halved(model):
    model.half()


def doubled(model):
    model.double()


@WAYS
@PLACES
@pytest.mark.parametrize(
    "change",
    [learning_turned_off, learning_toggled_in_part, another_shape, halved, doubled],
    ids=lambda each: each.__name__,
)
def test_parameters_that_took_another_form_are_followed(change, devices, ask):
    """Without gradients, lanes see parameters take another form, and what is written into them after that."""
    model = nn.Linear(4, 2).to("sim:0")

    def assert_followed():
        x = torch.randn(6, 4).to(model.weight)
        for _ in devices:
            torch.testing.assert_close(ask(p, x), nn.functional.linear(x, model.weight, model.bias))

    with torch.no_grad(), parallel(model, devices) as p:
        assert_followed()
        change(model)
        assert_followed()
        model.weight.fill_(3)
        assert_followed()
        model.bias.fill_(5)
        assert_followed()


@WAYS
def test_data_that_comes_back_to_its_address(ask):
    """Assigning ``.data`` twice between two calls is seen, also where the second lies at the address of the first."""
    model = nn.Linear(4, 2, bias=False)
    memory = bytearray(model.weight.nbytes)
    x = torch.ones(6, 4)

    def assign(value):
        model.weight.data = torch.empty(2, 4)
        torch.frombuffer(memory, dtype=torch.float32).fill_(value)
        model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(2, 4)

    with torch.no_grad(), parallel(model, ["sim:1"]) as p:
        for value in range(8):
            assign(value)
            assert ask(p, x).unique().tolist() == [4 * value]


@WAYS
def test_parameter_replaced_and_then_the_model_moved(ask):
    """A module whose parameters were replaced, and which was moved after that, is found where it now lies."""
    model = nn.Linear(4, 4).to("sim:0")
    x = torch.randn(6, 4)
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        ask(p, x)
        model.weight = nn.Parameter(model.weight + 1)
        ask(p, x)
        model.to("sim:3")
        y = ask(p, x)
        assert y.device == torch.device("sim:3")
        torch.testing.assert_close(y, nn.functional.linear(x.to("sim:3"), model.weight, model.bias))


# ---------------------------------------------------------------- a refresh, and calls on other streams


def streamed(work, device="sim:0"):
    """Do `work` on a stream of that device that is used for nothing else."""
    with torch.sim.stream(side_stream(device)):
        return work()


@pytest.mark.parametrize("first", [True, False], ids=["first with gradients", "first without"])
@pytest.mark.parametrize("second", [True, False], ids=["second with gradients", "second without"])
@pytest.mark.parametrize("devices", [["sim:0", "sim:0"], ["sim:0", "sim:1"], ["sim:1", "sim:2"]], ids=str)
def test_a_call_on_another_stream_than_the_refresh(devices, first, second):
    """Replicas and buffers that a call on one stream has made are there for the next call, on another stream."""
    model = Masked().to("sim:0").eval()
    x = rows(6).to("sim:0")
    expected = copy.deepcopy(model)(x)
    settle()
    with parallel(model, devices):
        for grad in (first, second):
            with torch.set_grad_enabled(grad):
                y = streamed(lambda: model(x))
    settle()
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("second", ["call", "submit", "train", "another face"])
@pytest.mark.parametrize("first", ["call", "submit", "train", "another face"])
def test_callers_in_turn_from_threads_and_streams(first, second):
    """What one thread's call on streams of its own has refreshed is there for the calls of other threads, in all ways."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)).to("sim:0")
    x = torch.randn(8, 6)
    expected = copy.deepcopy(model)(x.to("sim:0")).cpu()
    settle()

    def ask(way):
        with torch.set_grad_enabled(way == "train"):
            ways = {"submit": lambda: p.submit(x).result(), "another face": lambda: other(x)}
            torch.testing.assert_close(ways.get(way, lambda: model(x))().cpu(), expected)

    def ask_on_other_streams(way):
        with ExitStack() as streams:
            for device in SIMS:
                streams.enter_context(torch.sim.stream(side_stream(device)))
            ask(way)

    other = DataParallel(model, [0, 2, 1])
    with parallel(model, ["sim:2", "sim:1"]) as p:
        in_a_thread(lambda: ask_on_other_streams(first))
        in_a_thread(lambda: ask(second))
        in_a_thread(lambda: ask(second))
    other.close()


def test_statistics_of_lanes_away_from_home():
    """Batch norm in training, submitted without gradients to lanes elsewhere, brings its statistics home in order."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("sim:0")
    with torch.no_grad(), parallel(model, ["sim:2", "sim:1"]) as p:
        for future in [p.submit(torch.randn(6, 8)) for _ in range(12)]:
            assert future.result().isfinite().all()
    assert model[1].running_mean.isfinite().all()
    assert int(model[1].num_batches_tracked) > 0


def test_a_refresh_that_overtakes_work_on_its_way(monkeypatch):
    """Work that was given before a refresh and begins after it writes statistics home once the refresh has read them."""
    on_its_way, refreshed = threading.Event(), threading.Event()
    begin = lane_streams.LaneFuture.set_running_or_notify_cancel

    def begin_the_first_late(future):
        if not on_its_way.is_set():
            on_its_way.set()
            assert refreshed.wait(PATIENCE_S)
        return begin(future)

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("sim:0")
    x = torch.randn(6, 8)
    with torch.no_grad(), parallel(model, ["sim:2", "sim:1"]) as p:
        p(x)
        monkeypatch.setattr(lane_streams.LaneFuture, "set_running_or_notify_cancel", begin_the_first_late)
        first = p.submit(x)  # to lane 0, whose statistics go home
        assert on_its_way.wait(PATIENCE_S)
        p.submit(x).result()  # by lane 1, whose statistics are outdated by that
        last = p.submit(x)  # after a refresh
        refreshed.set()
        for future in (first, last):
            assert future.result().isfinite().all()


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_work_with_gradients_and_then_without_in_one_lane(device):
    """What a lane is given first is done first, also where one works on the caller's stream and the next on the lane's."""
    both_given = threading.Event()

    class Waiting(Average):
        def forward(self, x):
            if torch.is_grad_enabled():
                assert both_given.wait(PATIENCE_S)  # its work is begun only after the other one's was given
            return super().forward(x)

    model = Waiting(in_place=True).to("sim:0")
    plain = Average(in_place=True).to("sim:0")
    plain.load_state_dict(model.state_dict())
    x = rows(6).to("sim:0")
    expected = [plain(x), plain(x)]
    settle()
    with parallel(model, [device]) as p:
        futures = [p.submit(x)]
        with torch.no_grad():
            futures.append(p.submit(x))
        both_given.set()
        torch.testing.assert_close([future.result() for future in futures], expected)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("make", [mlp, lambda: Masked().eval(), Holder], ids=["parameters", "buffers", "attributes"])
@pytest.mark.parametrize("devices", [["sim:1"], ["sim:0", "sim:0"], ["sim:0", "sim:1"]], ids=str)
def test_memory_of_replicas_that_were_made_on_another_stream(make, devices):
    """What a stream gave for replicas is handed out there again only after the other streams' work with them."""
    model = make().to("sim:0")
    x = rows(6).to("sim:0")
    settle()
    device = devices[-1]
    stream = side_stream(device)
    with torch.no_grad():
        with parallel(model, devices):
            with torch.sim.stream(stream):
                model(x)
            model(x)
        sizes = [each.shape for each in (*model.parameters(), *model.buffers())]
        with torch.sim.stream(stream):  # as large as what was let go of, and written at once
            kept = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes * 4]
    settle()
    assert all(each.count_nonzero() == 0 for each in kept)


@pytest.mark.parametrize("close_after", ["a call", "nothing"])
def test_a_block_closed_during_a_call(close_after):
    """A call that another thread's end of the block overtakes works with what it has begun with, until it is done."""
    inside, closed, armed = threading.Event(), threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x):
            if armed.is_set():
                inside.set()
                assert closed.wait(PATIENCE_S)
            return super().forward(x)

    model = Slow(64, 64).to("sim:0")
    x = torch.randn(6, 64, device="sim:0")
    outputs = []

    def call():
        with torch.no_grad():
            outputs.append(model(x))

    with ExitStack() as block:
        block.enter_context(parallel(model, ["sim:1"]))
        if close_after == "a call":
            call()
        settle()
        armed.set()
        thread = threading.Thread(target=call)
        thread.start()
        assert inside.wait(PATIENCE_S)
    closed.set()
    thread.join()
    settle()
    torch.testing.assert_close(outputs[-1], nn.functional.linear(x, model.weight, model.bias))


@pytest.mark.parametrize("width", [64, 256], ids=["packed", "alone"])
def test_a_refresh_needs_little_memory_beside_the_copies(width, monkeypatch):
    """However large the module, a refresh takes on a lane's device no more than two packs beside the replica itself."""
    monkeypatch.setattr(_parcel, "_SMALL", 32 << 10)
    monkeypatch.setattr(_parcel, "_MOST", most := 64 << 10)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24))).to("sim:0")
    taken = []

    def measured(transfer):
        def measuring(*given):
            result = transfer(*given)
            taken.append(simdevice.stats().live_bytes_by_device[1])
            return result

        return measuring

    for name in ("bring", "bring_into"):
        monkeypatch.setattr(_parcel, name, measured(getattr(_parcel, name)))
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]):
        model(torch.ones(4, width))
        settle()
        between = simdevice.stats().live_bytes_by_device[1]
        for parameter in model.parameters():
            parameter.add_(0)
        taken.clear()
        model(torch.ones(4, width))
    assert len(taken) > 2
    assert max(taken) - between <= 2 * most


def test_gradients_brought_home_are_changed_one_by_one():
    """Gradients that came home together have each a version of its own: writing one leaves a graph of another whole."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to("sim:0")
    with parallel(model, ["sim:1"]):
        model(torch.randn(6, 4)).sum().backward()
    first, second, *_ = [parameter.grad for parameter in model.parameters()]
    weight = torch.ones(4, 4, device="sim:0", requires_grad=True)
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    torch.testing.assert_close(weight.grad, first)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("devices", [["sim:1", "sim:2"], ["sim:0", "sim:1"]], ids=str)
@pytest.mark.parametrize("where", ["cpu", "sim:0"])
def test_submitted_work_for_a_third_device(where, devices):
    """A result that goes to a device which is neither home nor a lane's is there for the stream of whoever asks."""
    model = mlp().to("sim:0")
    x = rows(6).to(where)
    expected = model(x.to("sim:0")).detach().cpu()
    settle()
    with torch.no_grad(), parallel(model, devices, output_device="sim:3") as p:
        for _ in range(4):
            y = streamed(lambda: (p.submit(x).result() * 2).cpu(), "sim:3")
            torch.testing.assert_close(y, 2 * expected)


def test_a_callback_may_ask_for_what_other_lanes_did():
    """A callback asks in one lane's thread for the results of all: each is waited for, and there for any stream."""
    results, first_done, there = [], threading.Event(), threading.Event()

    class Following(nn.Linear):
        def forward(self, x):
            if x.device == torch.device("sim:2"):
                assert first_done.wait(PATIENCE_S)
            return super().forward(x)

    model = Following(5, 3, dtype=torch.float64).to("sim:0")
    x = rows(6).to("sim:0")
    settle()

    def collect(_):
        results.extend(future.result() for future in futures)
        there.set()

    with torch.no_grad(), parallel(model, ["sim:1", "sim:2"]) as p:
        futures = [p.submit(x), p.submit(x)]
        futures[1].add_done_callback(collect)
        futures[0].add_done_callback(lambda _: first_done.set())
        assert there.wait(PATIENCE_S)
        sums = streamed(lambda: [result + 0 for result in results])
    settle()
    for each in sums:
        torch.testing.assert_close(each, nn.functional.linear(x, model.weight, model.bias))


# ---------------------------------------------------------------- packed sequences


class Packed(nn.Linear):
    """A linear layer on the data of a packed sequence, with the device's own indices in use."""

    def forward(self, packed):
        orders = packed.sorted_indices + 0, packed.unsorted_indices + 0
        return PackedSequence(super().forward(packed.data), packed.batch_sizes, *orders)


def sequences(device):
    """Three sequences that are not sorted."""
    return pack_sequence([torch.ones(k, 3, device=device) for k in (1, 3, 2)], enforce_sorted=False)


def assert_equals_plain(packed, model):
    data = torch.ones(6, 3, device=packed.data.device)
    torch.testing.assert_close(packed.data, nn.functional.linear(data, model.weight, model.bias))
    assert packed.sorted_indices.tolist() == [1, 2, 0]


def test_packed_sequences_submitted_and_let_go_of():
    """A packed sequence that nobody else keeps is whole when a lane comes to it, its indices included."""
    model = Packed(3, 3).to("sim:0")
    settle()
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        futures = []
        for _ in range(6):
            futures.append(p.submit(sequences("sim:0")))
            torch.zeros(18, device="sim:0")  # what was freed may be handed out here
            torch.zeros(3, dtype=torch.int64, device="sim:0")
        results = [future.result() for future in futures]
        settle()
        for result in results:
            assert_equals_plain(result, model)


@WAYS
def test_packed_sequence_on_a_third_device(ask):
    """A packed sequence on a device that is neither home nor a lane's is brought over after what was queued there."""
    model = Packed(3, 3).to("sim:0")
    settle()
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        for _ in range(3):
            result = streamed(lambda: ask(p, sequences("sim:3")), "sim:3")
            assert_equals_plain(result, model)


@WAYS
@pytest.mark.parametrize("devices", [["sim:0"], ["sim:0", "sim:1"], ["sim:1"]], ids=str)
def test_packed_sequence_of_one_row_on_the_cpu(devices, ask):
    """A packed sequence that cannot be cut is brought to the lane that runs it."""

    class Summed(nn.Linear):
        def forward(self, packed):
            return super().forward(packed.data).sum(0, keepdim=True)

    model = Summed(3, 2).to("sim:0")
    x = torch.randn(4, 3)
    with torch.no_grad(), parallel(model, devices) as p:
        y = ask(p, pack_sequence([x]))
        torch.testing.assert_close(y, nn.functional.linear(x.to("sim:0"), model.weight, model.bias).sum(0, keepdim=True))


# ---------------------------------------------------------------- lanes on the CPU


def late_on_a_device(value=3.0):
    """A tensor on the device that its stream has yet to copy there."""
    return torch.full((8, 5), value, dtype=torch.float64).pin_memory().to("sim:0", non_blocking=True)


@WAYS
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_lanes_on_the_cpu_and_a_device_that_is_behind(home, ask):
    """A lane on the CPU reads what the caller's stream makes on a device only after it was made."""
    model = nn.Linear(5, 5, dtype=torch.float64)
    expected = model(torch.full((8, 5), 3.0, dtype=torch.float64)).detach()
    model.to(home)
    settle()
    with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
        for _ in range(3):
            y = streamed(lambda: ask(p, late_on_a_device()))
            settle()
            torch.testing.assert_close(y.cpu(), expected)


def test_tuple_fn_on_the_cpu_with_parts_on_a_device():
    """tuple_fn(parallel=True) on CPU lanes reads each part after what the caller has queued for it."""
    increment = tuple_fn(lambda part: part + 1, parallel=True, devices=["cpu", "cpu"])
    settle()
    for _ in range(3):
        outputs = streamed(lambda: increment((late_on_a_device(1), late_on_a_device(2))))
        assert [output.device.type for output in outputs] == ["cpu", "cpu"]
        assert [output.unique().tolist() for output in outputs] == [[2.0], [3.0]]


def test_tuple_parallel_on_the_cpu_with_parts_on_a_device():
    """TupleParallel on CPU lanes reads each part after what the caller has queued for it."""
    model = nn.Linear(5, 5, dtype=torch.float64)
    parts = [torch.full((8, 5), value, dtype=torch.float64) for value in (1.0, 2.0)]
    expected = [model(part).detach() for part in parts]
    wrapped = TupleParallel(model, ["cpu", "cpu"])
    settle()
    with torch.no_grad():
        for _ in range(3):
            outputs = streamed(lambda: wrapped((late_on_a_device(1), late_on_a_device(2))))
            torch.testing.assert_close([output.cpu() for output in outputs], expected)
    wrapped.close()


# ---------------------------------------------------------------- pools that nobody closed


@pytest.fixture
def collected_where_streams_are_made(monkeypatch):
    """Collect garbage when a lane makes its stream, once the test says so, and at no other time."""
    backend = type(backend_of("sim"))
    make = backend.new_stream
    let_go = threading.Event()

    def collecting(self, device):
        assert let_go.wait(PATIENCE_S)
        gc.collect()
        return make(self, device)

    monkeypatch.setattr(lane_streams, "_shelf", lane_streams._Shelf())  # without streams that others have left
    monkeypatch.setattr(backend, "new_stream", collecting)
    gc.disable()
    yield let_go
    let_go.set()
    gc.enable()


def pool_on(device):
    """A pool of one lane that only the collector can let go of."""
    pool = LanePool([torch.device(device)])
    pool.itself = pool
    return pool


def ones_on(device):
    return lambda: torch.ones(1, device=device)


def test_a_pool_collected_while_another_takes_a_stream(collected_where_streams_are_made):
    """A pool may be collected, and give back its streams, at the moment in which another pool's lane takes one."""
    collected_where_streams_are_made.set()
    left = pool_on("sim:0")
    with torch.no_grad():
        left.submit(left.lanes[0], ones_on("sim:0"), Modes.capture("sim")).result(PATIENCE_S)
        del left
        other = LanePool([torch.device("sim:1")])
        future = other.submit(other.lanes[0], ones_on("sim:1"), Modes.capture("sim"))
        assert future.result(PATIENCE_S).item() == 1
    other.close()
    assert len(lane_streams._shelf._streams[torch.device("sim:0")]) == 1


def test_a_pool_collected_while_its_own_lane_takes_a_stream(collected_where_streams_are_made):
    """A pool that nobody has any more may be collected by its own lane, which finishes what it was given."""
    pool = pool_on("sim:0")
    with torch.no_grad():
        future = pool.submit(pool.lanes[0], ones_on("sim:0"), Modes.capture("sim"))
        del pool
        collected_where_streams_are_made.set()
        assert future.result(PATIENCE_S).item() == 1


# ---------------------------------------------------------------- large inputs of any layout


def channels_last():
    return torch.randn(4, 3, 64, 64).contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda: torch.randn(1024, 64),
    "channels_last": channels_last,
    "transposed": lambda: torch.randn(64, 1024).t(),
    "permuted": lambda: torch.randn(16, 64, 64).permute(2, 0, 1),
    "columns": lambda: torch.randn(1024, 128)[:, :64],
    "every other row": lambda: torch.randn(2048, 64)[::2],
    "expanded": lambda: torch.randn(1, 64).expand(1024, 64),
}
DENSE = ("contiguous", "channels_last", "transposed", "permuted")


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_inputs_of_any_layout_are_staged(layout, pinned):
    """A large input of any layout is copied once, while the host goes on; a dense one keeps its strides, as by ``to``."""
    tensor = LAYOUTS[layout]()
    if pinned:  # not pin_memory, so that the layout stays what it is
        whole = torch.empty(tensor.untyped_storage().nbytes() // 4).pin_memory()
        tensor = whole.as_strided(tensor.shape, tensor.stride()).copy_(tensor) if layout != "expanded" else tensor
    simdevice.reset_stats()
    brought = bring(tensor, torch.device("sim:1"))
    stats = simdevice.stats()
    assert (stats.h2d, stats.h2d_bytes, stats.late) == (1, tensor.nbytes, 1)
    torch.testing.assert_close(brought.cpu(), tensor, rtol=0, atol=0)
    if layout in DENSE:
        assert brought.stride() == tensor.to("sim:1").stride() == tensor.stride()


@WAYS
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_inputs_of_any_layout_arrive_right(layout, ask):
    """Shards of a large input of any layout hold what the input holds."""
    x = torch.cat([LAYOUTS[layout]()] * 4) if layout == "contiguous" else LAYOUTS[layout]()
    with torch.no_grad(), parallel(nn.Identity(), SIMS) as p:
        torch.testing.assert_close(ask(p, x).cpu(), x, rtol=0, atol=0)

"""Calls from any thread and stream have the module's current output, whatever changed before the call.

Each test reproduces a defect that was fixed. A fixture in conftest.py fails a test if the simulated devices report a
race; some tests check only this.
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
from parawrap.lanes import _lane_streams as lane_streams
from parawrap.replicas import _batched_copies
from tests import simdevice
from tests.devices.zoo import SIMS, Average, Holder, Masked, mlp, rows, side_stream

PATIENCE_S = 30  # timeout of all waits


def settle():
    """Wait for all devices, so that earlier work cannot affect the test."""
    for device in SIMS:
        torch.sim.synchronize(device)


def in_a_thread(work):
    """Run `work` in a new thread to its end, and assert that it raises nothing."""
    raised = []

    def run():
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert raised == []


def called(p, x):
    """Return the output of a call that is cut."""
    return p(x)


def submitted(p, x):
    """Return the output of a call that one lane runs whole."""
    return p.submit(x).result()


WAYS = pytest.mark.parametrize("ask", [called, submitted])
PLACES = pytest.mark.parametrize("devices", [["sim:1"], ["sim:2", "sim:1"], ["sim:0", "sim:1"]], ids=str)


# ---------------------------------------------------------------- parameter changes


def all_frozen(model):
    model.requires_grad_(False)


def bias_frozen(model):
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
    [all_frozen, bias_frozen, another_shape, halved, doubled],
    ids=lambda each: each.__name__,
)
def test_lanes_follow_changed_dtypes_shapes_and_requires_grad(change, devices, ask):
    """Without gradients, lanes use the changed parameters and follow later in-place writes to them."""
    model = nn.Linear(4, 2).to("sim:0")

    def assert_followed():
        x = torch.randn(7, 4).to(model.weight)
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
def test_data_assigned_at_the_same_address(ask):
    """Lanes see a new ``.data`` tensor, even if it lies at the address of the old one and holds other values."""
    model = nn.Linear(4, 2, bias=False)
    memory = bytearray(model.weight.nbytes)
    x = torch.ones(7, 4)

    def assign(value):
        model.weight.data = torch.empty(2, 4)
        torch.frombuffer(memory, dtype=torch.float32).fill_(value)
        model.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(2, 4)

    with torch.no_grad(), parallel(model, ["sim:1"]) as p:
        for value in range(8):
            assign(value)
            assert ask(p, x).unique().tolist() == [4 * value]


@WAYS
def test_a_model_moved_after_a_parameter_was_replaced(ask):
    """The output lies on the model's new device."""
    model = nn.Linear(4, 4).to("sim:0")
    x = torch.randn(7, 4)
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        ask(p, x)
        model.weight = nn.Parameter(model.weight + 1)
        ask(p, x)
        model.to("sim:3")
        y = ask(p, x)
        assert y.device == torch.device("sim:3")
        torch.testing.assert_close(y, nn.functional.linear(x.to("sim:3"), model.weight, model.bias))


# ---------------------------------------------------------------- a refresh on one stream, and calls on others


def streamed(work, device="sim:0"):
    """Run `work` on a new stream of the device."""
    with torch.sim.stream(side_stream(device)):
        return work()


@pytest.mark.parametrize("first", [True, False], ids=["first with gradients", "first without"])
@pytest.mark.parametrize("second", [True, False], ids=["second with gradients", "second without"])
@pytest.mark.parametrize("devices", [["sim:0", "sim:0"], ["sim:0", "sim:1"], ["sim:1", "sim:2"]], ids=str)
def test_a_call_on_another_stream_than_the_refresh(devices, first, second):
    """A call waits for replicas and buffers that an earlier call copied on another stream."""
    model = Masked().to("sim:0").eval()
    x = rows(7).to("sim:0")
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
def test_calls_from_several_threads_and_streams_in_turn(first, second):
    """A call of any type waits for a refresh that another thread's call started on other streams."""
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)).to("sim:0")
    x = torch.randn(9, 6)
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


def test_batch_norm_statistics_of_lanes_on_other_devices():
    """Batch norm in train mode, submitted without gradients, writes its statistics to the model in order."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("sim:0")
    with torch.no_grad(), parallel(model, ["sim:2", "sim:1"]) as p:
        for future in [p.submit(torch.randn(7, 8)) for _ in range(12)]:
            assert future.result().isfinite().all()
    assert model[1].running_mean.isfinite().all()
    assert int(model[1].num_batches_tracked) > 0


def test_a_refresh_before_earlier_work_has_started(monkeypatch):
    """A call submitted before a refresh, but started after it, writes statistics only after the refresh has read them."""
    submitted_first, refreshed = threading.Event(), threading.Event()
    begin = lane_streams.LaneFuture.set_running_or_notify_cancel

    def start_the_first_late(future):
        if not submitted_first.is_set():
            submitted_first.set()
            assert refreshed.wait(PATIENCE_S)
        return begin(future)

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to("sim:0")
    x = torch.randn(7, 8)
    with torch.no_grad(), parallel(model, ["sim:2", "sim:1"]) as p:
        p(x)
        monkeypatch.setattr(lane_streams.LaneFuture, "set_running_or_notify_cancel", start_the_first_late)
        first = p.submit(x)  # to lane 0, which writes its statistics to the model
        assert submitted_first.wait(PATIENCE_S)
        p.submit(x).result()  # in lane 1, which makes its statistics stale
        last = p.submit(x)  # after a refresh
        refreshed.set()
        for future in (first, last):
            assert future.result().isfinite().all()


@pytest.mark.parametrize("device", ["sim:0", "sim:1"])
def test_a_call_with_gradients_and_then_one_without_in_the_same_lane(device):
    """A lane runs tasks in order, even if the first uses the caller's stream and the second the lane's own stream."""
    both_submitted = threading.Event()

    class Waiting(Average):
        def forward(self, x):
            if torch.is_grad_enabled():
                both_submitted.wait(0.5)  # the second submit waits for this call if it must refresh the replica
            return super().forward(x)

    model = Waiting(in_place=True).to("sim:0")
    plain = Average(in_place=True).to("sim:0")
    plain.load_state_dict(model.state_dict())
    x = rows(7).to("sim:0")
    expected = [plain(x), plain(x)]
    settle()
    with parallel(model, [device]) as p:
        futures = [p.submit(x)]
        with torch.no_grad():
            futures.append(p.submit(x))
        both_submitted.set()
        torch.testing.assert_close([future.result() for future in futures], expected)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("make", [mlp, lambda: Masked().eval(), Holder], ids=["parameters", "buffers", "attributes"])
@pytest.mark.parametrize("devices", [["sim:1"], ["sim:0", "sim:0"], ["sim:0", "sim:1"]], ids=str)
def test_memory_of_replicas_made_on_another_stream_is_not_reused_early(make, devices):
    """Freed replica memory is reused on its stream only after other streams have finished their work with the replicas."""
    model = make().to("sim:0")
    x = rows(7).to("sim:0")
    settle()
    device = devices[-1]
    stream = side_stream(device)
    with torch.no_grad():
        with parallel(model, devices):
            with torch.sim.stream(stream):
                model(x)
            model(x)
        sizes = [each.shape for each in (*model.parameters(), *model.buffers())]
        with torch.sim.stream(stream):  # allocate tensors as large as the freed ones, and write to them at once
            kept = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes * 4]
    settle()
    assert all(each.count_nonzero() == 0 for each in kept)


@pytest.mark.parametrize("close_after", ["a call", "nothing"])
def test_a_block_closed_during_a_call(close_after):
    """A call that is running when another thread ends the block finishes with its own replicas."""
    inside, closed, armed = threading.Event(), threading.Event(), threading.Event()

    class Slow(nn.Linear):
        def forward(self, x):
            if armed.is_set():
                inside.set()
                assert closed.wait(PATIENCE_S)
            return super().forward(x)

    model = Slow(64, 64).to("sim:0")
    x = torch.randn(7, 64, device="sim:0")
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
def test_a_refresh_needs_little_extra_memory(width, monkeypatch):
    """On a lane's device, a refresh allocates at most the memory of two packs in addition to the replica."""
    monkeypatch.setattr(_batched_copies, "_SMALL", 32 << 10)
    monkeypatch.setattr(_batched_copies, "_MOST", most := 64 << 10)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(24))).to("sim:0")
    taken = []

    def measuring(transfer):
        def transfer_and_measure(*given):
            result = transfer(*given)
            taken.append(simdevice.stats().live_bytes_by_device[1])
            return result

        return transfer_and_measure

    for name in ("bring", "bring_into"):
        monkeypatch.setattr(_batched_copies, name, measuring(getattr(_batched_copies, name)))
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]):
        model(torch.ones(5, width))
        settle()
        between = simdevice.stats().live_bytes_by_device[1]
        for parameter in model.parameters():
            parameter.add_(0)
        taken.clear()
        model(torch.ones(5, width))
    assert len(taken) > 2
    assert max(taken) - between <= 2 * most


def test_gradients_copied_together_have_separate_versions():
    """An in-place write to one gradient does not invalidate a graph that saved another one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to("sim:0")
    with parallel(model, ["sim:1"]):
        model(torch.randn(7, 4)).sum().backward()
    first, second, *_ = [parameter.grad for parameter in model.parameters()]
    weight = torch.ones(4, 4, device="sim:0", requires_grad=True)
    loss = (first * weight).sum()
    second.zero_()
    loss.backward()
    torch.testing.assert_close(weight.grad, first)


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("devices", [["sim:1", "sim:2"], ["sim:0", "sim:1"]], ids=str)
@pytest.mark.parametrize("where", ["cpu", "sim:0"])
def test_submit_with_an_output_device_that_has_no_lane(where, devices):
    """A result on a device other than the model's and the lanes' is ready for the reader's stream."""
    model = mlp().to("sim:0")
    x = rows(7).to(where)
    expected = model(x.to("sim:0")).detach().cpu()
    settle()
    with torch.no_grad(), parallel(model, devices, output_device="sim:3") as p:
        for _ in range(4):
            y = streamed(lambda: (p.submit(x).result() * 2).cpu(), "sim:3")
            torch.testing.assert_close(y, 2 * expected)


def test_a_callback_can_read_results_of_other_lanes():
    """A callback that reads the results of all lanes gets complete results, usable on any stream."""
    results, first_done, there = [], threading.Event(), threading.Event()

    class Following(nn.Linear):
        def forward(self, x):
            if x.device == torch.device("sim:2"):
                assert first_done.wait(PATIENCE_S)
            return super().forward(x)

    model = Following(5, 3, dtype=torch.float64).to("sim:0")
    x = rows(7).to("sim:0")
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
    """A linear layer on the data of a packed sequence that also uses its index tensors."""

    def forward(self, packed):
        orders = packed.sorted_indices + 0, packed.unsorted_indices + 0
        return PackedSequence(super().forward(packed.data), packed.batch_sizes, *orders)


def sequences(device):
    """A packed sequence of three unsorted sequences."""
    return pack_sequence([torch.ones(k, 3, device=device) for k in (1, 3, 2)], enforce_sorted=False)


def assert_equals_plain(packed, model):
    data = torch.ones(6, 3, device=packed.data.device)
    torch.testing.assert_close(packed.data, nn.functional.linear(data, model.weight, model.bias))
    assert packed.sorted_indices.tolist() == [1, 2, 0]


def test_submitted_packed_sequences_stay_alive():
    """A packed sequence without other references stays alive, with its indices, until a lane has read it."""
    model = Packed(3, 3).to("sim:0")
    settle()
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        futures = []
        for _ in range(6):
            futures.append(p.submit(sequences("sim:0")))
            torch.zeros(18, device="sim:0")  # would reuse the sequence's memory if it were free
            torch.zeros(3, dtype=torch.int64, device="sim:0")
        results = [future.result() for future in futures]
        settle()
        for result in results:
            assert_equals_plain(result, model)


@WAYS
def test_packed_sequence_on_a_third_device(ask):
    """A packed sequence on a device other than the model's and the lanes' is copied after that device's queued work."""
    model = Packed(3, 3).to("sim:0")
    settle()
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]) as p:
        for _ in range(3):
            result = streamed(lambda: ask(p, sequences("sim:3")), "sim:3")
            assert_equals_plain(result, model)


@WAYS
@pytest.mark.parametrize("devices", [["sim:0"], ["sim:0", "sim:1"], ["sim:1"]], ids=str)
def test_packed_sequence_of_one_row_on_the_cpu(devices, ask):
    """A packed sequence with one row, which cannot be cut, is moved to the lane that runs it."""

    class Summed(nn.Linear):
        def forward(self, packed):
            return super().forward(packed.data).sum(0, keepdim=True)

    model = Summed(3, 2).to("sim:0")
    x = torch.randn(4, 3)
    with torch.no_grad(), parallel(model, devices) as p:
        y = ask(p, pack_sequence([x]))
        torch.testing.assert_close(y, nn.functional.linear(x.to("sim:0"), model.weight, model.bias).sum(0, keepdim=True))


# ---------------------------------------------------------------- lanes on the CPU


def pending_copy_on_a_device(value=3.0):
    """A device tensor; the copy that fills it is still queued on the current stream."""
    return torch.full((9, 5), value, dtype=torch.float64).pin_memory().to("sim:0", non_blocking=True)


@WAYS
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_cpu_lanes_wait_for_pending_device_work(home, ask):
    """A lane on the CPU reads a device tensor only after the caller's stream has computed it."""
    model = nn.Linear(5, 5, dtype=torch.float64)
    expected = model(torch.full((9, 5), 3.0, dtype=torch.float64)).detach()
    model.to(home)
    settle()
    with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p:
        for _ in range(3):
            y = streamed(lambda: ask(p, pending_copy_on_a_device()))
            settle()
            torch.testing.assert_close(y.cpu(), expected)


def test_tuple_fn_on_the_cpu_with_parts_on_a_device():
    """tuple_fn(parallel=True) on CPU lanes reads each part after the caller's queued work on it."""
    increment = tuple_fn(lambda part: part + 1, parallel=True, devices=["cpu", "cpu"])
    settle()
    for _ in range(3):
        outputs = streamed(lambda: increment((pending_copy_on_a_device(1), pending_copy_on_a_device(2))))
        assert [output.device.type for output in outputs] == ["cpu", "cpu"]
        assert [output.unique().tolist() for output in outputs] == [[2.0], [3.0]]


def test_tuple_parallel_on_the_cpu_with_parts_on_a_device():
    """TupleParallel on CPU lanes reads each part after the caller's queued work on it."""
    model = nn.Linear(5, 5, dtype=torch.float64)
    parts = [torch.full((9, 5), value, dtype=torch.float64) for value in (1.0, 2.0)]
    expected = [model(part).detach() for part in parts]
    wrapped = TupleParallel(model, ["cpu", "cpu"])
    settle()
    with torch.no_grad():
        for _ in range(3):
            outputs = streamed(lambda: wrapped((pending_copy_on_a_device(1), pending_copy_on_a_device(2))))
            torch.testing.assert_close([output.cpu() for output in outputs], expected)
    wrapped.close()


# ---------------------------------------------------------------- pools that are collected without close()


@pytest.fixture
def collected_where_streams_are_made(monkeypatch):
    """Collect garbage only when a lane makes a stream, after the test has set the yielded event."""
    backend = type(backend_of("sim"))
    make = backend.new_stream
    let_go = threading.Event()

    def collecting(self, device):
        assert let_go.wait(PATIENCE_S)
        gc.collect()
        return make(self, device)

    monkeypatch.setattr(lane_streams, "_shelf", lane_streams._Shelf())  # a shelf without streams of earlier pools
    monkeypatch.setattr(backend, "new_stream", collecting)
    gc.disable()
    yield let_go
    let_go.set()
    gc.enable()


def pool_on(device):
    """A pool of one lane that only the garbage collector can free, because it refers to itself."""
    pool = LanePool([torch.device(device)])
    pool.itself = pool
    return pool


def ones_on(device):
    return lambda: torch.ones(1, device=device)


def test_a_pool_collected_while_another_takes_a_stream(collected_where_streams_are_made):
    """A pool can be collected, and return its streams, while another pool's lane takes a stream."""
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
    """A pool without references can be collected in its own lane's thread. The lane still finishes its task."""
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
    """A large input of any layout is copied once, without blocking the host. Dense inputs keep their strides."""
    tensor = LAYOUTS[layout]()
    if pinned:  # pin_memory() would change the layout
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
def test_large_inputs_of_any_layout_keep_their_values(layout, ask):
    """The shards of a large input of any layout hold the input's values."""
    x = torch.cat([LAYOUTS[layout]()] * 4) if layout == "contiguous" else LAYOUTS[layout]()
    with torch.no_grad(), parallel(nn.Identity(), SIMS, out_dims=0) as p:
        torch.testing.assert_close(ask(p, x).cpu(), x, rtol=0, atol=0)

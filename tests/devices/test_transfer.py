"""Copies to and from devices are queued where that is safe, and memory is kept until every stream
has read it.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from parawrap import parallel
from parawrap.backends import transfer
from parawrap.engine.lanes import Modes
from parawrap.processes.packing import Packer
from parawrap.workers.model import SentModel
from parawrap.workers.worker import Form, ModelServer, WorkerAnswer, pack_modes
from tests import simdevice
from tests.helpers.device_models import SIMS, Holder, mlp, rows, settle, side_stream
from tests.helpers.packing import sent

MANY = 1 << 14  # this many rows of 5 doubles are too large to be copied to a device without staging


LAYOUTS = {
    "channels_last": lambda: torch.randn(4, 3, 64, 64).contiguous(
        memory_format=torch.channels_last
    ),
    "transposed": lambda: torch.randn(64, 1024).t(),
    "columns": lambda: torch.randn(1024, 128)[:, :64],
    "expanded": lambda: torch.randn(1, 64).expand(1024, 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_inputs_of_any_layout(layout):
    """A large input is copied once, without blocking the host, and keeps its values; a dense one
    keeps its strides.
    """
    tensor = LAYOUTS[layout]()
    simdevice.reset_stats()
    brought = transfer(tensor, torch.device("sim:1"))
    stats = simdevice.stats()
    assert (stats.h2d, stats.h2d_bytes, stats.late) == (1, tensor.nbytes, 1)
    torch.testing.assert_close(brought.cpu(), tensor, rtol=0, atol=0)
    if layout in ("channels_last", "transposed"):
        assert brought.stride() == tensor.stride()
    with torch.no_grad(), parallel(nn.Identity(), SIMS, out_dims=0) as p:
        for output in (p(tensor), p.submit(tensor).result()):
            torch.testing.assert_close(output.cpu(), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("dim", [0, -1])
def test_outputs_are_copied_once(dim):
    """Without a graph, each lane's output is copied once, from device to device, to its place in
    the joined output.
    """
    x = rows(12, 12).to("sim:2")
    with (
        torch.no_grad(),
        parallel(nn.Identity(), SIMS, dim=dim, out_dims=dim, output_device="sim:2") as p,
    ):
        simdevice.reset_stats()
        y = p(x)
        stats = simdevice.stats()
        assert (stats.d2d, stats.d2h, stats.h2d) == (6, 0, 0)
        assert stats.d2d_bytes == 2 * x.nbytes * 3 // 4
    torch.testing.assert_close(y, x)


def test_prepare_follows_the_caller():
    """A tensor that `prepare` finds in a closure is ordered like an input, on any device of the
    block.
    """

    def shifted(turn):
        return x + sum(shift.cpu() for shift in shifts)

    x = rows(4)
    with torch.no_grad(), parallel(mlp().to("sim:0"), SIMS) as p:
        for turn in range(1, 4):
            shifts = [
                torch.full((1,), float(turn), dtype=torch.float64).to(device) * 2 for device in SIMS
            ]
            (output,) = p.map([turn], prepare=shifted)
            torch.testing.assert_close(output, p.submit(x + 2 * turn * len(SIMS)).result())


def test_tensors_for_other_processes():
    """Copies in host memory live until they are written."""
    tensors = [torch.full((1 << 21,), float(index)).to("sim:0") for index in range(4)]
    assert [tensor.unique().tolist() for tensor in sent(tensors)] == [[0], [1], [2], [3]]


def pending(value=3.0):
    """Return a device tensor; the copy that fills it is still queued on the current stream."""
    return (
        torch.full((9, 5), value, dtype=torch.float64).pin_memory().to("sim:0", non_blocking=True)
    )


MADE_ON = []


class NotesDevice(nn.Linear):
    """Notes where forward makes tensors without a device."""

    def forward(self):
        MADE_ON.append(torch.zeros(1).device.type)
        return self.weight


def test_calls_on_a_new_model_in_a_worker():
    """The first call on a model that has arrived makes tensors where later calls do."""
    server = ModelServer(torch.device("sim:0"))
    server.take_model(memoryview(SentModel(NotesDevice(2, 2).eval()).read().to_bytes()))
    with torch.inference_mode():
        modes = pack_modes(Modes.capture("sim"))
    form = Form(
        modes,
        has_grad=False,
        is_inference=True,
        method=None,
        is_whole=True,
        prepare=None,
        model=None,
    )
    item = Packer().add((), "args")
    for _ in range(2):
        (answer,), _ = server.answer(form, [item], memoryview(b""))
        assert WorkerAnswer(*answer).error is None
    assert MADE_ON == ["sim", "sim"]


@pytest.mark.parametrize(
    "ask", [lambda p, x: p(x), lambda p, x: p.submit(x).result()], ids=["called", "submitted"]
)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_cpu_lanes_wait_for_the_device(home, ask):
    """A lane on the CPU reads a device tensor only after the caller's stream has computed it."""
    model = nn.Linear(5, 5, dtype=torch.float64)
    expected = model(torch.full((9, 5), 3.0, dtype=torch.float64)).detach()
    model.to(home)
    settle()
    with torch.no_grad(), parallel(model, ["cpu", "cpu"]) as p, torch.sim.stream(side_stream()):
        for _ in range(3):
            y = ask(p, pending())
            settle()
            torch.testing.assert_close(y.cpu(), expected)


@pytest.mark.parametrize("place", ["cpu", "pinned", "sim:3"])
@pytest.mark.parametrize("devices", [SIMS, ["sim:0", "sim:0"], ["sim:1"]], ids=str)
def test_batches_that_nobody_holds(devices, place):
    """`map` keeps batches alive until a lane has read them, even if the source drops its
    references.
    """
    model = mlp().to("sim:0")
    batches = [rows(MANY + i) for i in range(5)]
    expected = [model(batch.to("sim:0")).detach().cpu() for batch in batches]

    def source():
        for batch in batches:
            copy = batch.clone().pin_memory() if place == "pinned" else batch.to(place, copy=True)
            yield copy
            del copy
            if place not in ("cpu", "pinned"):
                # Would reuse the batch's memory if it were free
                torch.zeros(MANY, 5, dtype=torch.float64, device=place)

    with torch.no_grad(), parallel(model, devices) as p:
        for output, answer in zip(p.map(source()), expected, strict=True):
            torch.testing.assert_close(output.cpu(), answer)
            output.add_(1)


@pytest.mark.parametrize("devices", [["sim:1"], ["sim:0", "sim:0"], ["sim:0", "sim:1"]], ids=str)
def test_replicas_are_not_freed_early(devices):
    """Freed replica memory is reused on its stream only after other streams have finished their
    work with the replicas.
    """
    model = Holder().eval()
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
        # Allocate tensors as large as the freed ones, and write to them at once
        with torch.sim.stream(stream):
            kept = [torch.zeros(size, dtype=torch.float64, device=device) for size in sizes * 4]
    settle()
    assert all(each.count_nonzero() == 0 for each in kept)


@pytest.mark.parametrize("place", ["sim:0", "sim:3"])
def test_packed_sequences_stay_alive(place):
    """A packed sequence without other references stays alive, with its indices, until a lane has
    read it.
    """

    def read(packed):
        return packed.data + 1, packed.sorted_indices + 0, packed.unsorted_indices + 0

    settle()
    with (
        torch.no_grad(),
        parallel(read, ["sim:0", "sim:1"]) as p,
        torch.sim.stream(side_stream(place)),
    ):
        futures = []
        for _ in range(6):
            parts = [torch.ones(length, 3, device=place) for length in (1, 3, 2)]
            futures.append(p.submit(pack_sequence(parts, enforce_sorted=False)))
            torch.zeros(18, device=place)  # would reuse the sequence's memory if it were free
            torch.zeros(3, dtype=torch.int64, device=place)
        results = [future.result() for future in futures]
        settle()
    for data, order, back in results:
        assert data.eq(2).all()
        assert (order.tolist(), back.tolist()) == ([1, 2, 0], [2, 0, 1])

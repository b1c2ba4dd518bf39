"""A parallel block over four devices has the plain model's outputs and gradients."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, ShardError, parallel, register_split
from parawrap.engine.lanes import Modes
from parawrap.processes.packing import Packer, restore
from parawrap.workers.model import SentModel
from parawrap.workers.worker import Form, ModelServer, WorkerAnswer, pack_modes
from tests import simdevice
from tests.helpers.device_models import (
    SIMS,
    assert_same_gradients,
    assert_same_training_step,
    devices_of,
    mlp,
    rows,
)

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, SIMS),
        ("sim", SIMS),
        (2, SIMS[:2]),
        ([1, 0], ["sim:1", "sim:0"]),
        (["sim:1", torch.device("sim:1")], ["sim:1", "sim:1"]),
        (["cpu", "cpu"], ["cpu", "cpu"]),
    ],
    ids=str,
)
@HOMES
def test_lanes_and_a_training_step(devices, expected, home):
    model = mlp().to(home)
    assert list(map(str, parallel(model, devices).devices)) == expected
    assert_same_training_step(model, rows(11), devices)


class Sum(nn.Module):
    """Adds a second input to the output of a linear layer, and scales the sum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, y, scale=1):
        return (self.linear(x) + y) * scale


@pytest.mark.parametrize("is_whole", [False, True], ids=["y of rows", "y for every lane"])
@pytest.mark.parametrize("y_place", ["cpu", "sim:0", "sim:2"])
@HOMES
def test_inputs_may_lie_anywhere(home, y_place, is_whole):
    model = Sum().to(home)
    plain = copy.deepcopy(model)
    x, y = rows(), (rows(width=3)[0] if is_whole else rows(width=3)).to(y_place)
    scale = torch.tensor(2.0, dtype=torch.float64, device="sim:3")
    mine = [each.clone().requires_grad_() for each in (x, y)]
    theirs = [each.to(home).requires_grad_() for each in (x, y)]
    expected = plain(*theirs, scale.to(home))
    expected.square().sum().backward()
    with parallel(model, SIMS, in_dims={"y": None} if is_whole else None):
        output = model(*mine, scale)
        output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    assert_same_gradients(model, plain)
    for each, other in zip(mine, theirs, strict=True):
        assert each.grad.device == each.device
        torch.testing.assert_close(each.grad.cpu(), other.grad.cpu())


@pytest.mark.parametrize("output_device", ["sim:0", "sim:2", "cpu", 3], ids=str)
def test_output_device_is_followed(output_device):
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows()
    plain(x.to("sim:0")).square().sum().backward()
    with parallel(model, SIMS, output_device=output_device):
        output = model(x)
        output.square().sum().backward()
    assert str(output.device) == (
        output_device if isinstance(output_device, str) else f"sim:{output_device}"
    )
    assert_same_gradients(model, plain)


@torch.no_grad()
@pytest.mark.parametrize("lanes", [["cpu", "cpu"], ["cpu"]], ids=["two", "one"])
@pytest.mark.parametrize("moves", ["before", "inside"])
def test_cpu_lanes_of_device_models(lanes, moves):
    """Outputs lie on the model's device for any number of rows, wherever the input lies."""
    model = mlp().to("sim:1" if moves == "before" else "cpu")
    with parallel(model, lanes, out_dims=0) as p:
        model.to("sim:1")
        for x in rows(), rows().to("sim:1"):
            for count in len(x), 1, 0:
                assert model(x[:count]).device == torch.device("sim:1")
                assert p.submit(x[:count]).result().device == torch.device("sim:1")


@torch.no_grad()
@pytest.mark.parametrize("count", [6, 1, 0])
def test_cpu_lanes_of_a_function(count):
    """A function's output lies where its first tensor does, unless
    `output_device` says otherwise.
    """
    x = torch.ones(count, 3, device="sim:1")
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0) as p:
        assert p(x).device == x.device
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0, output_device="cpu") as p:
        assert p(x).device.type == "cpu"


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9])
@pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
def test_few_and_uneven_rows(count):
    assert_same_training_step(mlp().to("sim:0"), rows(count), SIMS)


class Many(nn.Linear):
    """Returns rows, lists with one item per row, parameters as long as a shard, and a loss."""

    def forward(self, x):
        y = super().forward(x)
        names = [f"row {value:.3f}" for value in y[:, 0].tolist()]
        return {
            "y": (y, None, [y.sum(1)]),
            "names": names,
            "tables": (self.bias, self.weight),
            "loss": y.mean(),
        }


@pytest.mark.parametrize("home", ["sim:1", "cpu"])
def test_outputs_on_the_models_device(home):
    """Leaves with rows are joined there, losses are reduced there, and parameters are the model's
    own.
    """
    model = Many(5, 3, dtype=torch.float64).to(home)
    x = rows(9)
    expected = model(x.to(home))
    names = expected.pop("names")
    with parallel(model, SIMS, reduce="mean"):
        for _ in range(2):
            output = model(x)
            assert output.pop("names") == names
            torch.testing.assert_close(output, expected)
            assert output["tables"] == (model.bias, model.weight)
    with torch.no_grad(), parallel(model, SIMS, join="list"):
        assert devices_of([output["loss"] for output in model(x)]) == [home] * 4


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_writes_into_inputs_with_gradients(home, records):
    """A write into rows on other devices reaches the input. Its gradient counts the write if
    autograd recorded it; an input that requires gradients may be written without.
    """

    class Triple(nn.Linear):
        def forward(self, x):
            with torch.set_grad_enabled(records):
                x.mul_(3)
            return super().forward(x)

    model = Triple(4, 2).to(home)
    results = []
    for devices in SIMS[:2], None:
        start = torch.ones(9, 4, device=home, requires_grad=True)
        x = start * 2 if records else start
        if devices is None:
            y = model(x)
        else:
            with parallel(model, devices):
                y = model(x)
        results.append((x, y, *torch.autograd.grad(y.sum() + x.sum(), start)))
    assert_close(*results)


@torch.no_grad()
def test_writes_that_another_input_shows():
    """Lanes elsewhere have copies of both inputs, so a write into a common element is refused."""

    def halve(image, first):
        image.div_(2)
        return first * 1

    matrix = torch.ones(9, 4, device="sim:0")
    with parallel(halve, SIMS[:2]) as p:
        with pytest.raises(ShardError, match="shares memory with"):
            p(matrix, matrix[:, 0])
        p(matrix[:, 1:], matrix[:, 0])
    assert matrix[-1].tolist() == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_writes_into_inference_tensors(home, mode):
    """A write into an inference tensor is refused as by torch, also by lanes on other devices."""

    class Triple(nn.Linear):
        def forward(self, x):
            with torch.no_grad():
                x.mul_(3)
            return super().forward(x)

    with torch.inference_mode():
        x = torch.ones(9, 4, device=home)
    model = Triple(4, 2).to(home)
    for devices in SIMS[1:3], None:
        block = model if devices is None else parallel(model, devices)
        with mode(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            block(x)
        if devices is not None:
            block.close()


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_writes_in_inference_mode_with_gradients(home):
    """In inference mode, a write reaches the input, also if gradients are enabled there."""

    class Triple(nn.Linear):
        def forward(self, x):
            x.mul_(3)
            return super().forward(x)

    model = Triple(4, 2).to(home)
    with torch.inference_mode(), torch.enable_grad(), parallel(model, SIMS[1:3]):
        x = torch.ones(9, 4, device=home)
        model(x)
    assert_close(x, torch.full_like(x, 3.0))


class Bag:
    """An object with rows, and rules."""

    def __init__(self, rows, notes):
        self.rows, self.notes = rows, notes

    def to(self, *args, **kwargs):
        return Bag(self.rows.to(*args, **kwargs), self.notes.to(*args, **kwargs))


@pytest.fixture
def bags():
    def split(bag, sizes):
        parts = zip(bag.rows.split(list(sizes)), bag.notes.split(list(sizes)), strict=True)
        return [Bag(*part) for part in parts]

    def join(parts):
        return Bag(torch.cat([each.rows for each in parts]), torch.cat([e.notes for e in parts]))

    register_split(Bag, split=split, join=join, rows=lambda bag: len(bag.rows))


@pytest.mark.parametrize("writer", [None, 1])
@pytest.mark.parametrize("home", ["cpu", "sim:0", "sim:1"])
def test_writes_into_whole_objects(bags, home, writer):
    """A write into an object that each lane gets whole is refused, also if a lane writes a copy."""

    def run(x, bag):
        if writer is None or x.device.index == writer:
            bag.rows = bag.rows + 1
        return x

    bag = Bag(torch.ones(2, device=home), torch.ones(2, device=home))
    block = parallel(run, SIMS[:2], in_dims={"bag": None}, out_dims=0)
    with block as p, pytest.raises(ShardError, match="a Bag that every lane gets whole"):
        p(torch.ones(9, device=home), bag)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("device", ["cpu", "sim:0", "sim:1"])
def test_a_single_row_may_be_written(device, grad):
    """One lane has the row, and writes into the caller's tensor as the plain call does."""

    class AddsOne(nn.Linear):
        def forward(self, x):
            return super().forward(x.add_(1))

    x, model = torch.zeros(1, 2, device=device), AddsOne(2, 2).to("sim:1").eval()
    with torch.set_grad_enabled(grad), parallel(model, SIMS[:2]):
        model(x)
    assert_close(x.cpu(), torch.ones(1, 2))


def test_whole_tensors_are_copied_once():
    """A tensor with `in_dims` None travels once to each lane's device, and comes back as the
    caller's.
    """
    seen = []

    def forward(x, table):
        seen.append((str(x.device), str(table.device), tuple(table.shape)))
        return x + table.sum(), table

    x, table = rows(9).to("sim:0"), torch.ones(6, dtype=torch.float64, device="sim:0")
    with parallel(forward, SIMS, in_dims={"table": None}, output_device="sim:0") as p:
        simdevice.reset_stats()
        output, returned = p(x, table)
        assert simdevice.stats().d2d == 3 + 3 + 3  # shards of x out, table out, outputs back
    assert sorted(seen) == [(device, device, (6,)) for device in SIMS]
    torch.testing.assert_close(output, x + 6)
    assert returned is table


@pytest.mark.parametrize(("default", "home"), [("sim", "sim:0"), ("sim:2", "sim:2"), (None, "cpu")])
def test_default_device_is_the_lanes(default, home):
    """Tensors that forward makes without a `device` argument lie on the lane's device."""

    class Padded(nn.Linear):
        def forward(self, x):
            return torch.cat([super().forward(x), torch.zeros(len(x), 1, dtype=x.dtype)], 1)

    model = Padded(5, 3, dtype=torch.float64).to(home)
    x = rows(9)
    torch.set_default_device(default)
    try:
        expected = model(x.to(home))
        with parallel(model, SIMS):
            outputs = [model(x) for _ in range(2)]
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(outputs, [expected, expected])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_follow_into_the_lanes(mode):
    """Grad mode, inference mode, and autocast apply in every lane, and not after the caller left
    them.
    """

    class Modes(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append(
                (str(x.device), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.dtype)
            )
            return y

    seen = []
    model = Modes(5, 3).to("sim:0")
    with mode(), parallel(model, SIMS):
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with torch.autocast("sim", torch.bfloat16):
            model(torch.randn(9, 5))
        model(torch.randn(9, 5))
    for calls, dtype in ((seen[:4], torch.bfloat16), (seen[4:], torch.float32)):
        assert sorted(calls) == [(device, *expected, dtype) for device in SIMS]


@HOMES
def test_map_keeps_the_batch_order(home):
    model = mlp().to(home)
    plain = copy.deepcopy(model)
    batches = [rows(1 + index % 4) for index in range(11)]
    expected = [plain(batch.to(home)) for batch in batches]
    sum(output.square().sum() for output in expected).backward()
    with parallel(model, SIMS) as p:
        outputs = list(p.map(batches))
        sum(output.square().sum() for output in outputs).backward()
    torch.testing.assert_close(outputs, expected)
    assert_same_gradients(model, plain)


def test_models_on_wrong_devices():
    model = mlp().to("sim:0")
    model[2].to("sim:1")
    with (
        pytest.raises(ReplicaError, match=r"'0\.weight' on sim:0 and '2\.weight' on sim:1"),
        parallel(model, SIMS),
    ):
        model(rows())
    model = mlp().to("meta")
    with (
        parallel(model, SIMS),
        pytest.raises(ReplicaError, match=re.escape("'0.weight' is on the meta device")),
    ):
        model(rows())


@torch.inference_mode()
def test_worker_finds_writes_in_inference_mode():
    """A worker on another device finds what forward writes into its copy of an argument."""
    with warnings.catch_warnings():  # the server replaces their handling in its process
        server = ModelServer(torch.device("sim:1"))
    server.take_model(memoryview(SentModel(torch.Tensor.mul_).read().to_bytes()))
    form = Form(pack_modes(Modes.capture("sim")), False, True, None, True, None, None)
    packer = Packer()

    def read_block(packer):
        return memoryview(bytearray().join(map(bytes, packer.parts)))

    items = [packer.add((torch.ones(3), torch.tensor(2.0)), "args")]
    answers, answered = server.answer(form, items, read_block(packer))
    answer = WorkerAnswer(*answers[0])
    written = restore(answer.written, read_block(answered))
    assert_close(written.tensors[0], torch.full((3,), 2.0))

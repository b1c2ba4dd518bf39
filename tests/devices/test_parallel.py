"""A parallel block over four devices has the plain model's outputs and gradients."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from torch import nn

from parawrap import DeviceListError, DeviceUnavailableError, GatherError, ReplicaError, ShardError, parallel
from tests import simdevice
from tests.helpers.device_models import (
    SIMS,
    assert_same_gradients,
    assert_same_training_step,
    devices_of,
    lane_devices,
    mlp,
    rows,
)
from tests.helpers.waiting import PATIENCE_S

HOMES = pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])

# ---------------------------------------------------------------- devices of the lanes


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, SIMS),
        ("auto", SIMS),
        ("sim", SIMS),
        (2, SIMS[:2]),
        ([1, 0], ["sim:1", "sim:0"]),
        ("sim:2", ["sim:2"]),
        (["sim:1", torch.device("sim:1")], ["sim:1", "sim:1"]),
        (["cpu", "cpu"], ["cpu", "cpu"]),
    ],
    ids=str,
)
@HOMES
def test_lanes_and_a_training_step(devices, expected, home):
    """Each form of `devices` gives one lane per device, and any lanes give the plain outputs and gradients."""
    model = mlp().to(home)
    assert lane_devices(parallel(model, devices)) == expected
    assert_same_training_step(model, rows(11), devices)


class Where(nn.Module):
    """Returns for each row the index of the device that it ran on, and of the current device."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        assert x.device == self.bias.device
        here = torch.tensor([x.device.index, torch.sim.current_device()], device=x.device)
        return here.expand(len(x), 2) + self.bias


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0"], ["sim:1", "sim:1", "sim:3"]], ids=str)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_each_shard_runs_on_its_lane(devices, home):
    """Shard i runs on device i, which is the current device there and holds its parameters."""
    model = Where().to(home)
    with torch.no_grad(), parallel(model, devices) as p:
        indices = model(torch.zeros(11)).tolist()
    sizes = p.stats().shards
    assert sum(sizes) == 11
    assert indices == [[int(device[-1])] * 2 for device, size in zip(devices, sizes, strict=True) for _ in range(size)]
    assert torch.sim.current_device() == 0


# ---------------------------------------------------------------- devices of inputs and outputs


class Sum(nn.Module):
    """Adds a second input to the output of a linear layer, and scales the sum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, y, scale=1):
        return (self.linear(x) + y) * scale


@pytest.mark.parametrize("y_place", ["cpu", "sim:0", "sim:2"])
@HOMES
def test_inputs_may_lie_anywhere(home, y_place):
    """Inputs of one call may lie on several devices, and get their gradients there."""
    model = Sum().to(home)
    plain = copy.deepcopy(model)
    x, y = rows(), rows(width=3).to(y_place)
    scale = torch.tensor(2.0, dtype=torch.float64, device="sim:3")
    mine = [each.clone().requires_grad_() for each in (x, y)]
    theirs = [each.to(home).requires_grad_() for each in (x, y)]
    expected = plain(*theirs, scale.to(home))
    expected.square().sum().backward()
    with parallel(model, SIMS):
        output = model(*mine, scale)
        output.square().sum().backward()
    torch.testing.assert_close(output, expected)
    assert_same_gradients(model, plain)
    for each, other in zip(mine, theirs, strict=True):
        assert each.grad.device == each.device
        torch.testing.assert_close(each.grad.cpu(), other.grad.cpu())


@pytest.mark.parametrize("output_device", ["sim:0", "sim:2", "cpu", 3], ids=str)
def test_output_device(output_device):
    """Outputs are joined on `output_device`, and gradients flow back from it to the model."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    x = rows()
    plain(x.to("sim:0")).square().sum().backward()
    with parallel(model, SIMS, output_device=output_device):
        output = model(x)
        output.square().sum().backward()
    assert str(output.device) == (output_device if isinstance(output_device, str) else f"sim:{output_device}")
    assert_same_gradients(model, plain)


@torch.no_grad()
@pytest.mark.parametrize("lanes", [["cpu", "cpu"], ["cpu"]], ids=["two", "one"])
@pytest.mark.parametrize("moves", ["before", "inside"])
def test_cpu_lanes_of_a_device_model(lanes, moves):
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
    """A function's output lies where its first tensor does, unless `output_device` says otherwise."""
    x = torch.ones(count, 3, device="sim:1")
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0) as p:
        assert p(x).device == x.device
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0, output_device="cpu") as p:
        assert p(x).device.type == "cpu"


def test_functions_over_devices():
    """A function, and a module without parameters, run over four devices."""
    x = rows()
    for target in (torch.tanh, nn.Tanh()):
        with parallel(target, SIMS) as p:
            torch.testing.assert_close(p(x).cpu(), x.tanh())
            torch.testing.assert_close(p(x.to("sim:2")).cpu(), x.tanh())


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9, 12, 16])
@pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
def test_few_and_uneven_rows(count):
    """Any row count, also zero, gives as many output rows and the plain gradients."""
    assert_same_training_step(mlp().to("sim:0"), rows(count), SIMS)


def test_call_without_tensors():
    """It runs once, on the model's device."""

    class Constant(nn.Linear):
        def forward(self):
            return self.weight.sum()

    model = Constant(5, 3).to("sim:1")
    with parallel(model, SIMS):
        torch.testing.assert_close(model(), Constant.forward(model))


class Many(nn.Linear):
    """Returns rows, lists with one item per row, parameters as long as a shard, and a loss."""

    def forward(self, x):
        y = super().forward(x)
        names = [f"row {value:.3f}" for value in y[:, 0].tolist()]
        return {"y": (y, None, [y.sum(1)]), "names": names, "tables": (self.bias, self.weight), "loss": y.mean()}


@pytest.mark.parametrize("home", ["sim:1", "cpu"])
@pytest.mark.parametrize("count", [9, 10, 1])
def test_nested_outputs(count, home):
    """Leaves with rows are joined on the model's device, losses are reduced, and parameters are the model's own."""
    model = Many(5, 3, dtype=torch.float64).to(home)
    x = rows(count)
    expected = model(x.to(home))
    names = expected.pop("names")
    with parallel(model, SIMS, reduce="mean"):
        for _ in range(2):
            output = model(x)
            assert output.pop("names") == names
            torch.testing.assert_close(output, expected)
            assert output["tables"] == (model.bias, model.weight)


@pytest.mark.parametrize("reduce", ["sum", "stack", torch.sum])
@pytest.mark.parametrize("count", [9, 1])
def test_reductions_of_scalars(reduce, count):
    """Scalars of the lanes are added or stacked on the model's device; a function gets the vector."""

    class Total(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    model = Total(5, 3, dtype=torch.float64).to("sim:0")
    x = rows(count)
    with parallel(model, SIMS, reduce=reduce):
        output = model(x)
    assert str(output.device) == "sim:0"
    assert output.shape == ((min(count, 4),) if reduce == "stack" else ())
    torch.testing.assert_close(output.sum(), Total.forward(model, x.to("sim:0")))


@pytest.mark.parametrize("count", [4, 9])
def test_declared_outputs(count):
    """`out_dims` takes a dim per output: an LSTM's states have rows on dim 1. With `dim=1`, rows are cut there."""

    class Recurrent(nn.LSTM):
        def forward(self, x):
            output, states = super().forward(x)
            return output, states, self.weight_ih_l0.sum(1), [str(len(row)) for row in x]

    model = Recurrent(5, 4, batch_first=True, dtype=torch.float64).to("sim:0")
    x = torch.randn(count, 6, 5, dtype=torch.float64)
    expected = model(x.to("sim:0"))
    with torch.no_grad(), parallel(model, SIMS, out_dims=(0, (1, 1), None, "items")) as p:
        output = model(x)
        assert output[3] == expected[3]
        torch.testing.assert_close(output[:3], expected[:3])
        assert len(p.stats().shards) == 4
    linear = nn.Linear(5, 3, dtype=torch.float64).to("sim:0")
    with torch.no_grad(), parallel(linear, SIMS, dim=1):
        torch.testing.assert_close(linear(x), linear.forward(x.to("sim:0")))


def test_list_and_pad_on_the_models_device():
    """With join="list", each lane's output moves to the model's device. With "pad", sizes may differ."""

    class Generate(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, : 1 + x.device.index]

    model = Generate(5, 4, dtype=torch.float64).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, join="list"):
        assert devices_of(model(rows())) == ["sim:0"] * 4
    with torch.no_grad(), parallel(model, SIMS, join="pad", pad_value=-1):
        assert (model(rows(9)) == -1).sum(1).tolist() == [3, 3, 3, 2, 2, 1, 1, 0, 0]
    shapes = re.escape("the shapes (3, 1), (2, 2), (2, 3), (2, 4) differ beyond dim 0")
    with torch.no_grad(), parallel(model, SIMS), pytest.raises(GatherError, match=shapes):
        model(rows(9))


# ---------------------------------------------------------------- values that every lane gets whole


def test_whole_tensors_are_copied_once():
    """A tensor with `in_dims` None travels once to each lane's device, and comes back as the caller's."""
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


@pytest.mark.parametrize("place", ["cpu", "sim:0", "sim:3"])
def test_whole_tensors_get_summed_gradients(place):
    shift = torch.randn(3, dtype=torch.float64, device=place, requires_grad=True)
    model = Sum().to("sim:0")
    with parallel(model, SIMS, in_dims={"y": None}):
        model(rows(9), shift).sum().backward()
    torch.testing.assert_close(shift.grad, torch.full_like(shift, 9.0))


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize(("default", "home"), [("sim:0", "sim:0"), ("sim", "sim:0"), ("sim:2", "sim:2"), (None, "cpu")])
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
    """Grad mode, inference mode, and autocast apply in every lane, and not after the caller left them."""

    class Modes(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            seen.append((str(x.device), torch.is_grad_enabled(), torch.is_inference_mode_enabled(), y.dtype))
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


def test_autocast_gradients():
    """Gradients under autocast equal the plain ones within bfloat16 precision."""
    model = nn.Linear(5, 3).to("sim:0")
    plain = copy.deepcopy(model)
    x = torch.randn(9, 5)
    with torch.autocast("sim", torch.bfloat16):
        plain(x.to("sim:0")).float().sum().backward()
        with parallel(model, SIMS):
            model(x).float().sum().backward()
    assert_same_gradients(model, plain, rtol=2e-2, atol=2e-2)


# ---------------------------------------------------------------- map, submit, and threads


@HOMES
def test_map_in_order(home):
    """`map` yields the plain outputs in order, on the model's device, with the plain gradients."""
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


def test_map_uses_every_device():
    """Four batches that wait for each other all finish. Idle devices get batches while others are busy."""
    together = threading.Barrier(4, timeout=PATIENCE_S)

    class Meeting(Where):
        def forward(self, x):
            together.wait()
            return super().forward(x)

    model = Meeting().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = torch.cat(list(p.map([torch.zeros(1) for _ in range(4)])))
    assert sorted(outputs[:, 0].tolist()) == [0, 1, 2, 3]


def test_prepare_runs_before_the_copy():
    """`prepare` makes CPU tensors in the lane; the model gets them on its own device."""
    model = Where().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = list(p.map(range(6), prepare=lambda number: torch.full((1, 1), float(number))))
    assert [str(output.device) for output in outputs] == ["sim:0"] * 6


def test_nested_blocks():
    """Inside a block on a model, a block on its submodule runs plainly in the lanes, with the plain output."""
    model = mlp().to("sim:0")
    x = rows()
    expected = model(x.to("sim:0"))
    with parallel(model, SIMS), parallel(model[0], ["sim:0", "sim:3"]):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("devices", [["sim:0", "sim:7"], "sim:7", 5, [0, 4], ["cuda:0"]], ids=str)
def test_absent_devices_are_refused(devices):
    """The message names the devices that this process sees, before the block starts."""
    with pytest.raises(DeviceUnavailableError, match=r"is not available.*(sim:0 to sim:3|devices?=\"auto\")"):
        parallel(mlp(), devices)
    with pytest.raises(DeviceListError, match="mixes the types"):
        parallel(mlp(), ["sim:0", "cpu"])


@pytest.mark.parametrize("failing", [0, 3])
def test_errors_name_lane_and_device(failing):
    """An error keeps its type and gains a note. The block stays usable."""

    class Fragile(nn.Linear):
        def forward(self, x):
            if (x == failing).any():
                raise KeyError("mine")
            return super().forward(x)

    model = Fragile(1, 1).to("sim:0")
    x = torch.arange(4.0)[:, None]
    with torch.no_grad(), parallel(model, SIMS, out_dims=0) as p:
        model(x + 10)
        with pytest.raises(KeyError, match="mine") as caught:
            model(x)
        outputs = p.map([x + 10, x, x])
        next(outputs)
        with pytest.raises(KeyError, match="mine") as mapped:
            next(outputs)
        torch.testing.assert_close(model(x + 10), model.weight * (x + 10).to("sim:0") + model.bias)
    assert f"in lane {failing} on sim:{failing}, shard {failing} of 4: 1 of 4 rows" in caught.value.__notes__
    assert re.search(r"in lane \d on sim:\d", "".join(mapped.value.__notes__))


def test_unequal_row_counts_are_refused():
    model = Sum().to("sim:0")
    with parallel(model, SIMS), pytest.raises(ShardError, match="the rows of the call disagree"):
        model(rows(8), rows(6, 3).to("sim:1"))


def test_models_on_wrong_devices():
    """A model on two devices, or on the meta device, is refused, and the error names the parameters."""
    model = mlp().to("sim:0")
    model[2].to("sim:1")
    with pytest.raises(ReplicaError, match=r"'0\.weight' on sim:0 and '2\.weight' on sim:1"), parallel(model, SIMS):
        model(rows())
    model = mlp().to("meta")
    with parallel(model, SIMS), pytest.raises(ReplicaError, match=re.escape("'0.weight' is on the meta device")):
        model(rows())

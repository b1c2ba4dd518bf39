"""A parallel block over four devices has the plain model's outputs and gradients."""

from __future__ import annotations

import copy
import gc
import re
import threading

import pytest
import torch
from torch import Tensor, nn

from parawrap import DeviceListError, DeviceUnavailableError, GatherError, ReplicaError, ShardError, parallel
from tests import simdevice
from tests.devices.zoo import SIMS, Where, assert_same_gradients, assert_same_training_step, devices_of, mlp, rows

# ---------------------------------------------------------------- devices of the lanes, the model, and the inputs


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize(
    "devices",
    [
        SIMS,
        None,
        "auto",
        "sim",
        4,
        2,
        [0, 1],
        ["sim:1", "sim:1"],
        ["sim:2", "sim:0"],
        ["sim:1", "sim:2"],
        "sim:1",
        ["cpu", "cpu"],
    ],
    ids=str,
)
def test_outputs_and_gradients_equal_the_plain_ones(devices, home):
    """Outputs, their device, and gradients equal the plain ones for any lanes and any device of the model."""
    assert_same_training_step(mlp().to(home), rows(11), devices)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (None, SIMS),
        ("auto", SIMS),
        ("sim", SIMS),
        (4, SIMS),
        (2, SIMS[:2]),
        ([1, 0], ["sim:1", "sim:0"]),
        ("sim:2", ["sim:2"]),
        (torch.device("sim:1"), ["sim:1"]),
        (["sim:1", torch.device("sim:1")], ["sim:1", "sim:1"]),
        ("cpu", None),
    ],
    ids=str,
)
def test_ways_to_name_devices(devices, expected):
    """Each form of `devices` gives one lane per device, in order."""
    lanes = list(map(str, parallel(mlp(), devices).devices))
    assert lanes == expected if expected is not None else set(lanes) == {"cpu"}


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0"], ["sim:1", "sim:1", "sim:3"]], ids=str)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_each_shard_runs_on_its_lane(devices, home):
    """Shard i runs on device i, where its parameters also lie."""
    model = Where().to(home)
    with torch.no_grad(), parallel(model, devices) as p:
        indices = model(torch.zeros(11)).tolist()
    sizes = p.stats().shards
    assert sum(sizes) == 11
    assert indices == [int(device[-1]) for device, size in zip(devices, sizes, strict=True) for _ in range(size)]


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("given", ["cpu", "sim:0", "sim:2"])
def test_input_may_lie_anywhere(given, home):
    """For an input on any device, the output is the plain one and lies on the model's device."""
    model = mlp().to(home)
    x = rows()
    expected = model(x.to(home)).detach()
    with torch.no_grad(), parallel(model, SIMS):
        torch.testing.assert_close(model(x.to(given)), expected)


@torch.no_grad()
@pytest.mark.parametrize("lanes", [["cpu", "cpu"], ["cpu"]], ids=["two", "one"])
@pytest.mark.parametrize("moves", ["before", "inside"])
def test_cpu_lanes_of_a_model_on_a_device(lanes, moves):
    """Outputs lie on the model's device for any number of rows, wherever the input lies."""
    model = mlp().to("sim:1" if moves == "before" else "cpu")
    with parallel(model, lanes, out_dims=0) as p:
        model.to("sim:1")
        for x in rows().cpu(), rows().cpu().to("sim:1"):
            for count in len(x), 1, 0:
                assert model(x[:count]).device == torch.device("sim:1")
                assert p.submit(x[:count]).result().device == torch.device("sim:1")


@torch.no_grad()
@pytest.mark.parametrize("count", [6, 1, 0])
def test_cpu_lanes_take_inputs_from_a_device(count):
    """Short batches are moved to the lanes like long ones. A function's output lies where its first tensor does."""
    model, x = nn.Linear(3, 2), torch.ones(count, 3, device="sim:1")
    with parallel(model, ["cpu", "cpu"], out_dims=0):
        assert model(x).device.type == "cpu"
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0) as p:
        assert p(x).device == x.device
    with parallel(torch.tanh, ["cpu", "cpu"], out_dims=0, output_device="cpu") as p:
        assert p(x).device.type == "cpu"


class Sum(nn.Module):
    """Adds a second input to the output of a linear layer, and optionally scales the sum."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, y, scale=None):
        output = self.linear(x) + y
        return output if scale is None else output * scale


def test_inputs_on_different_devices():
    """Inputs of one call on the CPU and on two devices are all moved to each lane's device."""
    model = Sum().to("sim:0")
    x, y, scale = rows(), rows(width=3), torch.tensor(2.0, dtype=torch.float64)
    expected = model(x.to("sim:0"), y.to("sim:0"), scale)
    with parallel(model, SIMS):
        torch.testing.assert_close(model(x, y.to("sim:0"), scale.to("sim:3")), expected)


def test_gradients_reach_inputs_on_their_devices():
    """Inputs on the CPU and on a device get their gradients on their own device."""
    model = Sum().to("sim:0")
    x, y = rows().requires_grad_(), rows(width=3).to("sim:2").requires_grad_()
    plain_x = x.detach().to("sim:0").requires_grad_()
    plain_y = y.detach().to("sim:0").requires_grad_()
    model(plain_x, plain_y).square().sum().backward()
    with parallel(model, SIMS):
        model(x, y).square().sum().backward()
    torch.testing.assert_close(x.grad, plain_x.grad.cpu())
    torch.testing.assert_close(y.grad, plain_y.grad.to("sim:2"))


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


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 9, 12, 16])
@pytest.mark.filterwarnings("ignore:a call of .* rows on .* lanes:UserWarning")
def test_few_and_uneven_rows(count):
    """Any row count, also zero, gives as many output rows and the plain gradients."""
    assert_same_training_step(mlp().to("sim:0"), rows(count))


def test_call_without_tensors():
    """A call without tensor arguments runs once, on the model's device."""

    class Constant(nn.Linear):
        def forward(self):
            return self.weight.sum()

    model = Constant(5, 3).to("sim:1")
    with parallel(model, SIMS):
        output = model()
    torch.testing.assert_close(output, model())


def test_other_dim():
    """Rows on dim 1 are cut and joined there."""
    model = nn.Linear(5, 3, dtype=torch.float64).to("sim:0")
    x = torch.randn(4, 9, 5, dtype=torch.float64)
    with torch.no_grad(), parallel(model, SIMS, dim=1):
        output = model(x)
    torch.testing.assert_close(output, model(x.to("sim:0")).detach())


def test_nested_outputs():
    """Dicts, tuples, None, and losses in the output are joined leaf by leaf on the model's device."""

    class Many(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "more": (y.sum(1), None, [y.mean()]), "loss": y.mean()}

    model = Many(5, 3, dtype=torch.float64).to("sim:1")
    x = rows(9)
    with parallel(model, SIMS, reduce="mean"):
        outputs = model(x), model(x)
    torch.testing.assert_close(outputs, (model(x.to("sim:1")),) * 2)


class Loss(nn.Linear):
    """Returns one number for all rows."""

    def forward(self, x):
        return super().forward(x).mean()


def test_scalars_are_refused_without_reduce():
    """A scalar output raises in every call, and the error names the options."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(GatherError, match=r'no reduction is right for every number.*reduce="mean".*out_dims=None'):
                model(rows(9))


def test_a_scalar_that_is_the_same_in_every_lane():
    """With None in `out_dims`, a number that is equal in all lanes is returned once; different numbers raise."""

    class Version(nn.Linear):
        def forward(self, x):
            return super().forward(x), 7, self.weight.sum()

    model = Version(5, 3, dtype=torch.float64).to("sim:1")
    x = rows(8)
    with parallel(model, SIMS, out_dims=(0, None, None)):
        torch.testing.assert_close(model(x), Version.forward(model, x.to("sim:1")))
    loss = Loss(5, 3, dtype=torch.float64).to("sim:1")
    with parallel(loss, SIMS, out_dims=None), pytest.raises(GatherError, match="returned different values"):
        loss(x)


@pytest.mark.parametrize("count", [9, 1])
def test_stacked_scalars_are_one_value_per_lane(count):
    """reduce="stack" returns a vector with one value per lane, also for a single row, which uses one lane."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    with parallel(model, SIMS, reduce="stack"):
        assert model(rows(count)).shape == (min(count, 4),)


@pytest.mark.parametrize("count", [9, 1])
def test_a_function_reduces_scalars(count):
    """A function as `reduce` gets the vector of the lanes' numbers, also from a single lane."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    shapes = []
    with parallel(model, SIMS, reduce=lambda vector: (shapes.append(tuple(vector.shape)), vector.max())[1]):
        assert model(rows(count)).shape == ()
    assert shapes == [(min(count, 4),)]


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_reductions_of_scalars(reduce):
    """Scalars from four devices are added, or stacked, on the model's device."""

    class Total(nn.Linear):
        def forward(self, x):
            return super().forward(x).sum()

    model = Total(5, 3, dtype=torch.float64).to("sim:0")
    x = rows(9)
    with parallel(model, SIMS, reduce=reduce):
        output = model(x)
    assert str(output.device) == "sim:0"
    assert output.shape == ((4,) if reduce == "stack" else ())
    torch.testing.assert_close(output.sum(), model(x.to("sim:0")))


def test_list_join_moves_outputs_to_the_models_device():
    """With join="list", each lane's output lies on the model's device."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, join="list"):
        outputs = model(rows())
    assert devices_of(outputs) == ["sim:0"] * 4


def test_callable_over_devices():
    """A plain function runs over four devices, and its outputs are joined."""
    x = rows()
    with parallel(torch.tanh, SIMS) as p:
        output = p(x)
        again = p(x.to("sim:2"))
    torch.testing.assert_close(output.cpu(), x.tanh())
    torch.testing.assert_close(again.cpu(), x.tanh())


def test_scalar_of_callable_over_devices():
    """With reduce="mean", scalars that a function returns on four devices are averaged, weighted by rows."""
    x = rows()
    with parallel(lambda x: x.mean(), SIMS, reduce="mean") as p:
        for _ in range(2):
            torch.testing.assert_close(p(x).cpu(), x.mean())


def test_module_without_parameters():
    """A module without parameters or buffers runs over four devices."""
    model = nn.Tanh()
    x = rows().to("sim:0")
    with parallel(model, SIMS):
        output = model(x)
    torch.testing.assert_close(output.cpu(), x.tanh().cpu())


def test_module_with_only_a_tensor_attribute():
    """A module that holds only a tensor in a plain attribute runs over four devices."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.full((5,), 2.0, dtype=torch.float64, device="sim:0")

        def forward(self, x):
            return x * self.scale

    model = Scale()
    x = rows().to("sim:0")
    with parallel(model, SIMS, output_device="sim:0"):
        torch.testing.assert_close(model(x), 2 * x)


# ---------------------------------------------------------------- values that every lane gets whole


def test_broadcast_tensor_is_copied_to_each_device():
    """A tensor with `in_dims` None is copied whole, once, to each lane's device."""
    seen = []

    def forward(x, table):
        seen.append((str(x.device), str(table.device), tuple(table.shape)))
        return x + table.sum()

    x, table = rows(8).to("sim:0"), torch.ones(6, dtype=torch.float64, device="sim:0")
    with parallel(forward, SIMS, in_dims={"table": None}, out_dims=0, output_device="sim:0") as p:
        simdevice.reset_stats()
        output = p(x, table)
        assert simdevice.stats().d2d == 3 + 3 + 3  # shards of x out, table out, outputs back
    assert sorted(seen) == [(device, device, (6,)) for device in SIMS]
    torch.testing.assert_close(output, x + 6)


@pytest.mark.parametrize("place", ["cpu", "sim:0", "sim:3"])
def test_broadcast_leaf_gets_the_summed_gradient(place):
    """A broadcast tensor that requires grad gets the sum of the lanes' gradients."""
    shift = torch.randn(3, dtype=torch.float64, device=place, requires_grad=True)
    model = Sum().to("sim:0")
    with parallel(model, SIMS, in_dims={"y": None}):
        model(rows(9), shift).sum().backward()
    torch.testing.assert_close(shift.grad, torch.full_like(shift, 9.0))


def test_returned_broadcast_tensor():
    """The call returns a broadcast tensor once if the model returns it unchanged."""
    x, table = rows(9).to("sim:0"), torch.ones(6, dtype=torch.float64, device="sim:0")
    with parallel(lambda x, table: (x, table), SIMS, in_dims={"table": None}, output_device="sim:0") as p:
        _, output = p(x, table)
    torch.testing.assert_close(output, table)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_returned_parameter_or_buffer(kind):
    """The call returns a parameter or buffer once if forward returns it next to its rows, as the plain call does."""

    class Both(nn.Linear):
        def __init__(self):
            super().__init__(5, 3, dtype=torch.float64)
            self.register_buffer("table", torch.randn(4, 2, dtype=torch.float64))

        def forward(self, x):
            return super().forward(x), self.weight if kind == "parameter" else self.table

    model = Both().to("sim:0")
    expected = model(rows().to("sim:0"))[1]
    with parallel(model, SIMS):
        output = model(rows())[1]
    torch.testing.assert_close(output, expected)


class Mixed(nn.Module):
    """Returns rows, parameters as long as a shard, and a list with one item per row."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> dict:
        y = self.linear(x)
        names = [f"row {value:.3f}" for value in y[:, 0].tolist()]
        return {"rows": y, "tables": (self.linear.bias, self.linear.weight), "none": None, "names": names, "kind": "mixed"}


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("count", [9, 10, 11])
def test_rows_and_lists_are_concatenated_and_tables_are_returned_once(count, home):
    """This holds from the first call, also for tables that are as long as a shard."""
    model = Mixed().to(home)
    x = rows(count)
    expected = model(x.to(home))
    with torch.no_grad(), parallel(model, SIMS):
        for _ in range(3):
            output = model(x)
            assert (output["names"], output["kind"], output["none"]) == (expected["names"], "mixed", None)
            assert output["tables"] == (model.linear.bias, model.linear.weight)
            torch.testing.assert_close(output["rows"], expected["rows"])


@pytest.mark.parametrize("home", ["sim:0", "sim:3", "cpu"])
def test_calls_of_zero_and_one_rows_are_plain(home):
    """A call of zero rows or one row has the plain output, including a parameter, before and after a cut call."""

    class WithTable(nn.Linear):
        def forward(self, x):
            return super().forward(x), self.weight

    model = WithTable(5, 3, dtype=torch.float64).to(home)
    with torch.no_grad(), parallel(model, SIMS):
        for count in (1, 0, 9, 1, 0, 10):
            x = rows(count)
            torch.testing.assert_close(model(x), WithTable.forward(model, x.to(home)))


class Filtered(nn.Module):
    """Returns the rows whose first value is positive."""

    def forward(self, x):
        return x[x[:, 0] > 0]


def test_a_filter_is_refused_unless_it_is_declared():
    """A filter that drops rows is refused, also if all lanes return equal values. With "ragged", its rows are joined."""
    ones, few = torch.ones(10, 5), -torch.ones(10, 5)
    few[[0, 3, 6, 8]] = 1  # one row per lane
    with torch.no_grad(), parallel(Filtered(), SIMS, output_device="cpu") as p:
        for _ in range(2):
            torch.testing.assert_close(p(ones), ones)
            with pytest.raises(GatherError, match="out_dims"):
                p(few)
    with torch.no_grad(), parallel(Filtered(), SIMS, out_dims="ragged", output_device="cpu") as p:
        for x in (ones, few, rows(8)):
            torch.testing.assert_close(p(x), x[x[:, 0] > 0])


@pytest.mark.parametrize("count", [4, 8, 10])
def test_declared_outputs_of_all_sorts(count):
    """`out_dims` takes a dim per output (an LSTM's states have rows on dim 1), None, and "items"."""

    class Recurrent(nn.LSTM):
        def forward(self, x):
            output, states = super().forward(x)
            return output, states, self.weight_ih_l0.sum(1), [str(len(row)) for row in x]

    model = Recurrent(5, 4, batch_first=True, dtype=torch.float64).to("sim:0")
    x = torch.randn(count, 6, 5, dtype=torch.float64)
    expected = model(x.to("sim:0"))
    with torch.no_grad(), parallel(model, SIMS, out_dims=(0, (1, 1), None, "items")) as p:
        for _ in range(2):
            output = model(x)
            assert output[3] == expected[3]
            torch.testing.assert_close(output[:3], expected[:3])
        assert len(p.stats().shards) == 4


def test_padding_to_the_longest_lane():
    """With join="pad", outputs with different sizes on other dims are padded to the longest lane."""

    class Generate(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, : 1 + x.device.index]

    model = Generate(5, 4, dtype=torch.float64).to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, join="pad", pad_value=-1):
        for _ in range(2):
            output = model(rows(9))
            assert output.shape == (9, 4)
            assert (output == -1).sum(1).tolist() == [3, 3, 3, 2, 2, 1, 1, 0, 0]


def test_no_output_is_kept_after_close():
    """After the block, no device memory of it is left."""
    model = nn.Linear(5, 1000).to("sim:0")
    gc.collect()
    before = simdevice.stats().live_bytes
    with torch.no_grad(), parallel(model, ["sim:0", "sim:1"]):
        model(torch.randn(5, 5))
    gc.collect()
    assert simdevice.stats().live_bytes == before


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


def test_default_device_of_a_function_is_the_same_in_all_lanes():
    """Tensors that a function makes without a `device` argument lie on the same kind of device in all lanes."""
    with parallel(lambda x: torch.zeros(1).device.type, SIMS, join="list") as p:
        kinds = p(torch.zeros(8))
    assert len(set(kinds)) == 1, kinds


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_is_carried(grad):
    """Every lane computes in the autocast dtype under autocast, and in float32 after it."""
    model = nn.Linear(5, 3).to("sim:0")
    x = torch.randn(9, 5)
    with torch.set_grad_enabled(grad), parallel(model, SIMS, join="list"):
        with torch.autocast("sim", torch.bfloat16):
            inside = [output.dtype for output in model(x)]
        outside = [output.dtype for output in model(x)]
    assert inside == [torch.bfloat16] * 4
    assert outside == [torch.float32] * 4


def test_autocast_gradients():
    """Gradients under autocast equal the plain ones within bfloat16 precision."""
    model = nn.Linear(5, 3).to("sim:0")
    plain = copy.deepcopy(model)
    x = torch.randn(9, 5)
    with torch.autocast("sim", torch.bfloat16):
        plain(x.to("sim:0")).float().sum().backward()
        with parallel(model, SIMS):
            model(x).float().sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_are_carried(mode):
    """The caller's grad mode and inference mode apply in every lane."""

    class Modes(nn.Linear):
        def forward(self, x):
            seen.append((str(x.device), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().forward(x)

    seen: list[tuple[str, bool, bool]] = []
    model = Modes(5, 3).to("sim:0")
    with mode(), parallel(model, SIMS):
        model(torch.randn(9, 5))
        expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    assert sorted(seen) == [(device, *expected) for device in SIMS]


def test_current_device_is_the_lanes():
    """Each lane's device is the current device in that lane. The caller's current device does not change."""
    with parallel(lambda x: torch.sim.current_device(), SIMS, join="list") as p:
        assert p(torch.zeros(8)) == [0, 1, 2, 3]
    assert torch.sim.current_device() == 0


# ---------------------------------------------------------------- map and submit


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
def test_map_yields_plain_outputs_in_order(home):
    """`map` over four devices yields the plain outputs in order, on the model's device."""
    model = mlp().to(home)
    batches = [rows(1 + index % 4) for index in range(11)]
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = list(p.map(batches))
    torch.testing.assert_close(outputs, [model(batch.to(home)).detach() for batch in batches])


def test_map_uses_every_device():
    """`map` sends batches to idle devices while others are busy: four batches that wait for each other all finish."""
    together = threading.Barrier(4, timeout=60)

    class Meeting(Where):
        def forward(self, x):
            together.wait()
            return super().forward(x)

    model = Meeting().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = torch.cat(list(p.map([torch.zeros(1) for _ in range(4)])))
    assert sorted(outputs.tolist()) == [0, 1, 2, 3]


def test_map_gradients():
    """A loss over mapped outputs gives the plain gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    batches = [rows(3) for _ in range(6)]
    sum(plain(batch.to("sim:0")).square().sum() for batch in batches).backward()
    with parallel(model, SIMS) as p:
        sum(output.square().sum() for output in p.map(batches)).backward()
    assert_same_gradients(model, plain)


def test_submit():
    """A submitted call has the plain output, on the model's device."""
    model = mlp().to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS) as p:
        futures = [p.submit(x) for _ in range(8)]
        outputs = [future.result(20) for future in futures]
    torch.testing.assert_close(outputs, [model(x.to("sim:0")).detach()] * 8)


def test_submit_after_a_parameter_change():
    """A call submitted after a parameter change uses the changed parameters."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        for _ in range(5):
            futures = [p.submit(rows(4)) for _ in range(4)]
            [future.result(20) for future in futures]
            for parameter in model.parameters():
                parameter.add_(0.25)
            x = rows(3)
            expected = copy.deepcopy(model)(x.to("sim:0"))
            for future in [p.submit(x) for _ in range(4)]:
                torch.testing.assert_close(future.result(20), expected)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("devices", [["sim:0", "sim:7"], "sim:7", 5, [0, 4], ["cuda:0"]], ids=str)
def test_an_absent_device_is_refused(devices):
    """parallel() raises for an absent device before the block starts."""
    with pytest.raises(DeviceUnavailableError, match="is not available"):
        parallel(mlp(), devices)


def test_the_error_for_an_absent_device_lists_the_present_devices():
    """The message names the devices that this process sees."""
    with pytest.raises(DeviceUnavailableError, match="'sim:7' is not available: this process sees sim:0 to sim:3"):
        parallel(mlp(), ["sim:7"])


def test_two_kinds_of_device_are_refused():
    """parallel() raises if lanes are on devices of two kinds."""
    with pytest.raises(DeviceListError, match="mixes the types"):
        parallel(mlp(), ["sim:0", "cpu"])


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_error_in_a_lane_names_its_device(failing):
    """An error keeps its type and gains a note with lane, device, and shard. The block stays usable."""

    class Fragile(nn.Linear):
        def forward(self, x):
            if (x == failing).any():
                raise KeyError("mine")
            return super().forward(x)

    model = Fragile(1, 1).to("sim:0")
    x = torch.arange(4.0)[:, None]
    with torch.no_grad(), parallel(model, SIMS, out_dims=0):
        model(x + 10)
        with pytest.raises(KeyError, match="mine") as caught:
            model(x)
        torch.testing.assert_close(model(x + 10), model.weight * (x + 10).to("sim:0") + model.bias)
    assert f"in lane {failing} on sim:{failing}, shard {failing} of 4: 1 of 4 rows" in caught.value.__notes__


def test_error_in_a_mapped_batch_names_its_lane():
    """`map` raises a batch's error at that batch's position, with a note that names the lane."""

    def fragile(x):
        if x[0] == 2:
            raise KeyError("mine")
        return x

    with parallel(fragile, SIMS, output_device="cpu") as p:
        outputs = p.map([torch.tensor([float(index)]) for index in range(5)])
        assert [next(outputs).item(), next(outputs).item()] == [0, 1]
        with pytest.raises(KeyError, match="mine") as caught:
            next(outputs)
    assert re.search(r"in lane \d on sim:\d", "".join(caught.value.__notes__))


def test_unequal_row_counts_are_refused():
    """Inputs with different row counts raise, also on different devices."""
    model = Sum().to("sim:0")
    with parallel(model, SIMS), pytest.raises(ShardError, match="the rows of the call disagree"):
        model(rows(8), rows(6, 3).to("sim:1"))


def test_outputs_that_cannot_be_joined():
    """Outputs with different sizes on other dims raise an error that names the shapes of all lanes."""

    class Ragged(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, : x.device.index + 1]

    model = Ragged(5, 4).to("sim:0")
    shapes = re.escape("the shapes (3, 1), (2, 2), (2, 3), (2, 4) differ beyond dim 0")
    with parallel(model, SIMS), pytest.raises(GatherError, match=shapes):
        model(torch.randn(9, 5))


def test_a_model_on_two_devices_is_refused():
    """The error names two parameters and their devices."""
    model = mlp().to("sim:0")
    model[2].to("sim:1")
    with pytest.raises(ReplicaError, match=r"'0\.weight' on sim:0 and '2\.weight' on sim:1"), parallel(model, SIMS):
        model(rows())


def test_a_model_on_the_meta_device_is_refused():
    """Each call raises and names a parameter on the meta device."""
    model = mlp().to("meta")
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=re.escape("'0.weight' is on the meta device")):
                model(rows())


# ---------------------------------------------------------------- after the block, nested blocks, threads


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_the_block_leaves_the_model_unchanged(home):
    """After the block, the `vars` of every module are equal to those before it."""
    model = mlp().to(home)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with parallel(model, SIMS):
        model(rows()).sum().backward()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_nested_blocks():
    """Inside a block on a model, a block on its submodule runs plainly in the lanes, with the plain output."""
    model = mlp().to("sim:0")
    x = rows()
    expected = model(x.to("sim:0"))
    with parallel(model, SIMS), parallel(model[0], ["sim:0", "sim:3"]):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)


def test_calls_from_several_threads():
    """Concurrent calls from several threads each return their own rows."""
    model = mlp().to("sim:0")
    inputs = [rows(5 + index) for index in range(6)]
    outputs: dict[int, Tensor] = {}

    def call(index: int) -> None:
        for _ in range(5):
            outputs[index] = model(inputs[index]).detach()

    with parallel(model, SIMS, out_dims=0):
        threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for index, x in enumerate(inputs):
        torch.testing.assert_close(outputs[index], model(x.to("sim:0")).detach())


def test_a_whole_argument_that_is_returned_is_the_callers():
    """A row on the CPU, which every lane gets whole, comes back as the caller's tensor, by position and by keyword."""

    class Keeps(nn.Module):
        def forward(self, x, table):
            return x + table.sum(), table

    x, table = torch.randn(9, 3), torch.randn(1, 2)
    with torch.no_grad(), parallel(Keeps(), SIMS) as p:
        for _ in range(2):
            assert p(x, table)[1] is table
            assert p(x, table=table)[1] is table

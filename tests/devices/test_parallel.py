"""A parallel block over four devices answers and learns as the plain model does."""

from __future__ import annotations

import copy
import re
import threading

import pytest
import torch
from torch import Tensor, nn

from parawrap import DeviceListError, DeviceUnavailableError, GatherError, ReplicaError, ShardError, VerifyError, parallel
from tests import simdevice
from tests.devices.zoo import SIMS, Where, assert_same_gradients, assert_same_training_step, devices_of, mlp, rows

# ---------------------------------------------------------------- where the lanes and the model are


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
def test_answers_and_gradients_are_the_plain_ones(devices, home):
    """Whatever the devices, and wherever the model is, outputs, their device and all gradients are the plain ones."""
    assert_same_training_step(mlp().to(home), rows(), devices)


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
def test_names_of_devices(devices, expected):
    """Each way to name devices gives one lane for each of them, in order."""
    lanes = list(map(str, parallel(mlp(), devices).devices))
    assert lanes == expected if expected is not None else set(lanes) == {"cpu"}


@pytest.mark.parametrize("devices", [SIMS, ["sim:2", "sim:0"], ["sim:1", "sim:1", "sim:3"]], ids=str)
@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_each_shard_runs_on_its_lane(devices, home):
    """The rows of shard i run on device i, with the parameters beside them."""
    model = Where().to(home)
    with torch.no_grad(), parallel(model, devices) as p:
        model(torch.zeros(12))  # the first call of a kind has shards of different sizes
        indices = model(torch.zeros(12)).tolist()
    share = 12 // len(devices)
    assert indices == [int(device[-1]) for device in devices for _ in range(share)]
    assert p.stats().shards == (share,) * len(devices)


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
@pytest.mark.parametrize("given", ["cpu", "sim:0", "sim:2"])
def test_input_may_lie_anywhere(given, home):
    """An input on any device gives the plain output where the model is."""
    model = mlp().to(home)
    x = rows()
    expected = model(x.to(home)).detach()
    with torch.no_grad(), parallel(model, SIMS):
        torch.testing.assert_close(model(x.to(given)), expected)


class Sum(nn.Module):
    """A linear layer of one input, and another input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, y, scale=None):
        output = self.linear(x) + y
        return output if scale is None else output * scale


def test_inputs_on_different_devices():
    """Inputs of one call that lie on the CPU and on two devices meet on each lane's device."""
    model = Sum().to("sim:0")
    x, y, scale = rows(), rows(width=3), torch.tensor(2.0, dtype=torch.float64)
    expected = model(x.to("sim:0"), y.to("sim:0"), scale)
    with parallel(model, SIMS):
        torch.testing.assert_close(model(x, y.to("sim:0"), scale.to("sim:3")), expected)


def test_gradients_reach_inputs_on_their_devices():
    """Gradients flow back to inputs on the CPU and on a device."""
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
    """Outputs are joined where `output_device` says, and gradients come home from there."""
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
def test_few_and_uneven_rows(count):
    """Any number of rows, none included, comes back as that many rows with the plain gradients."""
    assert_same_training_step(mlp().to("sim:0"), rows(count))


def test_call_without_tensors():
    """A call without a tensor runs once and answers where the model is."""

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
    """Dicts, tuples, None and losses in the output are joined leaf by leaf on the home device."""

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


@pytest.mark.parametrize("count", [9, 8])
def test_scalars_are_refused_unless_reduce_says_what_they_are(count):
    """A number from each lane raises, in the first call and in later ones, and the error names the options."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(GatherError, match=r'no reduction is right for every number.*reduce="mean".*out_dims=None'):
                model(rows(count))


def test_a_scalar_that_is_the_same_in_every_lane():
    """With out_dims None for it, a number that all lanes agree on comes back once; one that differs is refused."""

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
    """reduce="stack" returns a vector with one value per lane, also if one row leaves work for one lane only."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    with parallel(model, SIMS, reduce="stack"):
        assert model(rows(count)).shape == (min(count, 4),)


@pytest.mark.parametrize("count", [9, 1])
def test_a_function_reduces_scalars(count):
    """A function as `reduce` gets the vector of the lanes' numbers, also of a single lane."""
    model = Loss(5, 3, dtype=torch.float64).to("sim:0")
    shapes = []
    with parallel(model, SIMS, reduce=lambda vector: (shapes.append(tuple(vector.shape)), vector.max())[1]):
        assert model(rows(count)).shape == ()
    assert shapes == [(min(count, 4),)]


@pytest.mark.parametrize("reduce", ["sum", "stack"])
def test_reductions_of_scalars(reduce):
    """Scalars of four devices are added, or stacked, on the home device."""

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


def test_list_join_brings_outputs_home():
    """With join="list" the outputs of the lanes lie where the model is."""
    model = mlp().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS, join="list"):
        outputs = model(rows())
    assert devices_of(outputs) == ["sim:0"] * 4


def test_callable_over_devices():
    """A function that is no module runs over four devices and its outputs are joined."""
    x = rows()
    with parallel(torch.tanh, SIMS) as p:
        output = p(x)
        again = p(x.to("sim:2"))
    torch.testing.assert_close(output.cpu(), x.tanh())
    torch.testing.assert_close(again.cpu(), x.tanh())


def test_scalar_of_callable_over_devices():
    """The scalars that a function returns on four devices are averaged, weighted by rows."""
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


def test_module_with_nothing_but_an_attribute():
    """A module without parameters, but with a tensor in a plain attribute, runs over four devices."""

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
    """A tensor of in_dims None reaches every lane whole, on the lane's device, by one copy a device."""
    seen = []

    def forward(x, table):
        seen.append((str(x.device), str(table.device), tuple(table.shape)))
        return x + table.sum()

    x, table = rows(8).to("sim:0"), torch.ones(6, dtype=torch.float64, device="sim:0")
    with parallel(forward, SIMS, in_dims={"table": None}, output_device="sim:0") as p:
        p(x, table)  # the first call of a kind has shards of different sizes
        seen.clear()
        simdevice.reset_stats()
        output = p(x, table)
        assert simdevice.stats().d2d == 3 + 3 + 3  # x out, table out, outputs home
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


def test_broadcast_tensor_handed_back():
    """A tensor that every lane got whole, and returns as it is, comes back once."""
    x, table = rows(8).to("sim:0"), torch.ones(6, dtype=torch.float64, device="sim:0")
    with parallel(lambda x, table: (x, table), SIMS, in_dims={"table": None}, output_device="sim:0") as p:
        _, output = p(x, table)
    torch.testing.assert_close(output, table)


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_own_tensor_handed_back(kind):
    """A parameter or buffer that forward returns beside its rows comes back once, as from the plain call."""

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


# ---------------------------------------------------------------- modes


@pytest.mark.parametrize(("default", "home"), [("sim:0", "sim:0"), ("sim", "sim:0"), ("sim:2", "sim:2"), (None, "cpu")])
def test_default_device_follows_the_lane(default, home):
    """A model that makes tensors in forward without naming a device gets them on its lane's device."""

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
    """What a function makes without naming a device lies on devices of one kind in all lanes."""
    with parallel(lambda x: torch.zeros(1).device.type, SIMS, join="list") as p:
        kinds = p(torch.zeros(8))
    assert len(set(kinds)) == 1, kinds


@pytest.mark.parametrize("grad", [True, False])
def test_autocast_is_carried(grad):
    """Under autocast for the device every lane computes in its dtype, and none does after it."""
    model = nn.Linear(5, 3).to("sim:0")
    x = torch.randn(9, 5)
    with torch.set_grad_enabled(grad), parallel(model, SIMS, join="list"):
        with torch.autocast("sim", torch.bfloat16):
            inside = [output.dtype for output in model(x)]
        outside = [output.dtype for output in model(x)]
    assert inside == [torch.bfloat16] * 4
    assert outside == [torch.float32] * 4


def test_autocast_gradients():
    """Gradients under autocast equal the plain ones as far as bfloat16 goes."""
    model = nn.Linear(5, 3).to("sim:0")
    plain = copy.deepcopy(model)
    x = torch.randn(8, 5)
    with torch.autocast("sim", torch.bfloat16):
        plain(x.to("sim:0")).float().sum().backward()
        with parallel(model, SIMS):
            model(x).float().sum().backward()
    torch.testing.assert_close(model.weight.grad, plain.weight.grad, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_are_carried(mode):
    """Gradients and inference mode are on in every lane exactly where they are in the caller."""

    class Modes(nn.Linear):
        def forward(self, x):
            seen.append((str(x.device), torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            return super().forward(x)

    seen: list[tuple[str, bool, bool]] = []
    model = Modes(5, 3).to("sim:0")
    with mode(), parallel(model, SIMS):
        for _ in range(2):  # in turns in the caller's thread, then in the lanes
            seen.clear()
            model(torch.randn(9, 5))
            expected = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            assert sorted(seen) == [(device, *expected) for device in SIMS]


def test_current_device_is_the_lanes():
    """The current device is the lane's in each lane and is the caller's again afterwards."""
    with parallel(lambda x: torch.sim.current_device(), SIMS, join="list") as p:
        assert p(torch.zeros(8)) == [0, 1, 2, 3]
    assert torch.sim.current_device() == 0


# ---------------------------------------------------------------- verify


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_verify_passes_what_is_equal(home):
    """With verify, a model that treats rows independently passes."""
    model = mlp().to(home)
    with parallel(model, SIMS, verify=True):
        model(rows()).sum().backward()


def test_verify_sees_what_differs():
    """With verify, a norm over the batch is refused, and the plain run leaves no trace in its buffers."""
    model = nn.BatchNorm1d(5).double().to("sim:0")
    with parallel(model, SIMS, verify=True), pytest.raises(VerifyError, match="output differs from the plain call"):
        model(rows(12))
    assert model.num_batches_tracked == 1


# ---------------------------------------------------------------- map and submit


@pytest.mark.parametrize("home", ["sim:0", "cpu", "sim:3"])
def test_map_is_in_order_and_home(home):
    """Batches streamed over four devices come back in order, equal to the plain ones, where the model is."""
    model = mlp().to(home)
    batches = [rows(1 + index % 4) for index in range(11)]
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = list(p.map(batches))
    torch.testing.assert_close(outputs, [model(batch.to(home)).detach() for batch in batches])


def test_map_uses_every_device():
    """A batch goes to an idle device while other devices are busy: four batches can wait for each other."""
    together = threading.Barrier(4, timeout=5)

    class Meeting(Where):
        def forward(self, x):
            together.wait()
            return super().forward(x)

    model = Meeting().to("sim:0")
    with torch.no_grad(), parallel(model, SIMS) as p:
        outputs = torch.cat(list(p.map([torch.zeros(1) for _ in range(4)])))
    assert sorted(outputs.tolist()) == [0, 1, 2, 3]


def test_map_gradients():
    """Losses of mapped batches give the plain gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    batches = [rows(3) for _ in range(6)]
    sum(plain(batch.to("sim:0")).square().sum() for batch in batches).backward()
    with parallel(model, SIMS) as p:
        sum(output.square().sum() for output in p.map(batches)).backward()
    assert_same_gradients(model, plain)


def test_submit():
    """A submitted call is run whole on one device and its future holds the plain output, at home."""
    model = mlp().to("sim:0")
    x = rows()
    with torch.no_grad(), parallel(model, SIMS) as p:
        futures = [p.submit(x) for _ in range(8)]
        outputs = [future.result(20) for future in futures]
    torch.testing.assert_close(outputs, [model(x.to("sim:0")).detach()] * 8)


def test_submitted_work_after_a_step():
    """A call submitted after the parameters changed sees the changed ones."""
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
def test_device_that_is_not_there(devices):
    """A device that is not there is refused when the block is made."""
    with pytest.raises(DeviceUnavailableError, match="is not there"):
        parallel(mlp(), devices)


def test_device_that_is_not_there_names_those_that_are():
    """The error says which devices there are."""
    with pytest.raises(DeviceUnavailableError, match=re.escape("'sim:7' is not there: this process sees sim:0 to sim:3")):
        parallel(mlp(), ["sim:7"])


def test_mixed_kinds_of_device():
    """Lanes on devices of two kinds are refused."""
    with pytest.raises(DeviceListError, match="mixes the types"):
        parallel(mlp(), ["sim:0", "cpu"])


@pytest.mark.parametrize("failing", [0, 2, 3])
def test_error_in_a_lane_names_its_device(failing):
    """An error keeps its type and notes the lane, its device and its shard; the block works on."""

    class Fragile(nn.Linear):
        def forward(self, x):
            if (x == failing).any():
                raise KeyError("mine")
            return super().forward(x)

    model = Fragile(1, 1).to("sim:0")
    x = torch.arange(4.0)[:, None]
    with torch.no_grad(), parallel(model, SIMS):
        model(x + 10)
        with pytest.raises(KeyError, match="mine") as caught:
            model(x)
        torch.testing.assert_close(model(x + 10), model.weight * (x + 10).to("sim:0") + model.bias)
    assert f"in lane {failing} on sim:{failing}, shard {failing} of 4" in caught.value.__notes__


@pytest.mark.parametrize(("failing", "lane", "shard"), [(0, 0, 0), (10, 2, 2), (13, 3, 3), (15, 3, 4)])
def test_error_in_the_first_call_names_its_shard(failing, lane, shard):
    """In the first call of a kind the last lane may run two shards: the note names the lane and the shard."""

    class Fragile(nn.Linear):
        def forward(self, x):
            if (x == failing).any():
                raise KeyError("mine")
            return super().forward(x)

    model = Fragile(1, 1).to("sim:0")
    x = torch.arange(16.0)[:, None]
    with torch.no_grad(), parallel(model, SIMS):
        with pytest.raises(KeyError, match="mine") as caught:
            model(x)
        torch.testing.assert_close(model(x + 20), model.weight * (x + 20).to("sim:0") + model.bias)
    assert f"in lane {lane} on sim:{lane}, shard {shard} of 5" in caught.value.__notes__


def test_error_in_a_mapped_batch_names_its_lane():
    """An error in map arrives in its batch's place and notes the lane."""

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


def test_rows_that_disagree():
    """Inputs of unequal rows are refused, whatever devices they are on."""
    model = Sum().to("sim:0")
    with parallel(model, SIMS), pytest.raises(ShardError, match="the rows of the call disagree"):
        model(rows(8), rows(6, 3).to("sim:1"))


def test_outputs_that_cannot_be_joined():
    """Ragged outputs are refused with the shapes of all lanes."""

    class Ragged(nn.Linear):
        def forward(self, x):
            return super().forward(x)[:, : x.device.index + 1]

    model = Ragged(5, 4).to("sim:0")
    shapes = re.escape("the shapes (3, 1), (2, 2), (2, 3), (2, 4) differ beyond dim 0")
    with parallel(model, SIMS), pytest.raises(GatherError, match=shapes):
        model(torch.randn(9, 5))


def test_model_on_several_devices():
    """A model on two devices is refused with the names of two parameters."""
    model = mlp().to("sim:0")
    model[2].to("sim:1")
    with pytest.raises(ReplicaError, match=r"'0\.weight' on sim:0 and '2\.weight' on sim:1"), parallel(model, SIMS):
        model(rows())


def test_model_on_meta():
    """A model without data is refused, at each call."""
    model = mlp().to("meta")
    with parallel(model, SIMS):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=re.escape("'0.weight' is on the meta device")):
                model(rows())


# ---------------------------------------------------------------- what is left behind


@pytest.mark.parametrize("home", ["sim:0", "cpu"])
def test_the_object_is_left_as_it_was(home):
    """After the block the model's dictionaries hold what they held before."""
    model = mlp().to(home)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with parallel(model, SIMS):
        model(rows()).sum().backward()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_nested_blocks():
    """A block on a part inside a block on the whole runs plainly in its lanes, with the plain answer."""
    model = mlp().to("sim:0")
    x = rows()
    expected = model(x.to("sim:0"))
    with parallel(model, SIMS), parallel(model[0], ["sim:0", "sim:3"]):
        for _ in range(2):
            torch.testing.assert_close(model(x), expected)


def test_module_captured_by_a_method():
    """A module that `forward` captures, and that the model does not hold, is refused with its name."""
    inner = nn.Linear(5, 3, dtype=torch.float64).to("sim:0")

    class Around(nn.Module):
        def forward(self, x):
            return inner(x)

    message = r"Around\.forward captures 'inner', which holds a Linear"
    with pytest.raises(ReplicaError, match=message), parallel(Around(), ["sim:0", "sim:0"]):
        pass


def test_calls_from_several_threads():
    """Calls from several threads at once each get their own rows back."""
    model = mlp().to("sim:0")
    inputs = [rows(5 + index) for index in range(6)]
    outputs: dict[int, Tensor] = {}

    def call(index: int) -> None:
        for _ in range(5):
            outputs[index] = model(inputs[index]).detach()

    with parallel(model, SIMS):
        threads = [threading.Thread(target=call, args=(index,)) for index in range(6)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    for index, x in enumerate(inputs):
        torch.testing.assert_close(outputs[index], model(x.to("sim:0")).detach())

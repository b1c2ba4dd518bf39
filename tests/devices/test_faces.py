"""DataParallel, TupleParallel, tuple_fn, ParallelWrapper, and recursive_to on four simulated devices."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from parawrap import (
    DataParallel,
    DeviceListError,
    DeviceUnavailableError,
    ParallelWrapper,
    ShardError,
    TupleParallel,
    cat,
    data_parallel,
    gather,
    parallel_apply,
    recursive_to,
    replicate,
    scatter,
    tp_collate,
    tuple_fn,
)
from tests import simdevice
from tests.devices.zoo import SIMS, Masked, assert_same_gradients, devices_of, mlp, rows


@pytest.fixture
def closing():
    """Register a wrapper, return it, and close it after the test."""
    made = []
    yield lambda wrapper: (made.append(wrapper), wrapper)[1]
    for wrapper in made:
        wrapper.close()


# ---------------------------------------------------------------- DataParallel


@pytest.mark.parametrize(
    ("device_ids", "ids"),
    [
        (None, [0, 1, 2, 3]),
        ([0, 1, 2, 3], [0, 1, 2, 3]),
        (["sim:0", "sim:1"], [0, 1]),
        ([torch.device("sim", 0), "sim:0"], [0, 0]),
    ],
    ids=str,
)
def test_data_parallel_step(device_ids, ids, closing):
    """The output lies on the first device; outputs and gradients are the plain ones; attributes are torch's."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = closing(DataParallel(model, device_ids))
    assert isinstance(wrapped, nn.DataParallel)
    assert (wrapped.device_ids, wrapped.output_device, wrapped.src_device_obj) == (ids, 0, torch.device("sim:0"))
    x = rows()
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        output, expected = wrapped(x), plain(x.to("sim:0"))
        torch.testing.assert_close(output, expected)
        output.square().sum().backward()
        expected.square().sum().backward()
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("output_device", [2, "sim:2", torch.device("sim", 2)], ids=str)
def test_data_parallel_output_device(output_device, closing):
    """DataParallel joins the output on `output_device`."""
    wrapped = closing(DataParallel(mlp().to("sim:0"), output_device=output_device))
    assert str(wrapped(rows()).device) == "sim:2"
    assert wrapped.output_device == 2


def test_data_parallel_whose_first_device_is_not_device_0(closing):
    """Any device can be first if the module's parameters are on it."""
    model = mlp().to("sim:2")
    wrapped = closing(DataParallel(model, [2, 0]))
    x = rows()
    torch.testing.assert_close(wrapped(x), model(x.to("sim:2")))


@pytest.mark.parametrize("output_device", [None, -1, 3, "cpu"], ids=str)
def test_data_parallel_function(output_device):
    """data_parallel joins the output on `output_device` (-1 is the CPU) and frees its replicas."""
    model = mlp().to("sim:0")
    x = rows()
    expected = model(x.to("sim:0")).detach()
    before = simdevice.stats().live_bytes
    with torch.no_grad():
        output = data_parallel(model, x, [0, 1, 2, 3], output_device)
    place = {None: "sim:0", -1: "cpu", 3: "sim:3", "cpu": "cpu"}[output_device]
    torch.testing.assert_close(output, expected.to(place))
    held = output.nbytes if place != "cpu" else 0
    assert simdevice.stats().live_bytes <= before + max(held, 512)


def test_data_parallel_refuses_a_module_that_is_not_on_its_first_device(closing):
    """The error has torch's message. After moving the module, the call works."""
    wrapped = closing(DataParallel(mlp()))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device sim:0") as caught:
        wrapped(rows())
    assert "found one of them on device: cpu" in str(caught.value)
    wrapped.to("sim:0")
    assert str(wrapped(rows()).device) == "sim:0"


def test_data_parallel_with_one_device_moves_the_module(closing):
    """With one device, DataParallel moves the module to that device, as torch does."""
    wrapped = closing(DataParallel(mlp(), ["sim:1"]))
    assert next(wrapped.parameters()).device == torch.device("sim:1")
    assert str(wrapped(rows()).device) == "sim:1"


@pytest.mark.parametrize("verb", ["scatter", "replicate", "parallel_apply", "gather"])
def test_data_parallel_verbs_can_be_overridden(verb, closing):
    """A subclass can override each verb and call the parent's method from it."""
    calls = []

    def overridden(self, *args):
        calls.append(len(args))
        return getattr(DataParallel, verb)(self, *args)

    mine = type("Mine", (DataParallel,), {verb: overridden})
    model = mlp().to("sim:0")
    wrapped = closing(mine(model))
    x = rows()
    torch.testing.assert_close(wrapped(x), model(x.to("sim:0")))
    assert calls == [{"scatter": 3, "replicate": 2, "parallel_apply": 3, "gather": 2}[verb]]


@pytest.mark.parametrize("verb", ["replicate", "parallel_apply"])
def test_data_parallel_with_an_overridden_verb_trains(verb, closing):
    """Replicas that are made for each call follow the optimizer, update statistics, and free their memory."""
    mine = type("Mine", (DataParallel,), {verb: lambda self, *args: getattr(DataParallel, verb)(self, *args)})
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double().to("sim:0")
    plain = copy.deepcopy(model)
    first, second = closing(mine(model)), closing(DataParallel(plain))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    before = None
    for _ in range(3):
        x = rows(16)
        for net, optimizer in zip((first, second), optimizers, strict=True):
            optimizer.zero_grad(set_to_none=False)
            net(x).square().sum().backward()
            optimizer.step()
        before = before or simdevice.stats().live_bytes
    torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()))
    assert simdevice.stats().live_bytes <= before


def test_the_functions_on_four_devices():
    """Parts, replicas, and outputs lie on the devices that the functions are given; gradients are the plain ones."""
    model = mlp().to("sim:1")
    x = rows(9).requires_grad_()
    devices = [1, "sim:0", torch.device("sim", 3), 2]
    parts = scatter(x, devices)
    assert devices_of(parts) == ["sim:1", "sim:0", "sim:3", "sim:2"]
    replicas = replicate(model, devices)
    assert devices_of([next(replica.parameters()) for replica in replicas]) == devices_of(parts)
    outputs = parallel_apply(replicas, parts, None, devices)
    assert devices_of(outputs) == devices_of(parts)
    assert devices_of(parallel_apply(replicas, parts)) == devices_of(parts)
    for target, place in ((2, "sim:2"), (-1, "cpu"), ("sim", "sim:0")):
        torch.testing.assert_close(gather(outputs, target), model(x.to("sim:1")).to(place))
    gather(outputs, -1).square().sum().backward()
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(x.detach().to("sim:1")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_data_parallel_finds_attributes(closing):
    """Attributes of the module are found, also on its device."""
    wrapped = closing(DataParallel(nn.Linear(5, 3).to("sim:0")))
    assert wrapped.in_features == 5
    assert str(wrapped.weight.device) == "sim:0"


@pytest.mark.parametrize("count", [8, 2, 1])
def test_data_parallel_scalars_become_a_vector(count, closing):
    """Scalar outputs become a vector with one value per shard, also when there is only one shard."""

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    wrapped = closing(DataParallel(Loss(5, 3).to("sim:0")))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        output = wrapped(torch.randn(count, 5))
    assert output.shape == (min(count, 4),)


def test_data_parallel_keyword_arguments(closing):
    """Tensor keyword arguments are cut like positional ones; other values go to every lane."""

    class Named(nn.Linear):
        def forward(self, x, *, shift, factor):
            return (super().forward(x) + shift) * factor

    model = Named(5, 3, dtype=torch.float64).to("sim:0")
    wrapped = closing(DataParallel(model))
    x, shift = rows(9), rows(9, 3)
    torch.testing.assert_close(wrapped(x, shift=shift, factor=2), model(x.to("sim:0"), shift=shift.to("sim:0"), factor=2))


def test_data_parallel_state_dict(closing):
    """Every state_dict key starts with "module.", and load_state_dict accepts these keys."""
    model = Masked().to("sim:0")
    wrapped = closing(DataParallel(model))
    wrapped(rows())
    state = wrapped.state_dict()
    assert list(state) == ["module.scale", "module.linear.weight", "module.linear.bias"]
    state = {name: torch.zeros_like(value) for name, value in state.items()}
    wrapped.load_state_dict(state)
    assert not wrapped(rows()).any()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda wrapped: pickle.loads(pickle.dumps(wrapped))], ids=["deepcopy", "pickle"]
)
def test_data_parallel_copied_after_use(duplicate, closing):
    """A copy of a used DataParallel has its own lanes and parameters."""
    wrapped = closing(DataParallel(mlp().to("sim:0")))
    x = rows()
    expected = wrapped(x).detach()
    twin = closing(duplicate(wrapped))
    with torch.no_grad():
        torch.testing.assert_close(twin(x), expected)
        twin.module[2].bias.add_(1)
        torch.testing.assert_close(twin(x), expected + 1)
        torch.testing.assert_close(wrapped(x), expected)


def test_data_parallel_uses_a_replaced_module(closing):
    """If `module` is replaced after a call, the next call uses the new module."""
    wrapped = closing(DataParallel(mlp().to("sim:0")))
    x = rows()
    wrapped(x)
    wrapped.module = mlp().to("sim:0")
    torch.testing.assert_close(wrapped(x), wrapped.module(x.to("sim:0")))


def test_data_parallel_inside_data_parallel(closing):
    """An inner DataParallel runs its module plainly in the lanes of the outer one."""
    inner = closing(DataParallel(mlp().to("sim:0")))
    outer = closing(DataParallel(nn.Sequential(inner)))
    x = rows()
    torch.testing.assert_close(outer(x), inner.module(x.to("sim:0")))


def test_data_parallel_refuses_invalid_device_lists():
    """The constructor refuses absent devices, devices of two kinds, and an empty list."""
    with pytest.raises(DeviceUnavailableError, match="sim:7"):
        DataParallel(mlp(), [0, 7])
    with pytest.raises(DeviceListError, match="mixes the types"):
        DataParallel(mlp(), ["sim:0", "cpu"])
    with pytest.raises(DeviceListError, match="empty"):
        DataParallel(mlp(), [])


def test_data_parallel_on_the_cpu_of_a_machine_with_accelerators(closing):
    """If `device_ids` names the CPU, the lanes run on the CPU even though the machine has accelerators."""
    model = mlp()
    wrapped = closing(DataParallel(model, ["cpu", "cpu"]))
    x = rows()
    torch.testing.assert_close(wrapped(x), model(x))


def test_data_parallel_close_frees_memory(closing):
    """close() frees the replicas, and the next call makes new ones."""
    model = mlp().to("sim:0").requires_grad_(False)
    wrapped = closing(DataParallel(model))
    before = simdevice.stats().live_bytes
    for _ in range(2):
        wrapped(rows())
        assert simdevice.stats().live_bytes > before
        wrapped.close()
        assert simdevice.stats().live_bytes == before


# ---------------------------------------------------------------- TupleParallel


def test_tuple_parallel_leaves_outputs_on_their_devices(closing):
    """Part i runs on device i, and its output stays there. The module gets the sum of the gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = closing(TupleParallel(model))
    parts = rows(10).split((4, 3, 2, 1))
    outputs = wrapped(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [plain(part.to("sim:0")).cpu() for part in parts])
    sum(output.square().sum().to("sim:0") for output in outputs).backward()
    plain(torch.cat(parts).to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_tuple_parallel_transfers_output(closing):
    """With `transfer_output=True`, all outputs are moved to `output_device`."""
    wrapped = closing(TupleParallel(mlp().to("sim:0"), output_device=2, transfer_output=True))
    assert devices_of(wrapped(rows(8).chunk(4))) == ["sim:2"] * 4


@pytest.mark.parametrize("transfer", [False, True])
def test_tuple_parallel_reduction(transfer, closing):
    """With `reduction=cat`, the outputs are joined on the first device."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, reduction=cat, transfer_output=transfer))
    x = rows(9)
    torch.testing.assert_close(wrapped(x.chunk(4)), model(x.to("sim:0")))


def test_tuple_parallel_without_transfer(closing):
    """With `transfer_input=False`, no part is moved. A part on the wrong device raises torch's error."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, transfer_input=False))
    parts = [part.to(device) for part, device in zip(rows(8).chunk(4), SIMS, strict=True)]
    assert devices_of(wrapped(parts)) == SIMS
    with pytest.raises(RuntimeError, match="same device"):
        wrapped(parts[::-1])


def test_tuple_parallel_tuples_of_outputs(closing):
    """A module with two inputs and two outputs takes and returns two tuples. Two parts use two devices."""

    class Two(nn.Linear):
        def forward(self, x, y):
            return super().forward(x), y * 2

    wrapped = closing(TupleParallel(Two(5, 3, dtype=torch.float64).to("sim:0")))
    (a1, a2), (b1, b2) = wrapped((rows(3), rows(2)), (rows(3), rows(2)))
    assert devices_of([a1, a2, b1, b2]) == ["sim:0", "sim:1"] * 2
    assert (a1.shape, b2.shape) == ((3, 3), (2, 5))


def test_tuple_parallel_more_parts_than_devices(closing):
    """TupleParallel refuses more parts than devices."""
    wrapped = closing(TupleParallel(mlp().to("sim:0")))
    with pytest.raises(ShardError, match="5 parts for 4 devices"):
        wrapped(rows(10).chunk(5))


def test_tuple_parallel_collated(closing):
    """A training step with tp_collate, TupleParallel, and tuple_fn gives the plain gradients."""
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = closing(TupleParallel(model))
    samples = [(x, x[:3].sin()) for x in rows(10)]
    collate = tp_collate(4)(lambda batch: tuple(map(torch.stack, zip(*batch, strict=True))))
    xs, ys = collate(samples)
    loss = tuple_fn(lambda output, y: (output - y.to(output.device)).square().sum())
    cat(loss(wrapped(xs), ys)).sum().backward()
    x, y = (torch.cat(parts).to("sim:0") for parts in (xs, ys))
    (plain(x) - y).square().sum().backward()
    assert_same_gradients(model, plain)


# ---------------------------------------------------------------- tuple_fn


@pytest.mark.parametrize("devices", [SIMS, 4, "sim"], ids=str)
def test_tuple_fn_moves_parts_to_its_devices(devices):
    """`tuple_fn(parallel=True, devices=...)` runs part i on device i."""
    double = tuple_fn(lambda x: x * 2, parallel=True, devices=devices)
    parts = rows(8).chunk(4)
    outputs = double(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [2 * part for part in parts])
    assert devices_of(double(parts[:2])) == SIMS[:2]


def test_tuple_fn_moves_parts_to_the_default_devices():
    """Without `devices`, tuple_fn uses every visible accelerator."""
    places = devices_of(tuple_fn(lambda x: x * 2, parallel=True)(rows(8).chunk(4)))
    assert places == SIMS


def test_tuple_fn_gradients():
    """Gradients flow through a parallel tuple_fn back to parts on the CPU."""
    x = rows(8).requires_grad_()
    square = tuple_fn(lambda x: x.square().sum(), parallel=True, devices=SIMS)
    sum(loss.cpu() for loss in square(x.chunk(4))).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_tuple_fn_errors_name_the_device():
    """An error in a part gains a note with the lane and its device. More parts than devices raise an error."""

    def fragile(x):
        if x == 2:
            raise KeyError("mine")
        return x

    run = tuple_fn(fragile, parallel=True, devices=SIMS)
    with pytest.raises(KeyError, match="mine") as caught:
        run((0, 1, 2, 3))
    assert "in lane 2 on sim:2, shard 2 of 4" in caught.value.__notes__
    with pytest.raises(ShardError, match="5 parts for 4 devices"):
        run((0,) * 5)


# ---------------------------------------------------------------- ParallelWrapper and recursive_to


@pytest.mark.parametrize(("device", "place"), [("sim:1", "sim:1"), ("auto", "sim:0"), ("sim", "sim:0"), ("cpu", "cpu")])
def test_parallel_wrapper_places_the_model(device, place):
    """ParallelWrapper moves the model to the device ("auto": the first accelerator) and runs it there."""
    net = ParallelWrapper(mlp(), device=device)
    assert next(net.parameters()).device == torch.device(place)
    assert str(net(rows().to(place)).device) == place


def lanes_of(net):
    """Return the devices that calls of a ParallelWrapper use."""
    return net.model.device_ids if isinstance(net.model, DataParallel) else [next(net.parameters()).device]


def test_parallel_wrapper_auto_uses_every_device():
    """With "auto", calls are cut over all four devices, and outputs and gradients are the plain ones."""
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(str(x.device))
            return super().forward(x)

    model = Model(5, 3, dtype=torch.float64)
    plain = copy.deepcopy(model)
    net = ParallelWrapper(model, "auto")
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    x = rows(9)
    output = net(x)
    assert sorted(seen) == SIMS
    torch.testing.assert_close(output.cpu(), plain(x))
    output.square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close([p.grad.cpu() for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_parallel_wrapper_auto_starts_at_the_current_device():
    """The model goes to the current device, which is also the first lane."""
    with torch.sim.device(2):
        net = ParallelWrapper(mlp(), "auto")
    assert (net.device, lanes_of(net)) == ("sim:2", [2, 0, 1, 3])
    assert str(net(rows()).device) == "sim:2"


@pytest.mark.parametrize("device", ["auto", "sim", "sim:1", "cpu"])
def test_parallel_wrapper_without_data_parallel(device):
    """With `use_data_parallel=False`, every `device` gives one device, also in `to("auto")`."""
    net = ParallelWrapper(mlp(), device, use_data_parallel=False)
    assert not isinstance(net.model, DataParallel)
    assert not isinstance(net.to("auto").model, DataParallel)
    assert net.device == "sim:0"


def test_parallel_wrapper_moves_between_auto_and_one_device():
    """`to("auto")` spreads the calls, `to` with a device gathers them there, and `to` with a dtype changes neither."""
    net = ParallelWrapper(mlp(), "cpu")
    x = rows()
    expected = net(x).detach()
    for device, lanes in (("auto", [0, 1, 2, 3]), ("sim:1", [torch.device("sim:1")]), ("auto", [0, 1, 2, 3])):
        assert net.to(device) is net
        assert lanes_of(net) == lanes
        torch.testing.assert_close(net(x.to(net.device)).detach().cpu(), expected)
    net.to(torch.float32)
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    assert net(x.float()).dtype == torch.float32
    net.to("cpu", torch.float64)
    torch.testing.assert_close(net(x).detach(), expected)
    net.to(device="auto", dtype=torch.float32)
    assert lanes_of(net) == [0, 1, 2, 3]
    assert net[0].weight.dtype == torch.float32


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"]
)
def test_parallel_wrapper_auto_copied_after_use(duplicate):
    """A copy has its own lanes on every device and its own parameters, and attributes still lead to the model."""
    net = ParallelWrapper(mlp(), "auto")
    x = rows()
    expected = net(x).detach()
    twin = duplicate(net)
    assert (twin.device, lanes_of(twin)) == ("sim:0", [0, 1, 2, 3])
    with torch.no_grad():
        torch.testing.assert_close(twin(x), expected)
        twin[2].bias.add_(1)
        torch.testing.assert_close(twin(x), expected + 1)
        torch.testing.assert_close(net(x), expected)


def test_parallel_wrapper_to():
    """to() moves the model, updates `device`, and returns the wrapper. An absent device raises and changes nothing."""
    net = ParallelWrapper(mlp(), device="sim:1")
    assert net.to("sim:2") is net
    assert net.device == "sim:2"
    assert next(net.parameters()).device == torch.device("sim:2")
    with pytest.raises(DeviceUnavailableError, match="sim:7"):
        net.to("sim:7")
    assert next(net.parameters()).device == torch.device("sim:2")
    assert net.to(torch.float32)[0].weight.dtype == torch.float32


@pytest.mark.parametrize("device", ["sim:7", "cuda"])
def test_parallel_wrapper_absent_device(device):
    """The error for an absent device suggests "auto"."""
    with pytest.raises(DeviceUnavailableError, match=r'devices?="auto"'):
        ParallelWrapper(mlp(), device=device)


def test_recursive_to():
    """recursive_to moves every tensor of a nested value and keeps other values."""
    moved = recursive_to({"a": [torch.zeros(1)], "b": (torch.zeros(1, device="sim:0"), "text")}, "sim:3")
    assert devices_of([moved["a"][0], moved["b"][0]]) == ["sim:3", "sim:3"]
    assert moved["b"][1] == "text"

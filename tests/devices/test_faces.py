"""DataParallel, TupleParallel, tuple_fn and the rest over four devices."""

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
    recursive_to,
    tp_collate,
    tuple_fn,
)
from tests import simdevice
from tests.devices.zoo import SIMS, Masked, assert_same_gradients, devices_of, mlp, rows


@pytest.fixture
def closing():
    """Close the wrappers that a test makes."""
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
    """DataParallel has the plain output on its first device, the plain gradients, and torch's attributes."""
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
    """The output is joined on output_device."""
    wrapped = closing(DataParallel(mlp().to("sim:0"), output_device=output_device))
    assert str(wrapped(rows()).device) == "sim:2"
    assert wrapped.output_device == 2


def test_data_parallel_begins_with_another_device(closing):
    """The first device may be any; the module lies there."""
    model = mlp().to("sim:2")
    wrapped = closing(DataParallel(model, [2, 0]))
    x = rows()
    torch.testing.assert_close(wrapped(x), model(x.to("sim:2")))


@pytest.mark.parametrize("output_device", [None, -1, 3, "cpu"], ids=str)
def test_data_parallel_function(output_device):
    """data_parallel joins on its output device, -1 is the CPU, and leaves no memory behind."""
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


def test_data_parallel_wants_the_module_on_its_first_device(closing):
    """A module elsewhere is refused with torch's message."""
    wrapped = closing(DataParallel(mlp()))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device sim:0") as caught:
        wrapped(rows())
    assert "found one of them on device: cpu" in str(caught.value)
    wrapped.to("sim:0")
    assert str(wrapped(rows()).device) == "sim:0"


def test_data_parallel_moves_a_module_of_one_lane(closing):
    """With one device the module is moved there, as torch does."""
    wrapped = closing(DataParallel(mlp(), ["sim:1"]))
    assert next(wrapped.parameters()).device == torch.device("sim:1")
    assert str(wrapped(rows()).device) == "sim:1"


@pytest.mark.parametrize("verb", ["scatter", "replicate", "parallel_apply", "gather"])
def test_data_parallel_verbs_can_be_overridden(verb, closing):
    """Each verb, overridden, is used, and may call its parent."""
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


@pytest.mark.parametrize("count", [8, 2, 1])
def test_data_parallel_scalars_become_a_vector(count, closing):
    """Scalars become a vector with one value a shard, with a warning, also when there is one shard."""

    class Loss(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()

    wrapped = closing(DataParallel(Loss(5, 3).to("sim:0")))
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        output = wrapped(torch.randn(count, 5))
    assert output.shape == (min(count, 4),)


def test_data_parallel_keyword_arguments(closing):
    """Keyword arguments are cut like positional ones, and other values go to every lane."""

    class Named(nn.Linear):
        def forward(self, x, *, shift, factor):
            return (super().forward(x) + shift) * factor

    model = Named(5, 3, dtype=torch.float64).to("sim:0")
    wrapped = closing(DataParallel(model))
    x, shift = rows(9), rows(9, 3)
    torch.testing.assert_close(wrapped(x, shift=shift, factor=2), model(x.to("sim:0"), shift=shift.to("sim:0"), factor=2))


def test_data_parallel_state_dict(closing):
    """state_dict has module. before each key, before and after a call, and loads."""
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
    """A copy of a used DataParallel is another one, with lanes and parameters of its own."""
    wrapped = closing(DataParallel(mlp().to("sim:0")))
    x = rows()
    expected = wrapped(x).detach()
    twin = closing(duplicate(wrapped))
    with torch.no_grad():
        torch.testing.assert_close(twin(x), expected)
        twin.module[2].bias.add_(1)
        torch.testing.assert_close(twin(x), expected + 1)
        torch.testing.assert_close(wrapped(x), expected)


def test_data_parallel_with_another_module(closing):
    """A module put in the place of `module` after a call is the one that is called."""
    wrapped = closing(DataParallel(mlp().to("sim:0")))
    x = rows()
    wrapped(x)
    wrapped.module = mlp().to("sim:0")
    torch.testing.assert_close(wrapped(x), wrapped.module(x.to("sim:0")))


def test_data_parallel_inside_data_parallel(closing):
    """A DataParallel inside another runs plainly in the lanes of the outer one."""
    inner = closing(DataParallel(mlp().to("sim:0")))
    outer = closing(DataParallel(nn.Sequential(inner)))
    x = rows()
    torch.testing.assert_close(outer(x), inner.module(x.to("sim:0")))


def test_data_parallel_devices_that_are_not_there():
    """Absent, mixed and no devices are refused when the wrapper is made."""
    with pytest.raises(DeviceUnavailableError, match="sim:7"):
        DataParallel(mlp(), [0, 7])
    with pytest.raises(DeviceListError, match="mixes the types"):
        DataParallel(mlp(), ["sim:0", "cpu"])
    with pytest.raises(DeviceListError, match="empty"):
        DataParallel(mlp(), [])


def test_data_parallel_on_the_cpu_beside_an_accelerator(closing):
    """device_ids that name the CPU make CPU lanes also where there is an accelerator."""
    model = mlp()
    wrapped = closing(DataParallel(model, ["cpu", "cpu"]))
    x = rows()
    torch.testing.assert_close(wrapped(x), model(x))


def test_data_parallel_memory_returns(closing):
    """close() frees the replicas, and the next call makes them anew."""
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
    """Part i runs on device i and its output stays there; gradients sum into the module."""
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
    """With transfer_output the outputs come to the output device."""
    wrapped = closing(TupleParallel(mlp().to("sim:0"), output_device=2, transfer_output=True))
    assert devices_of(wrapped(rows(8).chunk(4))) == ["sim:2"] * 4


@pytest.mark.parametrize("transfer", [False, True])
def test_tuple_parallel_reduction(transfer, closing):
    """With reduction=cat the outputs are joined, on the first device."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, reduction=cat, transfer_output=transfer))
    x = rows(9)
    torch.testing.assert_close(wrapped(x.chunk(4)), model(x.to("sim:0")))


def test_tuple_parallel_without_transfer(closing):
    """With transfer_input=False parts are used where the caller put them: elsewhere is torch's error."""
    model = mlp().to("sim:0")
    wrapped = closing(TupleParallel(model, transfer_input=False))
    parts = [part.to(device) for part, device in zip(rows(8).chunk(4), SIMS, strict=True)]
    assert devices_of(wrapped(parts)) == SIMS
    with pytest.raises(RuntimeError, match="same device"):
        wrapped(parts[::-1])


def test_tuple_parallel_tuples_of_outputs(closing):
    """A module of two inputs and outputs takes and gives two tuples; fewer parts use fewer devices."""

    class Two(nn.Linear):
        def forward(self, x, y):
            return super().forward(x), y * 2

    wrapped = closing(TupleParallel(Two(5, 3, dtype=torch.float64).to("sim:0")))
    (a1, a2), (b1, b2) = wrapped((rows(3), rows(2)), (rows(3), rows(2)))
    assert devices_of([a1, a2, b1, b2]) == ["sim:0", "sim:1"] * 2
    assert (a1.shape, b2.shape) == ((3, 3), (2, 5))


def test_tuple_parallel_more_parts_than_devices(closing):
    """More parts than devices are refused."""
    wrapped = closing(TupleParallel(mlp().to("sim:0")))
    with pytest.raises(ShardError, match="5 parts for 4 devices"):
        wrapped(rows(10).chunk(5))


def test_tuple_parallel_collated(closing):
    """tp_collate, TupleParallel and tuple_fn make a training step over four devices."""
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
def test_tuple_fn_brings_parts_to_its_devices(devices):
    """tuple_fn(parallel=True, devices=...) runs part i on device i."""
    double = tuple_fn(lambda x: x * 2, parallel=True, devices=devices)
    parts = rows(8).chunk(4)
    outputs = double(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [2 * part for part in parts])
    assert devices_of(double(parts[:2])) == SIMS[:2]


def test_tuple_fn_brings_parts_to_the_default_devices():
    """Without devices, the parts are brought to every visible accelerator, as the docstring says."""
    places = devices_of(tuple_fn(lambda x: x * 2, parallel=True)(rows(8).chunk(4)))
    assert places == SIMS


def test_tuple_fn_gradients():
    """Gradients flow back through a parallel tuple_fn to parts on the CPU."""
    x = rows(8).requires_grad_()
    square = tuple_fn(lambda x: x.square().sum(), parallel=True, devices=SIMS)
    sum(loss.cpu() for loss in square(x.chunk(4))).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_tuple_fn_errors_name_the_device():
    """An error in a part notes the lane and its device; more parts than devices are refused."""

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
    """ParallelWrapper moves the model to the device, "auto" to the best one, and answers there."""
    net = ParallelWrapper(mlp(), device=device)
    assert next(net.parameters()).device == torch.device(place)
    assert str(net(rows().to(place)).device) == place


def test_parallel_wrapper_moves():
    """to() moves the model, updates device and returns the wrapper; an absent device changes nothing."""
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
    """A device that is not there is refused with the way out."""
    with pytest.raises(DeviceUnavailableError, match=r'devices?="auto"'):
        ParallelWrapper(mlp(), device=device)


def test_recursive_to():
    """recursive_to moves every tensor of a nested value."""
    moved = recursive_to({"a": [torch.zeros(1)], "b": (torch.zeros(1, device="sim:0"), "text")}, "sim:3")
    assert devices_of([moved["a"][0], moved["b"][0]]) == ["sim:3", "sim:3"]
    assert moved["b"][1] == "text"

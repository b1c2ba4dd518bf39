"""`DataParallel` and its functions, `ParallelWrapper`, and `TupleParallel` on four simulated
devices.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from parawrap import (
    DataParallel,
    ParallelWrapper,
    TupleParallel,
    cat,
    data_parallel,
    gather,
    parallel_apply,
    replicate,
    scatter,
    tuple_fn,
)
from tests import simdevice
from tests.helpers.device_models import (
    SIMS,
    assert_same_gradients,
    assert_same_steps,
    devices_of,
    mlp,
    rows,
)


@pytest.mark.parametrize(
    ("device_ids", "ids"),
    [
        (None, [0, 1, 2, 3]),
        (["sim:2", "sim:1"], [2, 1]),
        ([torch.device("sim", 0), "sim:0"], [0, 0]),
    ],
    ids=str,
)
def test_data_parallel_training(device_ids, ids):
    first = torch.device("sim", ids[0])
    model = mlp().to(first)
    wrapped = DataParallel(model, device_ids)
    assert (wrapped.device_ids, wrapped.output_device, wrapped.src_device_obj) == (
        ids,
        ids[0],
        first,
    )
    assert_same_steps(wrapped, model, copy.deepcopy(model), rows())
    for output_device in ("sim:3", "cpu"):  # as in torch, the next call follows it
        wrapped.output_device = output_device
        assert devices_of([wrapped(rows().to(first))]) == [output_device]


@pytest.mark.parametrize("output_device", [None, -1, 3, "cpu"], ids=str)
def test_function_frees_its_replicas(output_device):
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


def test_module_on_another_device():
    """The error has torch's message. After moving the module, the call works."""
    wrapped = DataParallel(mlp())
    with pytest.raises(
        RuntimeError, match="module must have its parameters and buffers on device sim:0"
    ) as caught:
        wrapped(rows())
    assert "found one of them on device: cpu" in str(caught.value)
    wrapped.to("sim:0")
    assert str(wrapped(rows()).device) == "sim:0"


def test_one_device_moves_the_module():
    wrapped = DataParallel(mlp(), ["sim:1"])
    assert next(wrapped.parameters()).device == torch.device("sim:1")
    assert str(wrapped(rows()).device) == "sim:1"


def test_functions_on_four_devices():
    """Parts, replicas, and outputs lie on the devices that the functions are given; gradients are
    the plain ones.
    """
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


def lanes_of(net):
    """Return the devices that calls of a ParallelWrapper use."""
    return (
        net.model.device_ids
        if isinstance(net.model, DataParallel)
        else [next(net.parameters()).device]
    )


def test_auto_uses_every_device():
    """With "auto", calls are cut over all four devices, and outputs and gradients are the plain
    ones.
    """
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append(str(x.device))
            return super().forward(x)

    model = Model(5, 3, dtype=torch.float64)
    net = ParallelWrapper(model, "auto")
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    net(rows(9))
    assert sorted(seen) == SIMS
    assert_same_steps(net, model, copy.deepcopy(model), rows(9))


def test_moves_between_auto_and_one():
    """`to("auto")` spreads the calls, and `to` with a device gathers them.

    A copy, and `to` with a dtype, keep them.
    """
    net = ParallelWrapper(mlp(), "cpu")
    x = rows()
    expected = net(x).detach()
    for device, lanes in (
        ("auto", [0, 1, 2, 3]),
        ("sim:1", [torch.device("sim:1")]),
        ("auto", [0, 1, 2, 3]),
    ):
        assert net.to(device) is net
        assert lanes_of(net) == lanes
        torch.testing.assert_close(net(x.to(net.device)).detach().cpu(), expected)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert (twin.device, lanes_of(twin)) == ("sim:0", [0, 1, 2, 3])
        torch.testing.assert_close(twin(x).detach().cpu(), expected)
    net.to(torch.float32)
    assert (net.device, lanes_of(net)) == ("sim:0", [0, 1, 2, 3])
    assert net(x.float()).dtype == torch.float32
    net.to("cpu", torch.float64)
    torch.testing.assert_close(net(x).detach(), expected)
    net.to(device="auto", dtype=torch.float32)
    assert lanes_of(net) == [0, 1, 2, 3]
    assert next(net.parameters()).dtype == torch.float32


def test_tuples_stay_on_their_devices():
    """Part i runs on device i, and its output stays there.

    The module gets the sum of the gradients.
    """
    model = mlp().to("sim:0")
    plain = copy.deepcopy(model)
    wrapped = TupleParallel(model)
    parts = rows(10).split((4, 3, 2, 1))
    outputs = wrapped(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close(
        [output.cpu() for output in outputs], [plain(part.to("sim:0")).cpu() for part in parts]
    )
    sum(output.square().sum().to("sim:0") for output in outputs).backward()
    plain(torch.cat(parts).to("sim:0")).square().sum().backward()
    assert_same_gradients(model, plain)


def test_options_of_transfer():
    model = mlp().to("sim:0")
    x = rows(8)
    moved = TupleParallel(model, output_device=2, transfer_output=True)
    assert devices_of(moved(x.chunk(4))) == ["sim:2"] * 4
    for transfer in (False, True):
        joined = TupleParallel(model, reduction=cat, transfer_output=transfer)
        torch.testing.assert_close(joined(x.chunk(4)), model(x.to("sim:0")))


@pytest.mark.parametrize("devices", [SIMS, 4], ids=str)
def test_tuple_fn_moves_its_parts(devices):
    double = tuple_fn(lambda x: x * 2, parallel=True, devices=devices)
    parts = rows(8).chunk(4)
    outputs = double(parts)
    assert devices_of(outputs) == SIMS
    torch.testing.assert_close([output.cpu() for output in outputs], [2 * part for part in parts])
    assert devices_of(double(parts[:2])) == SIMS[:2]

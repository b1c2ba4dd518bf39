"""DataParallel and data_parallel on CPU lanes behave as torch.nn.DataParallel documents."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import (
    DataParallel,
    data_parallel,
)
from tests.helpers.calling import Calls, lane_threads

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def test_is_a_torch_data_parallel():
    module = nn.Linear(4, 2)
    net = DataParallel(module, TWO)
    assert isinstance(net, nn.DataParallel)
    assert net.module is module
    assert (net.device_ids, net.output_device, net.dim) == (
        [torch.device("cpu")] * 2,
        torch.device("cpu"),
        0,
    )
    assert list(net.state_dict()) == ["module.weight", "module.bias"]
    state = nn.DataParallel(nn.Linear(4, 2)).state_dict()
    net.load_state_dict(state)
    x = torch.randn(5, 4)
    assert_close(net(x), nn.functional.linear(x, state["module.weight"], state["module.bias"]))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_plain_without_accelerator():
    seen = []
    net = DataParallel(
        Calls(lambda x, *, k=1: seen.append((len(x), threading.get_ident())) or x * k), [0, 1]
    )
    assert net.device_ids == []
    assert net(torch.ones(7), k=3).tolist() == [3.0] * 7
    assert seen == [(7, threading.get_ident())]


@pytest.mark.parametrize("rows", [1, 2, 17])
@pytest.mark.parametrize("dim", [0, 1])
def test_outputs_and_gradients(rows, dim):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    net = DataParallel(model, THREE, dim=dim)
    shape = [3, 3, 4]
    shape[dim] = rows
    x = torch.randn(shape)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        y = net(x)
        assert_close(y, model(x))
        y.square().sum().backward()
        assert_close([p.grad for p in net.parameters()], plain)


@pytest.mark.parametrize("rows", [1, 2, 4, 5])
def test_scalars_become_a_vector(rows):
    """0-d outputs are joined into a vector with one value per device, also a tuple with as many
    losses as a shard has rows. One warning points to the caller's line.
    """
    devices = min(rows, 2)
    net = nn.Sequential(DataParallel(Calls(torch.mean), TWO))
    with pytest.warns(UserWarning, match="0-d") as caught:
        assert net(torch.ones(rows)).tolist() == [1.0] * devices
    assert [warning.filename for warning in caught] == [__file__]
    losses = DataParallel(Calls(lambda x: (x.mean(), x.mean())), TWO)
    with pytest.warns(UserWarning, match="0-d"):
        assert [loss.tolist() for loss in losses(torch.ones(rows))] == [[1.0] * devices] * 2


def test_settings_may_change():
    """As in torch, the next call follows `module`, `dim`, and `device_ids`."""
    seen = []
    net, x = DataParallel(nn.Tanh(), TWO), torch.randn(6, 4)
    net(x)
    net.module = Calls(lambda x: seen.append(tuple(x.shape)) or x * 2)
    net.dim = 1
    assert_close(net(x), x * 2)
    net.device_ids = [torch.device("cpu")] * 3
    net(x)
    assert seen[:2] == [(6, 2)] * 2
    assert sorted(seen[2:]) == [(6, 1), (6, 1), (6, 2)]


def test_hooks_run_as_in_torch():
    """Hooks on the module run once per device in every call, and hooks on the wrapper run once."""
    model = nn.Linear(4, 2)
    net = DataParallel(model, THREE)
    inner, outer = [], []
    model.register_forward_hook(lambda m, args, out: inner.append(len(out)))
    net.register_forward_hook(lambda m, args, out: outer.append(len(out)))
    for calls in (1, 2):
        net(torch.randn(6, 4))
        assert (inner, outer) == ([2] * 3 * calls, [6] * calls)


def test_errors_name_lane_and_rows():
    """The error of a lane has a note with its device and rows. A list goes whole to every lane."""
    net = DataParallel(Calls(lambda x, lengths, scale: x[lengths[len(x)]]), TWO)
    with pytest.raises(IndexError) as caught:
        net(torch.zeros(4, 2), [9, 9, 9, 9, 9], scale=2)
    note = "in lane 0 on cpu, shard 0 of 2: 2 of 4 rows"
    assert caught.value.__notes__[0] == note


def test_calls_without_rows():
    """Zero rows, and a call without arguments, run once.

    As in torch, other values go to every device.
    """
    calls = []
    net = DataParallel(Calls(lambda x=None: calls.append(x) or torch.zeros(0, 2)), TWO)
    assert net(torch.zeros(0, 4)).shape == net().shape == (0, 2)
    assert len(calls) == 2
    sized = DataParallel(Calls(lambda n: torch.zeros(n if isinstance(n, int) else len(n), 2)), TWO)
    assert sized(3).shape == sized(n=3).shape == sized("abc").shape == (6, 2)


def test_close_ends_the_lanes():
    """`close` ends the lanes, and the next call starts them again."""
    net = DataParallel(nn.Linear(4, 2), THREE)
    x = torch.randn(7, 4)
    for _ in range(2):
        with torch.no_grad():  # with gradients, lanes of one device run in the caller's thread
            assert_close(net(x), net.module(x))
        assert lane_threads()
        net.close()
        assert not lane_threads()


@pytest.mark.parametrize("cycle", [False, True])
def test_lanes_end_with_the_wrapper(cycle):
    """Garbage collection is needed only if the module leads back to its wrapper."""
    model = nn.Linear(4, 2)
    net = DataParallel(model, TWO)
    if cycle:
        model.holder = [net]
    x = torch.randn(5, 4)
    with torch.no_grad():
        assert_close(net(x), model(x))
    assert lane_threads()
    collected = weakref.ref(net)
    del net, model
    if cycle:
        gc.collect()
    assert collected() is None
    assert not lane_threads()


# --- data_parallel ---


def test_data_parallel_function():
    """Inputs are a tensor, a tuple, or keywords alone. `output_device=-1` is the CPU."""
    model, x = nn.Linear(4, 2), torch.randn(7, 4)
    for inputs in (x, (x,)):
        assert_close(data_parallel(model, inputs, THREE), model(x))
        assert_close(data_parallel(nn.Tanh(), inputs, THREE, None, 1), torch.tanh(x))
    for inputs in ((), None):
        by_keyword = {"x": torch.ones(5), "k": 2}
        out = data_parallel(
            Calls(lambda *, x, k: x * k),
            inputs,
            tuple(TWO),
            output_device=-1,
            module_kwargs=by_keyword,
        )
        assert out.tolist() == [2.0] * 5
    assert not lane_threads()

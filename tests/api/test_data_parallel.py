"""DataParallel and data_parallel on CPU lanes behave as torch.nn.DataParallel documents."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import (
    DataParallel,
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    ShardError,
    data_parallel,
    parallel,
)
from tests.helpers.calling import Calls, lane_threads
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


def test_is_a_torch_data_parallel():
    module = nn.Linear(4, 2)
    net = DataParallel(module, TWO)
    assert isinstance(net, nn.DataParallel)
    assert net.module is module
    assert (net.device_ids, net.output_device, net.dim) == ([torch.device("cpu")] * 2, torch.device("cpu"), 0)
    assert list(net.state_dict()) == ["module.weight", "module.bias"]
    state = nn.DataParallel(nn.Linear(4, 2)).state_dict()
    net.load_state_dict(state)
    x = torch.randn(5, 4)
    assert_close(net(x), nn.functional.linear(x, state["module.weight"], state["module.bias"]))


@no_accelerator
@pytest.mark.parametrize("device_ids", [None, [0, 1]], ids=str)
def test_plain_without_accelerator(device_ids):
    seen = []
    net = DataParallel(Calls(lambda x, *, k=1: seen.append((len(x), threading.get_ident())) or x * k), device_ids)
    assert net.device_ids == []
    assert net(torch.ones(7), k=3).tolist() == [3.0] * 7
    assert seen == [(7, threading.get_ident())]


@pytest.mark.parametrize("rows", [1, 2, 5, 17])
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


def test_nested_and_keyword_inputs():
    def forward(pair, *, more, k, none=None):
        assert none is None
        return {"sum": pair[0] + pair[1] + more["a"][0] * k, "rows": [pair[0]]}

    a, b, c = torch.randn(3, 7, 2)
    out = DataParallel(Calls(forward), THREE)((a, b), more={"a": [c]}, k=2.0)
    assert_close(out, {"sum": a + b + c * 2, "rows": [a]})


def test_lists_without_tensors_go_whole():
    seen = []
    texts = ["a", "b", "c", "d"]
    DataParallel(Calls(lambda x, texts: seen.append(texts) or x), TWO)(torch.zeros(4, 1), texts)
    assert seen == [texts, texts]


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("nested", [False, True], ids=["call", "in a module"])
def test_scalars_become_a_vector(rows, nested):
    """As in torch, there is one value per device. The warning points to the caller's line, once."""
    net = DataParallel(Calls(torch.mean), TWO)
    if nested:
        net = nn.Sequential(net)
    with pytest.warns(UserWarning, match="0-d") as caught:
        assert net(torch.ones(rows)).tolist() == [1.0] * min(rows, 2)
    assert [warning.filename for warning in caught] == [__file__]


def test_verbs_can_be_called_alone():
    net = DataParallel(nn.Linear(4, 2), THREE)
    x = torch.randn(7, 4)
    inputs, kwargs = net.scatter((x,), {"k": 1}, net.device_ids)
    assert [len(part[0]) for part in inputs] == [3, 2, 2]
    assert kwargs == ({"k": 1},) * 3
    other = nn.Linear(4, 2)
    for module in (net.module, other):
        outputs = net.parallel_apply(net.replicate(module, net.device_ids), inputs, [{}] * 3)
        assert_close(net.gather(outputs, net.output_device), module(x))


def test_settings_may_change():
    """As in torch, the next call follows `module`, `dim`, and `device_ids`."""
    seen = []

    class Alike(nn.Linear):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return super().forward(x)

        def __eq__(self, other):
            return True

        __hash__ = nn.Module.__hash__

    net = DataParallel(Alike(4, 4), TWO)
    x = torch.randn(6, 4, 4)
    net(x)
    net.module = Alike(4, 4)  # equal to the old one, but another module
    assert_close(net(x), net.module(x))
    seen.clear()
    net.dim = 1
    net(x)
    net.device_ids = [torch.device("cpu")] * 3
    net(x)
    assert seen[:2] == [(6, 2, 4)] * 2
    assert sorted(seen[2:]) == [(6, 1, 4), (6, 1, 4), (6, 2, 4)]


def test_batch_norm_keeps_first_shard():
    """As torch documents, only the buffer updates of the first device are kept."""
    model = nn.BatchNorm1d(4)
    first = copy.deepcopy(model)
    x = torch.randn(9, 4)
    DataParallel(model, TWO)(x)
    first(x[:5])
    assert_close(dict(model.state_dict()), dict(first.state_dict()))


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


def assert_draws_in_lane_order(net, x):
    torch.manual_seed(0)
    expected = torch.cat([nn.functional.dropout(part) for part in x.split(8)])
    for _ in range(4):
        torch.manual_seed(0)
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize("lanes", [2, 4])
def test_draws_in_lane_order(lanes):
    net = DataParallel(nn.Dropout(0.5), ["cpu"] * lanes)
    assert_draws_in_lane_order(net, torch.ones(8 * lanes, 16, requires_grad=True))


def test_profiler_sees_the_call():
    net = DataParallel(nn.Linear(4, 2), TWO)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        net(torch.randn(6, 4))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert (counts["DataParallel.forward"], counts["aten::linear"]) == (1, 2)


def test_misplaced_parameter_is_refused():
    """The error is torch's."""
    net = DataParallel(nn.Linear(4, 2), TWO)
    net.module.bias = nn.Parameter(torch.zeros(2, device="meta"))
    with pytest.raises(RuntimeError, match="module must have its parameters and buffers on device cpu"):
        net(torch.randn(4, 4))


@pytest.mark.parametrize(
    ("device_ids", "words"),
    [
        ([], "empty"),
        ((), "empty"),
        (["cpu", "cpu:1"], "cpu:1"),
        (["cpu", "cuda:0"], "cuda"),
        (["cpu", 0], "0"),
        ([True], "True, which is not a device"),
        ([1.5], "1.5, which is not a device"),
    ],
    ids=str,
)
def test_invalid_device_ids_are_refused(device_ids, words):
    with pytest.raises((DeviceListError, DeviceUnavailableError), match=words):
        DataParallel(nn.Linear(4, 2), device_ids)


def test_one_device_runs_the_module():
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(self)
            return x

    model = Model()
    DataParallel(model, ["cpu"])(torch.zeros(5))
    assert seen == [model]


def test_errors_name_lane_and_rows():
    """A list goes whole to every lane, as in torch; the note of the model's error says so."""
    net = DataParallel(Calls(lambda x, lengths, scale: x[lengths[len(x)]]), TWO)
    with pytest.raises(IndexError) as caught:
        net(torch.zeros(4, 2), [9, 9, 9, 9], scale=2)
    note = 'in lane 0 on cpu, shard 0 of 2: 2 of 4 rows. Every lane got args[1], kwargs["scale"] whole'
    assert caught.value.__notes__[0] == note


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(3), r"args\[1\] has 3"),
        (SimpleNamespace(y=torch.zeros(5)), "SimpleNamespace"),
        (torch.sparse_coo_tensor([[0]], [1.0], (5,), check_invariants=True), "sparse"),
    ],
    ids=["rows", "object", "sparse"],
)
def test_cure_of_an_argument_works(value, words):
    """The error points to the `in_dims` of a parallel block."""
    model = Calls(lambda x, y: x)
    with pytest.raises(ShardError, match=words) as caught:
        DataParallel(model, TWO)(torch.zeros(5), value)
    assert "parallel block" in str(caught.value)
    assert "in_dims" in str(caught.value)
    with parallel(lambda x, y: x, TWO, in_dims={"y": None}, out_dims=0) as p:
        assert p(torch.zeros(5), value).shape == (5,)


def test_calls_without_rows():
    """Zero rows, and a call without arguments, run once. As in torch, other values go to every device."""
    calls = []
    net = DataParallel(Calls(lambda x=None: calls.append(x) or torch.zeros(0, 2)), TWO)
    assert net(torch.zeros(0, 4)).shape == net().shape == (0, 2)
    assert len(calls) == 2
    sized = DataParallel(Calls(lambda n: torch.zeros(n if isinstance(n, int) else len(n), 2)), TWO)
    assert sized(3).shape == sized(n=3).shape == sized("abc").shape == (6, 2)


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_nested_data_parallel(first):
    inner = DataParallel(nn.Linear(4, 4), TWO)
    outer = DataParallel(nn.Sequential(inner, nn.Tanh()), THREE)
    x = torch.randn(7, 4)
    for net in (inner, outer) if first == "inner" else (outer, inner):
        net(x)
    for _ in range(2):
        assert_close(outer(x), torch.tanh(inner(x)))


def test_threads_share_the_first_call():
    model = nn.Linear(4, 2)
    net = DataParallel(model, THREE)
    barrier = threading.Barrier(8)
    right = []

    def work():
        x = torch.randn(7, 4)
        barrier.wait(PATIENCE_S)
        for _ in range(10):
            right.append(torch.allclose(net(x), nn.functional.linear(x, model.weight, model.bias), atol=1e-5))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert right == [True] * 80
    net.close()


def test_close_ends_the_lanes():
    """The next call starts them again."""
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
        out = data_parallel(Calls(lambda *, x, k: x * k), inputs, tuple(TWO), output_device=-1, module_kwargs=by_keyword)
        assert out.tolist() == [2.0] * 5
    assert not lane_threads()


def test_errors_of_outputs_have_a_cure():
    """The error gives the shapes, and points to the options of `parallel`. One of them works."""
    model = Calls(lambda x: torch.zeros(len(x), len(x)))
    cure = r"\(3, 3\).*options of parallel\(model, devices\) \(docs/errors\.md#gathererror\)$"
    with pytest.raises(GatherError, match=cure):
        DataParallel(model, TWO)(torch.zeros(5))
    with parallel(model, TWO, join="list") as p:
        assert [output.shape for output in p(torch.zeros(5))] == [(3, 3), (2, 2)]

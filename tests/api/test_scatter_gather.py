"""scatter, scatter_kwargs, gather, replicate, and parallel_apply take the forms of torch's functions."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.parallel import scatter_gather as torchs
from torch.testing import assert_close

from parawrap import (
    DeviceListError,
    DeviceUnavailableError,
    GatherError,
    ShardError,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)

TWO = ["cpu"] * 2
Pair = namedtuple("Pair", "x y")
no_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
scalars = pytest.mark.filterwarnings("ignore:the module returned 0-d tensors")


@pytest.fixture
def on_cpu(monkeypatch):
    """Let torch's functions cut and join CPU tensors, which they refuse."""

    def chunks(targets, sizes, dim, tensor):
        return tensor.chunk(len(targets), dim)

    def joined(target, dim, *parts):
        return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts], dim if parts[0].ndim else 0)

    monkeypatch.setattr(torchs, "Scatter", SimpleNamespace(apply=chunks))
    monkeypatch.setattr(torchs, "Gather", SimpleNamespace(apply=joined))


def same(one, other):
    """Assert that two nested values are equal, with the same types."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        same(list(one.values()), list(other.values()))
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            same(mine, theirs)
    else:
        assert one == other


def batch():
    return torch.arange(8.0).view(4, 2)


# -- scatter -------------------------------------------------------------------------------------------------------------

FORMS = {
    "tensor": batch,
    "tuple": lambda: (batch(), batch() + 1),
    "list": lambda: [batch(), [batch()]],
    "dict": lambda: {"x": batch(), "k": 3},
    "ordered dict": lambda: OrderedDict(b=batch(), a=None),
    "namedtuple": lambda: Pair(batch(), "text"),
    "nested": lambda: ({"x": [batch(), (batch(),)]}, None, Pair(1, batch())),
    "text next to a tensor": lambda: (batch(), "text", ["a", "b"], 2.5, None, True),
    "empty containers next to a tensor": lambda: (batch(), (), [], {}),
    "None": lambda: None,
    "number": lambda: 3,
    "text": lambda: "text",
    "object": lambda: int,
    "list without tensors": lambda: ["a", "b", "c"],
    "empty tuple": tuple,
    "empty list": list,
    "empty dict": dict,
    "a tensor of one row": lambda: torch.ones(1, 2),
    "a tensor of two rows": lambda: torch.ones(2, 2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", [["cpu"], TWO, [torch.device("cpu"), -1], ("cpu", "cpu:0")], ids=str)
def test_scatter_has_torchs_forms(on_cpu, form, devices):
    """Parts have torch's structure and rows: a tuple of parts for a tensor, and a list of parts for other values."""
    value = FORMS[form]()
    same(scatter(value, devices), torchs.scatter(value, range(len(devices))))


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_scatter_takes_any_dim(on_cpu, dim):
    """`dim` may be negative."""
    x = torch.randn(4, 6, 2)
    same(scatter(x, TWO, dim), torchs.scatter(x, [0, 1], dim))
    same(scatter({"x": x}, TWO, dim=dim), torchs.scatter({"x": x}, [0, 1], dim=dim))


def test_scatter_balances_and_drops_nothing():
    """Row counts differ by at most one. With fewer rows than devices, there is one part per row."""
    assert [len(part) for part in scatter(torch.zeros(5), ["cpu"] * 4)] == [2, 1, 1, 1]
    assert [len(part) for part in scatter(torch.zeros(2), ["cpu"] * 4)] == [1, 1]
    assert [len(part) for part in scatter(torch.zeros(0), ["cpu"] * 4)] == [0]


def test_scatter_passes_gradients():
    """Gradients flow from the parts to the tensor."""
    x = torch.ones(5, requires_grad=True)
    first, second = scatter(x, TWO)
    (first.sum() + 2 * second.sum()).backward()
    assert x.grad.tolist() == [1, 1, 1, 2, 2]


def test_scatter_gives_each_device_its_own_containers():
    """A lane that appends to a list does not change the other lanes' lists, or the caller's."""
    names = ["a"]
    (_, one), (_, two) = scatter((batch(), names), TWO)
    one.append("b")
    assert (names, two) == (["a"], ["a"])


def test_scatter_refuses_unequal_rows():
    """The error names the counts, and a cure that the caller can apply."""
    with pytest.raises(ShardError, match=r"has 3 .* has 4 .*a parallel block with in_dims="):
        scatter((torch.zeros(4), torch.zeros(3)), TWO)


def test_an_empty_list_of_devices_is_refused():
    """Both functions that cut need a device."""
    for call in (lambda: scatter(batch(), []), lambda: scatter_kwargs((batch(),), None, ())):
        with pytest.raises(DeviceListError, match="empty"):
            call()


@no_accelerator
@pytest.mark.parametrize("device", [0, "cuda", torch.device("cuda", 0)], ids=str)
def test_absent_devices_are_refused(device):
    """Each function names a device that this machine lacks."""
    calls = (
        lambda: scatter(batch(), [device, device]),
        lambda: replicate(nn.Linear(2, 2), [device]),
        lambda: parallel_apply([torch.neg], [batch()], None, [device]),
        lambda: gather([batch()], device),
    )
    for call in calls:
        with pytest.raises(DeviceUnavailableError):
            call()


# -- scatter_kwargs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        ((batch(),), None),
        ((batch(),), {}),
        ((batch(), 2), {"x": batch(), "k": "text"}),
        ((), {"x": batch()}),
        ((batch(),), {"k": [1, 2]}),
        ([batch(), batch()], None),
        (("text",), {"k": 3}),
        ((), {"k": None}),
        (([],), None),
    ],
    ids=str,
)
def test_scatter_kwargs_has_torchs_forms(on_cpu, inputs, kwargs):
    """Both results are tuples with one entry per part, as in torch."""
    mine, theirs = scatter_kwargs(inputs, kwargs, TWO), torchs.scatter_kwargs(inputs, kwargs, [0, 1])
    same(mine[1], theirs[1])
    same([tuple(args) for args in mine[0]], [tuple(args) for args in theirs[0]])


@pytest.mark.parametrize("inputs", [None, (), []], ids=str)
@pytest.mark.parametrize("kwargs", [None, {}], ids=str)
def test_scatter_kwargs_of_nothing_is_one_call(inputs, kwargs):
    """A call without arguments has one part, so `inputs[0]` and `kwargs[0]` exist."""
    assert scatter_kwargs(inputs, kwargs, TWO) == (((),), ({},))


def test_scatter_kwargs_takes_a_bare_tensor():
    """A single argument need not be in a tuple. Its parts are tuples of arguments."""
    args, kwargs = scatter_kwargs(torch.arange(3), None, TWO)
    assert [[value.tolist() for value in part] for part in args] == [[[0, 1]], [[2]]]
    assert kwargs == ({}, {})


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_positional_and_keyword_arguments_have_the_same_parts(rows):
    """With fewer rows than devices, keyword arguments without rows have one entry per part too; torch's have more."""
    args, kwargs = scatter_kwargs((torch.zeros(rows),), {"k": 1}, ["cpu"] * 4)
    assert len(args) == len(kwargs) == min(rows, 4)
    args, kwargs = scatter_kwargs((1,), {"x": torch.zeros(rows)}, ["cpu"] * 4)
    assert len(args) == len(kwargs) == min(rows, 4)


# -- gather --------------------------------------------------------------------------------------------------------------

OUTPUTS = {
    "tensors": lambda i: batch() + i,
    "0-d tensors": lambda i: torch.tensor(float(i)),
    "None": lambda i: None,
    "tuples": lambda i: (batch() + i, None),
    "lists": lambda i: [batch() + i, [batch()]],
    "dicts": lambda i: {"b": batch() + i, "a": torch.tensor(i)},
    "ordered dicts": lambda i: OrderedDict(x=batch()),
    "namedtuples": lambda i: Pair(batch() + i, [None]),
    "different rows": lambda i: torch.zeros(i + 1, 3),
    "no rows": lambda i: torch.zeros(0, 3),
    "integers": lambda i: torch.tensor([i]),
}


@scalars
@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("target", ["cpu", -1, torch.device("cpu")], ids=str)
def test_gather_has_torchs_forms(on_cpu, form, count, target):
    """Outputs are joined as in torch, also a single output."""
    outputs = [OUTPUTS[form](i) for i in range(count)]
    same(gather(outputs, target), torchs.gather(outputs, target))
    same(gather(tuple(outputs), target_device=target, dim=0), torchs.gather(outputs, target))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gather_takes_any_dim(on_cpu, dim):
    """`dim` may be negative."""
    outputs = [batch(), batch()]
    same(gather(outputs, "cpu", dim), torchs.gather(outputs, "cpu", dim))


def test_gather_passes_gradients():
    """Gradients flow from the joined tensor to the outputs."""
    parts = [torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)]
    (gather(parts, "cpu") * torch.arange(5.0)).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[0, 1], [2, 3, 4]]


def test_gather_takes_a_tensor_or_an_iterator():
    """The parts may be the rows of a tensor, or come from an iterator."""
    assert gather(batch(), "cpu").tolist() == list(range(8))
    assert gather(iter([batch(), batch()]), "cpu").shape == (8, 2)


@pytest.mark.parametrize("outputs", [[], ()])
def test_gather_refuses_an_empty_list(outputs):
    """Nothing can be joined without an output."""
    with pytest.raises(GatherError, match="no outputs"):
        gather(outputs, "cpu")


@pytest.mark.parametrize(
    "outputs",
    [
        [{"a": batch()}, {"b": batch()}],
        [batch(), [batch()]],
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        ["a", "b"],
        [[batch()], [batch(), batch()]],
        [batch(), None],
    ],
    ids=["keys", "types", "shapes", "texts", "lengths", "None"],
)
def test_gather_refuses_what_does_not_match(outputs):
    """The error says which function has the options that it names."""
    with pytest.raises(GatherError, match=r"options of parallel\(model, devices\)"):
        gather(outputs, "cpu")


@pytest.mark.parametrize("output", [1, ["a", "b"], {"ids": [1, 2]}, [batch(), 1]])
def test_gather_refuses_values_that_are_equal_by_luck(output):
    """Numbers, and lists without tensors, may have one value per row."""
    with pytest.raises(GatherError, match=r"cannot be joined: .*Return a"):
        gather([output, output], "cpu")


def test_a_cut_that_is_joined_is_the_batch():
    """The parts of a batch, joined again, are the batch."""
    value = {"x": torch.randn(7, 3), "pair": Pair(torch.randn(7), [torch.randn(7, 1, 2)])}
    same(gather(scatter(value, ["cpu"] * 3), "cpu"), value)


# -- replicate -----------------------------------------------------------------------------------------------------------


def test_replicas_are_new_modules_with_the_parameters_memory():
    """Each call makes new replicas. Their gradients reach the module."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    first, second = replicate(model, TWO), replicate(model, [torch.device("cpu")] * 2, False)
    assert len({id(each) for each in (model, *first, *second)}) == 5
    sum(replica(torch.ones(1, 2)).sum() for replica in first).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (2 * model(torch.ones(1, 2)).sum()).backward()
    assert_close(grads, [parameter.grad for parameter in model.parameters()])


def test_detached_replicas_pass_no_gradients():
    """With `detach=True`, no parameter and no buffer of a replica requires gradients."""
    model = nn.Linear(2, 2)
    model.register_buffer("shift", torch.zeros(2, requires_grad=True))
    for replica in replicate(model, TWO, detach=True):
        assert not any(tensor.requires_grad for tensor in (*replica.parameters(), *replica.buffers()))
        assert not replica(torch.ones(1, 2)).requires_grad
    assert model.weight.requires_grad
    assert model.shift.requires_grad


def test_detached_replicas_of_odd_modules_pass_no_gradients():
    """`detach=True` also reaches scripted modules, modules in plain lists, and parameters in tuples, and writes nothing."""

    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [nn.Linear(2, 2), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))]
            self.scales = (nn.Parameter(torch.ones(1)),)

        def forward(self, x):
            return self.layers[1](self.layers[0](x)) * self.scales[0]

    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    for model in (Listed(), scripted):
        pending = model(torch.ones(2, 2)).sum()
        for replica in replicate(model, TWO, detach=True):
            assert not replica(torch.ones(2, 2)).requires_grad
        assert all(replica(torch.ones(2, 2)).requires_grad for replica in replicate(model, TWO))
        pending.backward()


def test_the_first_replica_of_a_scripted_module_updates_its_buffers():
    """Buffers deep inside a scripted module are shared too."""
    model = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    first, second = replicate(model, TWO)
    second(torch.randn(4, 2))
    assert int(model[1].num_batches_tracked) == 0
    first(torch.randn(4, 2))
    assert int(model[1].num_batches_tracked) == 1


def test_replicate_takes_no_devices():
    """An empty list of devices gives no replicas, as in torch."""
    assert replicate(nn.Linear(2, 2), []) == []


def test_the_first_replica_updates_the_modules_buffers():
    """As torch promises, writes in place into buffers of the first replica reach the module; others do not."""
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3))
    first, second = replicate(model, TWO)
    x = torch.randn(8, 3)
    second(x)
    assert int(model[0].num_batches_tracked) == 0
    first(x)
    assert int(model[0].num_batches_tracked) == int(model[1].num_batches_tracked) == 1
    assert torch.equal(model[1].running_mean, first[1].running_mean)


def test_changes_of_replicas_do_not_reach_the_module():
    """Attributes that are set on a replica stay there until it is dropped."""
    model = nn.Linear(2, 2)
    first, second = replicate(model, TWO)
    first.tag = "mine"
    assert not hasattr(model, "tag")
    assert not hasattr(second, "tag")
    parallel_apply([first, second], [torch.ones(1, 2)] * 2)
    assert first.tag == "mine"


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(2, 3),
        lambda: torch.jit.script(nn.Linear(2, 2)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
        lambda: nn.Embedding(5, 2, sparse=True),
        nn.Identity,
    ],
    ids=["lstm", "scripted", "weight_norm", "embedding", "identity"],
)
def test_odd_modules_are_replicated(build):
    """Replicas of odd modules have the outputs of the module."""
    model = build()
    x = torch.tensor([1, 2]) if isinstance(model, nn.Embedding) else torch.randn(4, 2)
    for replica in replicate(model, TWO):
        assert_close(replica(x), model(x))


# -- parallel_apply ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "inputs",
    [[batch(), batch()], [(batch(),), [batch()]], (batch(), (batch(),)), torch.stack([batch(), batch()])],
    ids=range(4),
)
@pytest.mark.parametrize("kwargs", [None, [{}, {}], ({}, {})], ids=str)
@pytest.mark.parametrize("devices", [None, TWO, [None, None], [torch.device("cpu"), None]], ids=str)
def test_each_input_is_a_tuple_a_list_or_one_argument(inputs, kwargs, devices):
    """A bare input is the only argument of its call. `kwargs_tup` and `devices` may be None."""
    outputs = parallel_apply([torch.neg, torch.abs], inputs, kwargs, devices)
    assert type(outputs) is list
    same(outputs, [-batch(), batch()])


def test_bare_dicts_numbers_and_none_are_single_arguments():
    """Only a tuple or list is spread into arguments."""
    values = [{"x": 1}, 3, None, "text", {1, 2}]
    assert parallel_apply([lambda value: value] * 5, values) == values


def test_keyword_arguments_are_those_of_their_call():
    """Call i gets the dict i."""
    x = torch.ones(2)
    assert_close(parallel_apply([torch.add] * 2, [(x, x)] * 2, [{"alpha": 2}, {"alpha": 3}]), [x * 3, x * 4])


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (([torch.neg], [batch(), batch()]), "1 modules, 2 inputs"),
        (([torch.neg] * 2, [batch()]), "2 modules, 1 inputs"),
        (([torch.neg] * 2, [batch()] * 2, [{}]), "1 dicts of keyword arguments"),
        (([torch.neg] * 2, [batch()] * 2, None, ["cpu"]), "1 devices"),
    ],
    ids=["inputs", "modules", "kwargs", "devices"],
)
def test_unequal_numbers_are_refused(arguments, found):
    """The error gives the numbers."""
    with pytest.raises(ShardError, match=found):
        parallel_apply(*arguments)


def test_calls_run_at_the_same_time_and_leave_no_thread():
    """All calls run at once, each in its own thread, also on one device."""
    barrier = threading.Barrier(3)

    def meet(x):
        barrier.wait(20)
        return threading.get_ident()

    assert len(set(parallel_apply([meet] * 3, [batch()] * 3))) == 3
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("parawrap-")]


def test_calls_follow_the_callers_grad_mode():
    """Without gradients, outputs of replicas have none."""
    replicas = replicate(nn.Linear(2, 2), TWO)
    assert all(output.requires_grad for output in parallel_apply(replicas, [batch()] * 2))
    with torch.no_grad():
        assert not any(output.requires_grad for output in parallel_apply(replicas, [batch()] * 2))


def test_the_error_of_a_call_keeps_its_type():
    """The first failing call's exception is raised, with a note."""

    def fail(x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        parallel_apply([torch.neg, fail], [batch()] * 2)
    assert "lane 1" in caught.value.__notes__[0]


def test_bound_methods_of_replicas_are_applied():
    """A method of each replica may be called instead of its forward."""

    class Encoder(nn.Linear):
        def encode(self, x):
            return self(x) * 2

    model = Encoder(2, 2)
    x = batch()
    methods = [replica.encode for replica in replicate(model, TWO)]
    assert_close(gather(parallel_apply(methods, scatter(x, TWO)), "cpu"), model(x) * 2)

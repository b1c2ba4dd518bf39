"""scatter, scatter_kwargs, gather, replicate, and parallel_apply take the forms of torch's
functions.
"""

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
    GatherError,
    ReplicaError,
    gather,
    parallel_apply,
    replicate,
    scatter,
    scatter_kwargs,
)
from tests.helpers.calling import lane_threads
from tests.helpers.same import assert_same
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
Pair = namedtuple("Pair", "x y")


@pytest.fixture
def on_cpu(monkeypatch):
    """Let torch's functions cut and join CPU tensors, which they refuse."""

    def chunks(targets, sizes, dim, tensor):
        return tensor.chunk(len(targets), dim)

    def joined(target, dim, *parts):
        return torch.cat(
            [part.reshape(1) if part.ndim == 0 else part for part in parts],
            dim if parts[0].ndim else 0,
        )

    monkeypatch.setattr(torchs, "Scatter", SimpleNamespace(apply=chunks))
    monkeypatch.setattr(torchs, "Gather", SimpleNamespace(apply=joined))


def batch():
    return torch.arange(8.0).view(4, 2)


# --- scatter ---

FORMS = {
    "tensor": batch,
    "ordered dict": lambda: OrderedDict(b=batch(), a=None),
    "nested": lambda: ({"x": [batch(), (batch(),)], "k": 3}, None, Pair(1, batch())),
    "other values": lambda: (batch(), "text", ["a", "b"], 2.5, None, True, (), [], {}),
    "None": lambda: None,
    "empty tuple": tuple,
    "one row": lambda: torch.ones(1, 2),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("devices", [["cpu"], (torch.device("cpu"), -1)], ids=str)
def test_scatter_has_torchs_forms(on_cpu, form, devices):
    """Parts have torch's structure and rows: a tuple of parts for a tensor, and a list of parts for
    other values.
    """
    value = FORMS[form]()
    assert_same(scatter(value, devices), torchs.scatter(value, range(len(devices))))


@pytest.mark.parametrize("dim", [1, -2])
def test_any_dim_of_scatter_and_gather(on_cpu, dim):
    x = torch.randn(4, 6, 2)
    assert_same(scatter(x, TWO, dim), torchs.scatter(x, [0, 1], dim))
    assert_same(scatter({"x": x}, TWO, dim=dim), torchs.scatter({"x": x}, [0, 1], dim=dim))
    assert_same(gather([x, x], "cpu", dim), torchs.gather([x, x], "cpu", dim))


def test_scatter_balances():
    """Row counts differ by at most one. With fewer rows than devices, there is one part per row."""
    for rows, sizes in {5: [2, 1, 1, 1], 2: [1, 1], 0: [0]}.items():
        assert [len(part) for part in scatter(torch.zeros(rows), ["cpu"] * 4)] == sizes


# --- scatter_kwargs ---


@pytest.mark.parametrize(
    ("inputs", "kwargs"),
    [
        ((batch(), 2), {"x": batch(), "k": "text"}),
        ((), {"x": batch()}),
        ([batch(), batch()], None),
        (("text",), {"k": 3}),
    ],
    ids=range(4),
)
def test_forms_of_scatter_kwargs(on_cpu, inputs, kwargs):
    """Both results are tuples with one entry per part, as in torch."""
    mine, theirs = (
        scatter_kwargs(inputs, kwargs, TWO),
        torchs.scatter_kwargs(inputs, kwargs, [0, 1]),
    )
    assert_same(mine[1], theirs[1])
    assert_same([tuple(args) for args in mine[0]], [tuple(args) for args in theirs[0]])


def test_args_and_kwargs_agree():
    """With fewer rows than devices, arguments without rows have one entry per part too; torch's
    have more.
    """
    for rows in (1, 3, 5):
        for args in (((torch.zeros(rows),), {"k": 1}), ((1,), {"x": torch.zeros(rows)})):
            positional, named = scatter_kwargs(*args, ["cpu"] * 4)
            assert len(positional) == len(named) == min(rows, 4)
    assert scatter_kwargs((), {}, TWO) == scatter_kwargs(None, None, TWO) == (((),), ({},))


# --- gather ---

OUTPUTS = {
    "tensors": lambda i: batch() + i,
    "0-d tensors": lambda i: torch.tensor(float(i)),
    "None": lambda i: None,
    "lists": lambda i: [batch() + i, [batch()]],
    "dicts": lambda i: OrderedDict(b=batch() + i, a=torch.tensor(i)),
    "namedtuples": lambda i: Pair(batch() + i, [None]),
    "different rows": lambda i: torch.zeros(i + 1, 3),
}


@pytest.mark.filterwarnings("ignore:the module returned 0-d tensors")
@pytest.mark.parametrize("form", OUTPUTS)
@pytest.mark.parametrize("target", ["cpu", -1], ids=str)
def test_gather_has_torchs_forms(on_cpu, form, target):
    """Outputs are joined as in torch, also a single output."""
    for count in (1, 3):
        outputs = [OUTPUTS[form](i) for i in range(count)]
        assert_same(gather(outputs, target), torchs.gather(outputs, target))
        assert_same(
            gather(tuple(outputs), target_device=target, dim=0), torchs.gather(outputs, target)
        )


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([{"a": batch()}, {"b": batch()}], r"options of parallel\(model, devices\)"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "options of parallel"),
        ([{"ids": [1, 2]}] * 2, "cannot be joined: .*Return a"),
    ],
    ids=["keys", "shapes", "numbers"],
)
def test_gather_refuses_other_outputs(outputs, words):
    """Equal numbers may have one value per row."""
    with pytest.raises(GatherError, match=words):
        gather(outputs, "cpu")


# --- replicate ---


def test_replicas_are_new_modules():
    """Replicas are new modules, whose gradients reach the module.

    Attributes that are set on a replica stay there until it is dropped.
    """
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    first, second = replicate(model, TWO), replicate(model, [torch.device("cpu")] * 2, False)
    assert len({id(each) for each in (model, *first, *second, *replicate(model, []))}) == 5
    sum(replica(torch.ones(1, 2)).sum() for replica in first).backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    (2 * model(torch.ones(1, 2)).sum()).backward()
    assert_close(grads, [parameter.grad for parameter in model.parameters()])
    first[0].tag = "mine"
    parallel_apply(first, [torch.ones(1, 2)] * 2)
    assert first[0].tag == "mine"
    assert not any(hasattr(each, "tag") for each in (model, first[1], *second))
    assert not any(
        each(torch.ones(1, 2)).requires_grad for each in replicate(model, TWO, detach=True)
    )


def test_lazy_modules_are_not_replicated():
    """The message says to call the module first."""
    with pytest.raises(ReplicaError, match="lazy parameters without a shape"):
        replicate(nn.LazyLinear(2), TWO)


# --- parallel_apply ---


@pytest.mark.parametrize(
    "inputs",
    [[(batch(),), [batch()]], (batch(), (batch(),)), torch.stack([batch(), batch()])],
    ids=["list", "tuple", "tensor"],
)
@pytest.mark.parametrize("devices", [None, TWO, [torch.device("cpu"), None]], ids=str)
def test_forms_of_inputs(inputs, devices):
    """A bare input is the only argument of its call. `kwargs_tup` and `devices` may be None."""
    for kwargs in (None, ({}, {})):
        assert_same(
            parallel_apply([torch.neg, torch.abs], inputs, kwargs, devices), [-batch(), batch()]
        )


def test_each_call_has_its_arguments():
    """A tuple or list is spread into arguments, and no other value. Call i gets the dict i."""
    values = [{"x": 1}, 3, "text"]
    assert parallel_apply([lambda value: value] * 3, values) == values
    x = torch.ones(2)
    assert_close(
        parallel_apply([torch.add] * 2, [(x, x)] * 2, [{"alpha": 2}, {"alpha": 3}]), [x * 3, x * 4]
    )


def test_calls_run_at_the_same_time():
    """Each call of `parallel_apply` runs in its own thread, also on one device, and no thread is
    left.
    """
    barrier = threading.Barrier(3)

    def meet(x):
        barrier.wait(PATIENCE_S)
        return threading.get_ident()

    assert len(set(parallel_apply([meet] * 3, [batch()] * 3))) == 3
    assert not lane_threads()


def test_error_of_a_call_keeps_its_type():
    def fail(x):
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine") as caught:
        parallel_apply([torch.neg, fail], [batch()] * 2)
    assert "lane 1" in caught.value.__notes__[0]

"""The double of NeuronCores: what it compiles, what it refuses, and how its cores take turns."""

from __future__ import annotations

import copy
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from parawrap import DeviceUnavailableError, ShapeError, tree
from parawrap.neuroncores import CoreStats
from tests.helpers.neuron_doubles import assert_equal, counts, saved_and_loaded

LIMIT_S = 120
A, B = torch.arange(6.0).view(2, 3), torch.tensor([[3.0, 1.0, 4.0], [1.0, 5.0, 9.0]])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return x + self.calls


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 2).eval()


# -- compilation


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (lambda x, y: x - y, (A, A)),
        (lambda x: (x,), (A,)),
        (lambda x: [x, x * 2], (A,)),
        (lambda x: {"b": x, "a": x * 2}, (A,)),
        (lambda x: (x, [x * 2, x * 3], ({"k": x * 4},)), (A,)),
        (lambda items: items[0] - items[1], ([A, B],)),
        (lambda x, rest: x + rest[0] * 2 - rest[1]["k"] * 3, (A, (B, {"k": A}))),
        (lambda x, y: {"ids": x.argmax(1), "mask": x > y}, (A, B)),
        (lambda x, weights: (x * weights, weights.sum()), (A, B[0])),
        (lambda first, *rest: first - rest[0] * rest[1], (A, B, A)),
    ],
    ids=["twice", "tuple", "list", "dict", "nested", "from list", "from nested", "dtypes", "shapes", "star"],
)
def test_structures_are_kept(host, function, args):
    """Outputs have the bits of the plain call, also for other values than the example's."""
    compiled = host.trace(function, args)
    leaves, structure = tree.flatten(args)
    others = tree.unflatten(structure, [leaf * 3 + place for place, leaf in enumerate(leaves, 1)])
    assert_equal(compiled(*args), function(*args))
    assert_equal(compiled(*others), function(*others))


def test_weights_become_constants(host):
    """A trace leaves the model as it was. No state remains between inferences, and outputs have their own memory."""
    model, given = linear(), A.clone().requires_grad_()
    counting = Counting()
    placed = host.place(host.trace(counting, A), 0, 1)
    assert [placed(A).tolist() for _ in range(2)] == [(A + 1).tolist()] * 2
    assert counting.calls == 0
    compiled = host.trace(lambda x: (x, model.weight, model(x)), A)
    expected = model(A)
    with torch.no_grad():
        model.weight.zero_()
    assert torch.equal(compiled(A)[2], expected)
    for output in compiled(given):
        assert not output.requires_grad
        output.zero_()
    assert torch.equal(given, A)
    assert torch.equal(compiled(A)[2], expected)
    assert model.weight.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, saved_and_loaded], ids=["deepcopy", "saved"])
def test_copies_keep_dynamic_batching(host, copied):
    """A copy from before the setting does not have it; a copy from after it does. Copies keep their signature."""
    compiled = host.trace(linear(), A)
    before = copied(compiled)
    after = copied(host.dynamic_batch(compiled))
    assert after(A[:1]).shape == (1, 2)
    assert host.signature(before) == host.signature(compiled)
    with pytest.raises(torch.jit.Error, match="ShapeError"):
        before(A[:1])


# -- refusals


@pytest.mark.parametrize(
    ("function", "example", "says"),
    [
        (torch.neg, (), "the example has no tensors"),
        (torch.add, (A, {"mask": None}), r'the example has a NoneType at args\[1\]\["mask"\]'),
        (torch.neg, torch.zeros(2, device="meta"), r"the example has a tensor on meta at args\[0\]"),
        (lambda x: (x, None), A, r"the model returns a NoneType at output\[1\]"),
        (lambda x: (), A, "the model returns no tensors"),
        (lambda x: {"a": x, "b": (x, x)}, A, "one of the containers dict, tuple. .* dicts with values of one type"),
    ],
    ids=["empty", "None", "device", "output", "no output", "mixed dict"],
)
def test_models_that_cannot_be_compiled(host, function, example, says):
    """The error names the address of what is no CPU tensor, or the type of an unsupported container."""
    with pytest.raises(TypeError, match=says):
        host.trace(function, example)


def test_models_that_trace_refuses(host):
    """Alone, or as a part of another model. Two names of one buffer are refused too."""
    compiled = host.trace(linear(), A)
    for model in (compiled, nn.Sequential(compiled, nn.ReLU())):
        with pytest.raises(TypeError, match="already compiled for NeuronCores"):
            host.trace(model, A)
    tied = nn.Module()
    tied.register_buffer("one", torch.ones(3))
    tied.register_buffer("other", tied.one)
    tied.forward = lambda x: x + tied.one
    with pytest.raises(TypeError, match=r"two names of a module hold one buffer.* Give each name a clone\(\)"):
        host.trace(tied, A)


# -- cores


def test_placed_model_takes_turns(host):
    """Each placed model counts its own turns. A core is free when the last reference goes."""
    compiled = host.trace(linear(), A)
    placed, other = host.place(compiled, 1, 3), host.place(compiled, 2, 2)
    for _ in range(4):
        placed(A)
        other(A)
    compiled(A)  # not placed: it uses no core
    assert counts(host, "inferences") == [0, 2, 3, 3]
    assert counts(host, "loads") == [0, 1, 2, 2]
    del placed
    assert [core.models for core in host.stats()] == [0, 0, 1, 1]
    host.reset_stats()
    assert host.stats()[2] == CoreStats(0, 0, 1)
    for start, count in ((0, 0), (-1, 2), (3, 2)):
        with pytest.raises(DeviceUnavailableError, match=f"start={start}, count={count}: this process has 4 cores"):
            host.place(compiled, start, count)


def test_core_runs_one_inference(host):
    """A call that arrives while the core is busy waits. Another core runs at the same time."""
    core, other = host._cores()[:2]
    inside, leave, order = threading.Event(), threading.Event(), []

    def first():
        inside.set()
        assert leave.wait(LIMIT_S)
        order.append("first")

    with ThreadPoolExecutor(2) as threads:
        busy = threads.submit(core.run, first, (), {}, 1)
        assert inside.wait(LIMIT_S)
        pending = threads.submit(core.run, order.append, ("second",), {}, 1)
        other.run(order.append, ("other",), {}, 1)
        leave.set()
        busy.result(LIMIT_S)
        pending.result(LIMIT_S)
    assert order == ["other", "first", "second"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_finds_free_cores(host):
    """A lock that another thread of the parent holds does not block the child."""
    placed, expected = host.place(host.trace(linear(), A), 0, 1), linear()(A)
    with host._cores()[0]._lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(LIMIT_S)
                code = 0 if torch.equal(placed(A), expected) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# -- dynamic batching


def test_refusal_changes_nothing(host):
    """The error leaves every part of the module unchanged."""
    eligible, other = host.trace(linear(), A), host.trace(lambda x: x.t(), A)
    with pytest.raises(ShapeError, match=r"args\[0\] is compiled for 2 rows on dim 0, and output for 3"):
        host.dynamic_batch(nn.ModuleList([eligible, other]))
    with pytest.raises(torch.jit.Error, match="ShapeError"):
        eligible(A[:1])

"""Buffers of replicas are up to date in every lane, and lane 0's buffers go back to the model."""

from __future__ import annotations

import copy
import types
from collections import deque

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


def test_buffers_of_a_failed_call_are_not_kept():
    """After a call that raised, the next call starts from the buffers that the caller has set."""
    model = nn.BatchNorm1d(4)
    plain, x = copy.deepcopy(model), torch.randn(7, 4)
    with parallel(model, THREE):
        with pytest.raises(ValueError, match="more than 1 value"):
            model(torch.randn(5, 4) + 50)  # shards of 2, 2, and 1 row
        model.load_state_dict(plain.state_dict())
        model(x)
    plain(x[:3])
    assert_close(model.running_mean, plain.running_mean)


@pytest.mark.parametrize(("first_rows", "lanes"), [(1, 2), (3, 4), (13, 2)], ids=["whole", "idle lanes", "all lanes"])
def test_lanes_follow_writes_through_data_after_any_first_call(first_rows, lanes):
    """This also holds if the first call ran whole or left lanes idle."""
    model = nn.BatchNorm1d(4).eval()
    x = torch.randn(13, 4)
    with torch.no_grad(), parallel(model, ["cpu"] * lanes, out_dims=0):
        model(torch.randn(first_rows, 4))
        for value in (9.0, 4.0):
            model.running_var.data.fill_(value)
            assert_close(model(x), copy.deepcopy(model)(x))


class Part(nn.Module):
    """A module in train mode with a norm in eval mode and a vector buffer of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.norm = nn.BatchNorm1d(4).eval()

    def forward(self, x):
        return self.norm(x) + self.kept


def test_lanes_follow_writes_through_data_next_to_other_buffers():
    """Refreshing one buffer does not mark the other buffers as up to date."""
    model, x = Part(), torch.randn(9, 4)
    with parallel(model, TWO):
        model(x)
        model.norm.running_var.data.fill_(9.0)
        for _ in range(3):
            assert_close(model(x), copy.deepcopy(model)(x))


class Returns(nn.Module):
    """Returns its input, a parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.given = nn.Parameter(torch.randn(3))
        self.register_buffer("kept", torch.randn(3))

    def forward(self, x):
        return x, self.given, self.kept


def test_whole_calls_return_the_models_own_tensors():
    """A parameter or a buffer that `submit` or `map` returns is the model's own, as in a cut call."""
    model, x = Returns(), torch.randn(9, 3)
    with parallel(model, TWO) as p:
        for output in (model(x), model(x), p.submit(x).result(), *p.map([(x,)])):
            assert output[1] is model.given
            assert output[2] is model.kept


class Scales(nn.Module):
    """Multiplies by a buffer without writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return x * self.scale


def test_buffers_that_no_lane_wrote_keep_their_version():
    """A call in lanes does not invalidate the graph of an earlier plain call that saved the buffer."""
    model = Scales()
    x = torch.randn(11, 4, requires_grad=True)
    with parallel(model, TWO):
        (model(x[:1]).sum() + model(x).sum()).backward()
    assert_close(x.grad[1:], torch.ones(10, 4))


class Steps(nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.steps.add_(1)
        return x + 0


def test_buffers_of_whole_calls_go_back_to_the_model():
    """After `map`, the model has lane 0's buffers. Other lanes may run most of the batches."""
    model = Steps()
    with torch.no_grad(), parallel(model, TWO) as p:
        for calls in (1, 5, 20):
            while p.stats().lanes[0].tasks < calls:
                list(p.map([torch.zeros(2, 1)] * 20))
            assert int(model.steps) == p.stats().lanes[0].tasks


@pytest.mark.parametrize(
    "write", [torch.Tensor.fill_, lambda buffer, value: buffer.data.fill_(value)], ids=["fill", "data"]
)
def test_buffers_that_the_caller_sets_are_not_overwritten(write):
    """A buffer that the caller sets after `map` is not overwritten by an older value of lane 0."""
    model = nn.Sequential(nn.BatchNorm1d(1), Steps())
    with torch.no_grad(), parallel(model, TWO) as p:
        list(p.map([torch.rand(2, 1)] * 8))
        write(model[1].steps, 100)
        write(model[0].running_mean, 7.0)
        model.eval()(torch.zeros(9, 1))
        assert int(model[1].steps) == 101
        assert float(model[0].running_mean) == 7.0


class Slotted:
    """An object with a slot and without a `__dict__`."""

    __slots__ = ("owner",)


def test_cycles_through_slots_are_freed_without_warnings():
    """The end of a block frees a replica with a reference cycle through a slot."""
    model = nn.Linear(4, 4)
    model.box = Slotted()
    model.box.owner = model
    with torch.no_grad(), parallel(model, TWO):
        model(torch.randn(9, 4))


@pytest.mark.parametrize("held", [lambda tensor: (tensor, 1), lambda tensor: deque([tensor]), lambda tensor: [tensor]])
def test_tensors_in_containers_of_any_kind_are_refreshed(held):
    """Lanes follow in-place writes to tensors in tuples, deques, and lists."""
    model, x = Scales(), torch.randn(9, 4)
    model.held = held(torch.ones(4))
    model.forward = types.MethodType(lambda self, x: x * self.held[0], model)
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(3):
            assert_close(model(x), x * model.held[0])
            model.held[0].add_(1)

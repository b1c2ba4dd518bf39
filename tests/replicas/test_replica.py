"""Buffers of a replica: every lane starts from the model's, and lane 0's go back to the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel
from parawrap.replicas import ReplicaSet
from tests.helpers.waiting import eventually

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3
X = torch.randn(11, 4)


class Kept(nn.Module):
    """A parameter, a buffer, and a function that forward calls with the module and the rows."""

    def __init__(self, write=lambda model, x: None, kept=()):
        super().__init__()
        self.given = nn.Parameter(torch.ones(4))
        self.register_buffer("kept", torch.zeros(4) if kept == () else kept)
        self.write = write

    def forward(self, x):
        self.write(self, x)
        return x * self.given + (0 if self.kept is None or self.kept.shape != (4,) else self.kept)


def in_place(model, x):
    model.kept.add_(1)


WRITES = [in_place, lambda model, _: model.kept.data.add_(1), lambda model, _: setattr(model, "kept", model.kept + 1)]


@pytest.mark.parametrize("write", WRITES, ids=["in_place", "data", "replaced"])
def test_calls_start_from_the_buffers(write):
    """The model gets lane 0's buffer, whichever way it is written, and a value that the caller sets in between counts."""
    model = Kept(write)
    with torch.no_grad(), parallel(model, THREE) as p:
        for step in (1, 2):
            assert_close(p(X), X + step)
            assert_close(model.kept, torch.full((4,), float(step)))
        for value in (10.0, 20.0):
            model.kept.data.fill_(value)
            assert_close(p(X), X + value + 1)
        model.kept = torch.zeros(4)
        assert_close(p(X), X + 1)


def test_tensors_in_a_tuple_start_anew():
    """A lane's later task starts from the model's tensor, though a tuple cannot hold another copy."""
    model = Kept(lambda model, x: model.held[0].add_(1))
    model.held = (torch.zeros(4),)
    made = ReplicaSet(model, [torch.device("cpu")] * 2)
    made.refresh()
    lane = made.current[1]
    for _ in range(2):
        lane.run_whole(None, lane.module, X)
        assert torch.equal(lane.module.held[0], torch.ones(4))


def test_buffers_that_share_memory():
    """A write through a buffer that is a view of another is seen through both, and both go to the model."""
    model = Kept(lambda model, x: model.part.add_(1))
    model.register_buffer("part", model.kept[2:])
    with torch.no_grad(), parallel(model, TWO):
        for calls in (1, 2, 3):
            assert_close(model(X), X + torch.tensor([0.0, 0, calls, calls]))
            assert_close(model.kept, torch.tensor([0.0, 0, calls, calls]))


@pytest.mark.parametrize("mode", [True, False])
def test_buffers_may_get_another_shape(mode):
    """Or be None first. The model gets the buffer of lane 0, and later calls start from it."""
    for kept, write in ((None, lambda: torch.ones(4)), (torch.zeros(3), lambda: torch.ones(5))):
        model = Kept(lambda model, _, write=write: setattr(model, "kept", write()), kept).train(mode)
        with torch.no_grad(), parallel(model, TWO) as p:
            for call in (p, lambda x: p.submit(x).result(), lambda x: list(p.map([x])), p):
                call(X)
            assert torch.equal(model.kept, write())
            model.kept = kept
            p(X)
            assert torch.equal(model.kept, write())


@pytest.mark.parametrize("first_rows", [1, 3, 13], ids=["whole", "idle lanes", "all lanes"])
def test_statistics_of_norms(first_rows):
    """Through any write, whatever the first call was, and next to other buffers."""
    model = nn.Sequential(nn.BatchNorm1d(4).eval(), Kept())
    with torch.no_grad(), parallel(model, ["cpu"] * 4, out_dims=0):
        model(torch.randn(first_rows, 4))
        for value in (9.0, 4.0):
            model[0].running_var.data.fill_(value)
            assert_close(model(X), copy.deepcopy(model)(X))


def test_whole_calls_write_back_lane_0():
    """After `map`. A buffer that the caller sets then is not overwritten by an older value."""
    model = nn.Sequential(nn.BatchNorm1d(4), Kept(in_place))
    with torch.no_grad(), parallel(model, TWO) as p:
        eventually(lambda: list(p.map([X] * 20)) and p.stats().lanes[0].tasks > 0, "a task in lane 0")
        assert model[1].kept[0] == p.stats().lanes[0].tasks
        for write in (torch.Tensor.fill_, lambda buffer, value: buffer.data.fill_(value)):
            list(p.map([X] * 4))
            write(model[1].kept, 100)
            write(model[0].running_mean, 7.0)
            model.eval()(X)
            assert model[1].kept.tolist() == [101] * 4
            assert model[0].running_mean.tolist() == [7] * 4
            model.train()


KEEPS_ROWS = [lambda model, x: setattr(model, "kept", x.mean(0)), lambda model, x: model.kept.copy_(x[0])]


@pytest.mark.parametrize("write", KEEPS_ROWS, ids=["replaced", "in place"])
def test_buffers_that_lanes_differ_in(write):
    """In evaluation mode. The model keeps its buffer, and in training mode it gets that of lane 0."""
    model = Kept(write).eval()
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            with pytest.raises(ReplicaError, match="the buffer 'kept' was written during a call in evaluation mode"):
                model(X)
            assert not model.kept.any()
        model.train()(X)
        assert model.kept.any()
        model.eval().write = in_place  # a count is the same in every lane, and so is NaN
        for count in (0.0, torch.nan):
            model.kept.fill_(count)
            model(X)


OTHER_VALUES = [lambda model, x: model.held[0].copy_(x[0]), lambda model, x: model.rows[: len(x)].add_(x)]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("write", OTHER_VALUES, ids=["item", "rows"])
def test_tensors_that_lanes_differ_in(mode, write):
    """A tensor that is not a buffer, in both modes and at every call; one with equal values goes to the model."""
    model = Kept(write).train(mode)
    model.held, model.rows = [torch.zeros(4)], torch.zeros(9, 4)
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=r"the tensor '(held\[0\]|rows)' was written during a call"):
                model(X)
            assert not any(tensor.any() for tensor in (model.held[0], model.rows))
        model.write = lambda model, x: model.rows.fill_(3)
        model(X)
    assert model.rows.eq(3).all()

"""Parameters of replicas are linked to the model's: gradients keep their layout, and writes in place keep the links."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.replicas import ReplicaSet

CPU = torch.device("cpu")
TWO, THREE = ["cpu"] * 2, ["cpu"] * 3

SGD = partial(torch.optim.SGD, lr=0.1)
WRITERS = {
    "loop": partial(SGD, foreach=False),
    "foreach": partial(SGD, foreach=True),
    "fused": partial(SGD, fused=True),
    "momentum": partial(SGD, momentum=0.9),
    "adam": torch.optim.Adam,
}


class TwoTables(nn.Module):
    """Looks up the same rows in a sparse and in a dense table, and one row twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)

    def forward(self, x):
        return self.sparse(x) * self.dense(x) + self.sparse(x[:, :1])


@pytest.mark.parametrize("devices", [TWO, THREE], ids=["two lanes", "three lanes"])
@pytest.mark.parametrize("optimizer", [SGD, torch.optim.SparseAdam], ids=["SGD", "SparseAdam"])
@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_over_several_steps(make, optimizer, devices):
    """The gradients of an embedding stay sparse, and gradients and weights equal the plain ones after every step."""
    model = make(9, 4, sparse=True)
    plain = copy.deepcopy(model)
    optimizers = [optimizer(list(each.parameters())) for each in (model, plain)]
    with parallel(model, devices):
        for _ in range(5):
            x = torch.randint(9, (11, 3))
            for each, steps in zip((model, plain), optimizers, strict=True):
                steps.zero_grad()
                each(x).square().sum().backward()
                steps.step()
            assert model.weight.grad.is_sparse
            assert_close(model.weight.grad.to_dense(), plain.weight.grad.to_dense())
            assert_close(model.weight, plain.weight)


def test_sparse_gradients_accumulate():
    """Without zero_grad, the sparse gradients of several calls add up to the plain sum, next to dense ones."""
    model = TwoTables()
    plain = copy.deepcopy(model)
    with parallel(model, TWO):
        for _ in range(3):
            x = torch.randint(9, (9, 3))
            for each in (model, plain):
                each(x).square().sum().backward()
    assert model.sparse.weight.grad.is_sparse
    assert not model.dense.weight.grad.is_sparse
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad.to_dense(), theirs.grad.to_dense())


@pytest.mark.parametrize("optimizer", WRITERS.values(), ids=WRITERS)
def test_parameters_of_lanes_keep_their_node_when_an_optimizer_writes(optimizer):
    """After a step, a lane's parameter has the same object, the same autograd node, and the new values."""
    model = nn.Linear(4, 4)
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    parameters = [parameter for replica in made.current for parameter in replica.module.parameters()]
    nodes = [parameter.grad_fn for parameter in parameters]
    steps = optimizer(list(model.parameters()))
    for _ in range(3):
        before = model.weight.detach().clone()
        model(torch.randn(9, 4)).square().sum().backward()
        steps.step()
        made.refresh()
        assert not torch.equal(model.weight, before)
        now = [parameter for replica in made.current for parameter in replica.module.parameters()]
        assert all(mine is first for mine, first in zip(now, parameters, strict=True))
        assert None not in nodes
        assert all(mine.grad_fn is node for mine, node in zip(now, nodes, strict=True))
        for replica in made.current:
            assert_close(dict(replica.module.named_parameters()), dict(model.named_parameters()))


def test_a_weight_written_before_its_backward_is_refused():
    """As in a plain call, backward raises if an optimizer wrote a weight that the graph saved."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4, requires_grad=True)
    steps = SGD(model.parameters())
    model(x).sum().backward()
    with parallel(model, TWO):
        loss = model(x).sum()
        steps.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(x).sum().backward()  # the next call works


def test_a_bias_written_before_its_backward_is_not_refused():
    """As in a plain call, a write to a parameter that the graph did not save leaves backward usable."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    plain = copy.deepcopy(model)
    with parallel(model, TWO):
        for each in (model, plain):
            loss = each(x).square().sum()
            with torch.no_grad():
                each.bias.add_(1)
            loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)

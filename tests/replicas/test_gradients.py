"""Parameters of replicas are linked to the model's: gradients keep their layout, and writes in place keep the links."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.replicas._gradients import Mirror, send_to_mirrors

CPU, TWO = torch.device("cpu"), ["cpu"] * 2
SGD = partial(torch.optim.SGD, lr=0.1)


class TwoTables(nn.Module):
    """Looks up the same rows in a sparse and in a dense table, and one row twice."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse, self.dense = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)

    def forward(self, x):
        return self.sparse(x) * self.dense(x) + self.sparse(x[:, :1])


def test_sparse_gradients_stay_sparse():
    """Gradients and weights equal the plain ones after every step. Without zero_grad, gradients add up."""
    model = TwoTables()
    plain = copy.deepcopy(model)
    optimizers = [SGD(each.parameters()) for each in (model, plain)]
    with parallel(model, ["cpu"] * 3):
        for step in range(4):
            x = torch.randint(9, (11, 3))
            for each, steps in zip((model, plain), optimizers, strict=True):
                if step == 2:
                    steps.zero_grad()
                (each(x).square().sum() / 100).backward()
                steps.step()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert mine.grad.is_sparse == theirs.grad.is_sparse
                assert_close([mine, mine.grad.to_dense()], [theirs, theirs.grad.to_dense()])


def test_writes_before_backward():
    """As in a plain call, it is refused if the graph saved the weight, and accepted if not."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4, requires_grad=True)
    plain = copy.deepcopy(model)
    with parallel(model, TWO):
        for each in (model, plain):
            loss = each(x).square().sum()
            with torch.no_grad():
                each.bias.add_(1)
            loss.backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(mine.grad, theirs.grad)
        loss = model(x).sum()
        SGD(model.parameters()).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model(x).sum().backward()  # the next call works


def test_a_mirror_has_linked_copies():
    """Gradients of a copy reach the parameter; stale copies are kept until they are written again."""
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2), requires_grad=False)
    mirror = Mirror(CPU)
    assert mirror.take([weight, frozen]) == []
    copied = mirror.link(weight)
    assert mirror.link(weight) is copied
    assert copied.data_ptr() != weight.data_ptr()
    (copied * 3).sum().backward()
    assert weight.grad.tolist() == [3, 3]
    assert not mirror.link(frozen).requires_grad
    with torch.no_grad():
        weight.fill_(5)
    assert list(map(id, mirror.take([weight]))) == [id(weight)]
    assert copied.tolist() == [1, 1]
    assert send_to_mirrors([mirror], [weight]) == 8
    assert copied.tolist() == [5, 5]
    assert (len([*mirror.held()]), send_to_mirrors([mirror], []), send_to_mirrors([], [weight])) == (1, 0, 0)
    version = copied._version
    mirror.advance([weight, frozen])
    assert copied._version == version + 1
    mirror.unlink()
    assert mirror.link(weight) is not copied

"""Parameters of replicas are linked to the model's: gradients keep their layout, and writes in place keep the links."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel

TWO = ["cpu"] * 2
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

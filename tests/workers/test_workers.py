"""Blocks over worker processes: their methods, and their end."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import SessionError
from tests.helpers.pools import processes
from tests.helpers.same import assert_same


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)

    def embed(self, x, *, scale=1.0):
        return self.linear(x).tanh() * scale

    def total(self, x):
        return self.linear(x).sum()


def test_several_methods_are_parallel():
    """Each named method is cut; the others run plainly."""
    model, x = Several(), torch.randn(9, 4)
    expected = model(x), model.embed(x, scale=2.0), model.total(x)
    with processes(model, methods=("forward", "embed")) as p:
        for _ in range(2):
            assert_same((model(x), model.embed(x, scale=2.0), model.total(x)), expected)
            assert_close(p.method("embed")(x, scale=2.0), expected[1])
        assert_close(p.method("embed").submit(x, scale=2.0).result(), expected[1])
        assert_close(list(p.method("forward").map([x, x])), [expected[0]] * 2)
        assert p.stats().plain == 0


def test_block_is_reusable():
    """As a `with` statement and as a decorator, with the weights of that moment."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    p = processes(model)

    @p
    def evaluate(batch):
        return model(batch), p.stats().shards

    for _ in range(2):
        with p:
            assert_close(model(x), x @ model.weight.T + model.bias)
        model.weight.mul_(2)
        output, shards = evaluate(x)
        assert_close(output, x @ model.weight.T + model.bias)
        assert shards == (5, 4)


def test_closed_block_refuses_calls():
    """The model runs plainly. `close` may be called again."""
    model, x = nn.Linear(4, 4), torch.randn(9, 4)
    p = processes(model)
    expected, outputs = p(x), p.map([x] * 9, buffersize=2)
    next(outputs)
    p.close()
    p.close()
    for use in (p, p.submit, lambda x: list(p.map([x])), lambda _: list(outputs)):
        with pytest.raises(SessionError, match="closed"):
            use(x)
    assert_close(model(x), expected)

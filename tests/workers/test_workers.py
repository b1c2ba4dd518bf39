"""Blocks over worker processes: the same object, its methods and options, and its end."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import SessionError, ShardError, parallel
from tests.helpers.pools import CPUS, processes
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


# -- the block


def test_block_is_the_same_object():
    """After the block, also after an exception, the model is what it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x, before, keys, expected = torch.randn(9, 4), dict(vars(model)), [*model.state_dict()], None
    alias, expected = model, model(x)
    with pytest.raises(KeyError), processes(model) as p:  # noqa: PT012
        assert [*model.state_dict()] == keys
        assert_close(alias(x), expected)
        assert p.stats().shards == (5, 4)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert vars(clone).keys() == before.keys()
            assert_close(clone(x), expected)
        raise KeyError
    assert vars(model) == before
    assert_close(model(x), expected)


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


def test_several_blocks_at_once():
    """Blocks of different models, of a model and its part, and two blocks of one model."""
    model, other, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), torch.randn(9, 4)
    expected = model(x), other(x), model[0](x)
    with processes(model), processes(other), processes(model[0]), processes(model):
        for _ in range(2):
            assert_same((model(x), other(x), model[0](x)), expected)


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


def test_wrong_options_are_refused():
    """Before anything starts; those of `map` at the call, not at the first output."""
    with pytest.raises(ShardError, match="workers='fiber'"):
        parallel(nn.Identity(), CPUS, workers="fiber")
    with pytest.raises(ShardError, match="retries=-1"):
        processes(nn.Identity(), retries=-1)
    with processes(nn.Identity()) as p, pytest.raises(ShardError, match="buffersize=3 has no room for chunksize=4"):
        p.map([], buffersize=3, chunksize=4)


@pytest.mark.parametrize(
    ("target", "options", "x"),
    [
        (nn.LSTM(4, 3, 2, batch_first=True), {"out_dims": (0, (1, 1))}, torch.randn(9, 5, 4)),
        (lambda x: x[x[:, 0] > 0], {"out_dims": "ragged"}, torch.randn(9, 4)),
        (lambda x: x.square().mean(), {"reduce": "mean"}, torch.randn(9, 4)),
    ],
    ids=["lstm", "ragged", "mean"],
)
def test_options_give_the_plain_output(target, options, x):
    with processes(target, **options) as p:
        for rows in (x, x[:3]):
            assert_same(p(rows), target(rows))
        assert p.stats().plain == 0

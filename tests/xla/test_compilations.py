"""The number of compilations that calls need on XLA."""

from __future__ import annotations

import pytest
import torch

from parawrap import parallel
from tests.xla.zoo import XLAS, compilations, mlp, rows


@pytest.mark.parametrize("home", ["cpu", "xla:0"])
def test_known_shapes_compile_nothing(home):
    """The first call compiles one graph for all shards and one for the join. The second call compiles none."""
    model = mlp().to(home)
    with torch.no_grad(), parallel(model, XLAS):
        model(rows(4))  # makes the replicas
        with compilations() as first:
            model(rows(64)).cpu()
        with compilations() as second:
            model(rows(64)).cpu()
    assert first() == (1 if home == "cpu" else 2)
    assert second() == 0


@pytest.mark.parametrize("count", [63, 61, 33, 20, 5])
def test_each_size_is_compiled_once(count):
    """A call has two sizes at most. Known sizes, and calls of a known row count, compile nothing."""
    model = mlp()
    with torch.no_grad(), parallel(model, XLAS) as p:
        model(rows(64))
        with compilations() as compiled:
            model(rows(count))
        assert compiled() == len({*p.stats().shards} - {16}) <= 2
        with compilations() as compiled:
            model(rows(count))
            model(rows(64))
        assert compiled() == 0


def test_later_steps_compile_nothing():
    """Forward, backward, and the refresh of replicas reuse their graphs, starting with the second step."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(rows(64)).square().mean().backward()
        optimizer.step()

    with parallel(model, XLAS) as p:
        step()
        model(rows(64))  # the replicas are refreshed for the first time
        with compilations() as compiled:
            for _ in range(3):
                step()
    assert compiled() == 0
    assert p.stats().refreshes == 3

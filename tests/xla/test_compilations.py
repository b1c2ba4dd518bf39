"""The number of compilations that calls need on XLA."""

from __future__ import annotations

import pytest
import torch

from parawrap import parallel
from tests.xla.zoo import XLAS, compilations, mlp, rows


@pytest.mark.parametrize("home", ["cpu", "xla:0"])
def test_a_known_shape_needs_no_compilation(home):
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
def test_a_row_count_compiles_each_of_its_sizes_once(count):
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


def test_training_steps_compile_nothing_after_the_first():
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


def test_forward_compiles_nothing_while_a_model_on_a_device_is_trained():
    """After an optimizer step on the model's device, the lanes reuse their graphs."""
    import torch_xla  # of the child alone

    model = mlp().to("xla:0")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with parallel(model, XLAS):
        for index in range(5):
            with compilations() as compiled:
                output = model(rows(64))
            assert index < 2 or compiled() == 0
            optimizer.zero_grad()
            output.square().mean().backward()
            optimizer.step()
            torch_xla.sync()

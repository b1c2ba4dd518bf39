"""What forward writes: put back with one warning, kept by the model, or refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel
from tests.helpers.caller_warnings import warnings_of
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
WAYS = {
    "call": lambda p, x: [p(x) for _ in range(3)],
    "map": lambda p, x: list(p.map([x] * 6)),
    "submit": lambda p, x: [p.submit(x).result(PATIENCE_S) for _ in range(4)],
}


class Writes(nn.Linear):
    """Changes its own state in each forward, in the way that `kind` names. Each forward must find the first state."""

    def __init__(self, kind):
        super().__init__(3, 3)
        self.kind, self.extra, self.table = kind, nn.Tanh(), {"a": 1}

    def forward(self, x):
        assert self.state() == (False, True, {"a": 1})
        WRITES[self.kind][1](self)
        return x + 1

    def state(self):
        return hasattr(self, "new"), hasattr(self, "extra"), self.table


WRITES = {
    "attribute": ("new", lambda self: setattr(self, "new", 1)),
    "submodule": ("extra", lambda self: delattr(self, "extra")),
    "item": ("table['c']", lambda self: self.table.update(c=3)),
    "nothing": ("", lambda self: setattr(self, "kind", "nothing")),
}
"""The place that the warning names, and what forward does."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", WRITES)
def test_writes_are_put_back(kind, way):
    """Each task starts from the model's state, and the model keeps it. One warning per block names the place."""
    model, x = Writes(kind), torch.zeros(9, 3)
    before = model.state()

    def use():
        with torch.no_grad(), parallel(model, TWO) as p:
            assert all(torch.equal(output, x + 1) for output in WAYS[way](p, x))

    messages = warnings_of(use)
    assert model.state() == before
    assert len(messages) == (kind != "nothing")
    for message in messages:
        assert message.startswith("the model wrote ")
        assert WRITES[kind][0] in message
        assert "these writes do not come back to the model" in message


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["weight", "cache"])
def test_writes_that_are_refused(place, way):
    """Lanes share the model's parameters. A cache with one entry per row differs between the lanes of a cut call."""

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x):
            getattr(self, place).copy_(x.sum(0))
            return super().forward(x)

    model, x = Model().eval(), torch.arange(27.0).reshape(9, 3)
    with torch.no_grad(), parallel(model, TWO) as p:
        if (place, way) == ("weight", way) or way == "call":
            with pytest.raises(ReplicaError, match=place):
                WAYS[way](p, x)
        else:
            WAYS[way](p, x)
            assert_close(model.cache, x.sum(0))


def test_layers_created_in_forward():
    """Each lane would create its own layer, so the error suggests a call before the block, which works."""

    class Grows(nn.Module):
        def forward(self, x):
            if not hasattr(self, "layer"):
                self.layer = nn.Linear(3, 3)
            return self.layer(x)

    model, x = Grows(), torch.randn(7, 3)
    with parallel(model, TWO), pytest.raises(ReplicaError, match=r"layer.*before the block"):
        model(x)
    plain = model(x)
    with parallel(model, TWO):
        assert_close(model(x), plain)

"""Layers that forward makes are refused, and it may return its containers. `tests/api/parallel` has other writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel

TWO = ["cpu"] * 2
X = torch.randn(7, 4)


class Growing(nn.Linear):
    def __init__(self, make):
        super().__init__(4, 4)
        self.layers, self.make = [], make

    def forward(self, x):
        self.make(self)
        return super().forward(x)


MAKERS = {
    "head": lambda model: setattr(model, "head", nn.Linear(4, 4)),
    "scale": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(4))),
    "layers": lambda model: model.layers.append(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_layers_made_in_forward(name):
    """They are refused at every call, not only the first of its kind. The replica stays usable."""
    grows = []
    model = Growing(lambda model: grows and MAKERS[name](model))
    with torch.no_grad(), parallel(model, TWO) as p:
        for call in (p, p, lambda x: p.submit(x).result(), lambda x: next(p.map([x]))):
            grows.append(True)
            with pytest.raises(
                ReplicaError, match=rf"makes '{name}' in forward, and each lane made its own.*before the block"
            ):
                call(X)
            grows.clear()
            assert_close(call(X), nn.Linear.forward(model, X))


class Returning(nn.Linear):
    """Drops a list of layers, makes a buffer, and returns its own dict next to a parameter."""

    def __init__(self):
        super().__init__(4, 4)
        self.outputs, self.layers = {}, [nn.Linear(4, 4)]

    def forward(self, x):
        assert (len(self.layers), hasattr(self, "made")) == (1, False)
        self.layers = []
        self.register_buffer("made", x)
        self.outputs["y"] = super().forward(x)
        return self.outputs, self.weight


def test_outputs_of_the_models_state():
    """The model's state is put back, with a warning, and the output is the caller's. A parameter is the model's own."""
    model = Returning()
    with torch.no_grad(), parallel(model, TWO) as p:
        with pytest.warns(UserWarning, match=r"the model wrote .*'layers', .*'made'"):
            outputs = [p(X)]
        outputs += [p(X), p.submit(X).result(), *p.map([X])]
    for output, weight in outputs:
        assert_close(output["y"], nn.Linear.forward(model, X))
        assert weight is model.weight
    assert not model.outputs


def test_references_to_own_tensors():
    """A parameter of the model in a dict tells a later call nothing, and no warning comes."""
    model = Growing(lambda model: model.layers.update(w=model.weight))
    model.layers = {"w": None}
    with torch.no_grad(), parallel(model, TWO):
        for _ in range(2):
            assert_close(model(X), nn.Linear.forward(model, X))

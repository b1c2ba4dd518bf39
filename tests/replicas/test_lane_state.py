"""What forward writes into its own objects is put back with a warning; layers that forward makes are refused.

`tests/api/parallel/test_writes.py` does the same with `submit` and `map`.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel
from tests.helpers.caller_warnings import warnings_of

TWO = ["cpu"] * 2
X = torch.randn(7, 4)


class Writing(nn.Linear):
    """A layer that changes its own state in each call."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.table, self.queue, self.kinds, self.write = {"k": 1.0}, [1.0], {"a"}, write
        self.register_forward_pre_hook(lambda *_: None)

    def forward(self, x):
        held = (self.table, self.queue, self.kinds, self._forward_pre_hooks)
        state = sum(map(len, held)) + sum(self.queue)
        self.write(self)
        return super().forward(x) + state


WRITES = {
    "adds an item": (lambda model: model.table.update(x=torch.ones(1)), "table['x']"),
    "empties": (lambda model: setattr(model, "queue", []), "'queue'"),
    "appends": (lambda model: model.queue.append(2.0), "'queue'"),
    "adds": (lambda model: model.kinds.add("b"), "'kinds'"),
    "drops its hook": (lambda model: model._forward_pre_hooks.clear(), "_forward_pre_hooks"),
    "registers": (lambda model: model.register_buffer("made", torch.ones(2)), "'made'"),
    "sets a tensor": (lambda model: setattr(model, "last", torch.ones(1)), "'last'"),
    "equal number": (lambda model: model.table.update(k=float("1.0")), None),
}
"""What forward does, and the place that the warning names; None if there is nothing to warn of."""


@pytest.mark.parametrize(("write", "named"), WRITES.values(), ids=WRITES)
def test_changes_are_put_back_with_one_warning(write, named):
    """Each call starts from the state of the model. The block warns once, at its end at the latest."""
    model = Writing(write)
    want = copy.deepcopy(model)(X)

    def use():
        with torch.no_grad(), parallel(model, TWO) as p:
            for output in (p(X), p.submit(X).result(), *p.map([X]), p(X)):
                assert_close(output, want)

    found = warnings_of(use)
    assert len(found) == (named is not None)
    assert all(message.startswith("the model wrote") and named in message for message in found)


class Growing(nn.Linear):
    """Makes a layer or a parameter in each call in which `grows` is set."""

    grows = False

    def __init__(self, make):
        super().__init__(4, 4)
        self.layers, self.make = [], make

    def forward(self, x):
        if Growing.grows:
            self.make(self)
        return super().forward(x)


MAKERS = {
    "head": lambda model: setattr(model, "head", nn.Linear(4, 4)),
    "scale": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(4))),
    "layers": lambda model: model.layers.append(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_layers_made_in_forward_are_refused(name, monkeypatch):
    """At every call, not only the first of its kind. The replica stays usable."""
    model = Growing(MAKERS[name])
    with torch.no_grad(), parallel(model, TWO) as p:
        want = p(X)
        for call in (p, p, lambda x: p.submit(x).result(), lambda x: next(p.map([x]))):
            monkeypatch.setattr(Growing, "grows", True)
            with pytest.raises(ReplicaError, match=rf"makes '{name}' in forward, and each lane made its own"):
                call(X)
            monkeypatch.setattr(Growing, "grows", False)
            assert_close(call(X), want)


class Returning(nn.Linear):
    """Fills a dict of its own and returns it."""

    def __init__(self):
        super().__init__(4, 4)
        self.outputs = {}

    def forward(self, x):
        self.outputs["y"] = super().forward(x)
        return self.outputs


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_containers_that_forward_returns():
    """The model's dict is emptied again, and the output is the caller's."""
    model = Returning()
    with torch.no_grad(), parallel(model, TWO) as p:
        outputs = [p(X), p(X), p.submit(X).result(), *p.map([X])]
    for output in outputs:
        assert_close(output["y"], nn.Linear.forward(model, X))
    assert not model.outputs


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_hooks_of_torch_write_unwarned(norm):
    """Weight norm and spectral norm set an attribute in each call."""
    model = norm(nn.Linear(4, 4)).eval()
    with torch.no_grad(), parallel(model, TWO) as p:
        assert_close(p(X), copy.deepcopy(model)(X))

"""What forward writes into its own objects is put back with a warning; layers that forward makes are refused."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import ReplicaError, parallel

TWO = ["cpu"] * 2
CALLS = {
    "call": lambda p, x: p(x),
    "submit": lambda p, x: p.submit(x).result(),
    "map": lambda p, x: next(iter(p.map([x]))),
}
each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
X = torch.randn(7, 4)


class Writing(nn.Linear):
    """A layer that changes its own state in each call."""

    def __init__(self, write):
        super().__init__(4, 4)
        self.first, self.table, self.queue, self.kinds = True, {"k": 1.0}, [1.0], {"a"}
        self.write = write
        self.register_forward_pre_hook(lambda *_: None)

    def forward(self, x):
        held = (self.table, self.queue, self.kinds, self._forward_pre_hooks)
        state = float(hasattr(self, "first")) + sum(map(len, held)) + sum(self.queue)
        self.write(self)
        return super().forward(x) + state


def deletes(model):
    del model.first


WRITES = {
    "deletes": (deletes, "'first'"),
    "sets": (lambda model: setattr(model, "last", 3), "'last'"),
    "pops": (lambda model: model.table.pop("k"), r"table\['k'\]"),
    "adds an item": (lambda model: model.table.update(x=torch.ones(1)), r"table\['x'\]"),
    "empties": (lambda model: setattr(model, "queue", []), "'queue'"),
    "clears": (lambda model: model.queue.clear(), "'queue'"),
    "appends": (lambda model: model.queue.append(2.0), "'queue'"),
    "adds": (lambda model: model.kinds.add("b"), "'kinds'"),
    "drops its hook": (lambda model: model._forward_pre_hooks.clear(), "_forward_pre_hooks"),
    "registers": (lambda model: model.register_buffer("made", torch.ones(2)), "'made'"),
    "sets a tensor": (lambda model: setattr(model, "last", torch.ones(1)), "'last'"),
    "other order": (lambda model: model.table.update(k=model.table.pop("k")), None),
    "equal number": (lambda model: model.table.update(k=float("1.0")), None),
}
"""What forward does, and the place that the warning names; None if there is nothing to warn of."""


@each_call
@pytest.mark.parametrize(("write", "named"), WRITES.values(), ids=WRITES)
def test_changes_are_put_back_with_one_warning(write, named, call):
    """Each call starts from the state of the model. The block warns once, at its end at the latest."""
    model = Writing(write)
    want = copy.deepcopy(model)(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.no_grad(), parallel(model, TWO) as p:
            for _ in range(3):
                assert_close(call(p, X), want)
    found = [str(warning.message) for warning in caught]
    assert len(found) == (named is not None)
    assert all(re.search(rf"the model wrote .*{named}.* during a call", message) for message in found)


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


@each_call
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda model: setattr(model, "head", nn.Linear(4, 4)), "head"),
        (lambda model: setattr(model, "scale", nn.Parameter(torch.ones(4))), "scale"),
        (lambda model: model.layers.append(nn.Linear(4, 4)), "layers"),
    ],
    ids=["layer", "parameter", "item"],
)
def test_layers_made_in_forward_are_refused(make, name, call, monkeypatch):
    """At every call, not only the first of its kind. The replica stays usable."""
    model = Growing(make)
    with torch.no_grad(), parallel(model, TWO) as p:
        want = call(p, X)
        for _ in range(2):
            monkeypatch.setattr(Growing, "grows", True)
            with pytest.raises(ReplicaError, match=rf"makes '{name}' in forward, and each lane made its own"):
                call(p, X)
            monkeypatch.setattr(Growing, "grows", False)
            assert_close(call(p, X), want)


class Returning(nn.Linear):
    """Fills a dict of its own and returns it."""

    def __init__(self):
        super().__init__(4, 4)
        self.outputs = {}

    def forward(self, x):
        self.outputs["y"] = super().forward(x)
        return self.outputs


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
@each_call
def test_containers_that_forward_returns(call):
    """The model's dict is emptied again, and the output is the caller's."""
    model = Returning()
    with torch.no_grad(), parallel(model, TWO) as p:
        outputs = [call(p, X) for _ in range(3)]
    for output in outputs:
        assert_close(output["y"], nn.Linear.forward(model, X))
    assert not model.outputs


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_hooks_of_torch_compute_without_a_warning():
    """Weight norm and spectral norm set an attribute in each call."""
    for norm in (nn.utils.weight_norm, nn.utils.spectral_norm):
        model = norm(nn.Linear(4, 4)).eval()
        with torch.no_grad():
            want = model(X)
            with parallel(model, TWO) as p:
                assert_close(p(X), want)

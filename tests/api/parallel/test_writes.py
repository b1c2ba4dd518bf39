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
THREE = ["cpu"] * 3
WAYS = {
    "call": lambda p, x: [p(x) for _ in range(3)],
    "map": lambda p, x: list(p.map([x] * 6)),
    "submit": lambda p, x: [p.submit(x).result(PATIENCE_S) for _ in range(4)],
}


class Writes(nn.Module):
    """Changes its own state in each forward, in the way that `kind` names. Each forward must find the first state."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear, self.extra = nn.Linear(3, 3), nn.Tanh()
        self.register_buffer("shift", torch.zeros(3))
        self.label, self.words, self.table, self.seen = "first", ["a", "b"], {"a": 1, "b": 2}, set()
        self.config = type("Config", (), {})()
        self.config.depth = 2

    def forward(self, x):
        assert self.state() == ("first", ["a", "b"], {"a": 1, "b": 2}, set(), 2, True, True, False)
        WRITES[self.kind][1](self)
        return x + 1

    def state(self):
        return (
            getattr(self, "label", None), self.words, self.table, self.seen, getattr(self.config, "depth", None),
            hasattr(self, "extra"), hasattr(self, "shift"), hasattr(self, "new"),
        )  # fmt: skip


WRITES = {
    "new attribute": ("new", lambda self: setattr(self, "new", 1)),
    "attribute": ("label", lambda self: setattr(self, "label", "second")),
    "no attribute": ("label", lambda self: delattr(self, "label")),
    "attribute of an object": ("config.depth", lambda self: delattr(self.config, "depth")),
    "longer list": ("words", lambda self: self.words.append("c")),
    "empty list": ("words", lambda self: self.words.clear()),
    "item": ("table['c']", lambda self: self.table.update(c=3)),
    "no item": ("table['a']", lambda self: self.table.pop("a")),
    "set": ("seen", lambda self: self.seen.add(1)),
    "no submodule": ("extra", lambda self: delattr(self, "extra")),
    "submodule None": ("extra", lambda self: setattr(self, "extra", None)),
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

    (message,) = warnings_of(use)
    assert model.state() == before
    assert message.startswith("the model wrote ")
    assert WRITES[kind][0] in message
    assert "these writes do not come back to the model" in message


@pytest.mark.parametrize("way", WAYS)
def test_setting_the_same_value_is_no_write(way):
    class Sets(nn.Module):
        scale = 2

        def forward(self, x):
            self.scale = 2
            return x * self.scale

    model, x = Sets(), torch.zeros(9, 3)
    model.scale = 2
    with torch.no_grad(), parallel(model, TWO) as p:
        assert warnings_of(lambda: WAYS[way](p, x)) == []


@pytest.mark.filterwarnings("ignore:the model wrote:UserWarning")
def test_writes_do_not_rebuild_replicas():
    class Remembers(nn.Linear):
        ran = ()

        def forward(self, x):
            type(self).ran += (id(self),)
            self.last = x.sum().item()
            return super().forward(x)

    with torch.no_grad(), parallel(Remembers(4, 4), THREE) as p:
        for _ in range(4):
            p(torch.randn(7, 4))
    assert len(set(Remembers.ran)) == 3


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["parameter", "buffer in eval mode"])
def test_writes_that_are_refused(kind, way):
    """Each lane would write the model's own parameters; a cache with one entry per row differs between lanes."""

    class Model(nn.Linear):
        def __init__(self):
            super().__init__(3, 3)
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, x):
            if kind == "parameter":
                self.weight.mul_(0.5)
            else:
                self.cache.copy_(x.sum(0))
            return super().forward(x)

    model = Model().eval()
    x = torch.arange(27.0).reshape(9, 3)
    if kind == "parameter" or way == "call":
        place = "weight" if kind == "parameter" else "cache"
        with torch.no_grad(), parallel(model, TWO) as p, pytest.raises(ReplicaError, match=place):
            WAYS[way](p, x)
    else:
        with torch.no_grad(), parallel(model, TWO) as p:
            WAYS[way](p, x)
        assert_close(model.cache, x.sum(0))  # whole calls write as plain calls do


class Grows(nn.Module):
    """Creates a layer or a parameter in its first forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.inner = nn.Module()
        self.layer = None

    def forward(self, x):
        owner = self.inner if self.kind == "nested" else self
        if getattr(owner, "layer", None) is None:
            owner.layer = nn.Parameter(torch.eye(3)) if self.kind == "parameter" else nn.Linear(3, 3)
        return x @ owner.layer if self.kind == "parameter" else owner.layer(x)


@pytest.mark.parametrize("kind", ["layer", "parameter", "nested"])
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
def test_layers_created_in_forward(grad, kind):
    """Each lane would create its own layer, so the error suggests a call before the block, which works."""
    model, x = Grows(kind), torch.randn(7, 3)
    with torch.set_grad_enabled(grad), parallel(model, THREE):
        for _ in range(2):
            with pytest.raises(ReplicaError, match=r"layer.*before the block"):
                model(x)
    plain = model(x)
    with parallel(model, THREE):
        assert_close(model(x), plain)

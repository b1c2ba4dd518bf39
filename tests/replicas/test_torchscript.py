"""Scripted modules keep their attributes in C++. Replicas are refreshed if, and only if, these attributes change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.replicas import ReplicaSet

CPU = torch.device("cpu")


class Holds(nn.Module):
    """Has tensors in a list, a dict, and a tuple, strings in a list, and a number that may be NaN."""

    def __init__(self, size: int, limit: float) -> None:
        super().__init__()
        items = [torch.ones(size), torch.full((size,), 2.0)]
        self.items = torch.jit.Attribute(items, list[torch.Tensor])
        self.table = torch.jit.Attribute({"shift": torch.full((size,), 10.0)}, dict[str, torch.Tensor])
        self.pair = (torch.full((size,), 100.0), 1)
        self.words = ["one", "two"]
        self.limit = limit
        self.inner = nn.Linear(size, size)

    def forward(self, x):
        scale = self.items[0]
        for item in self.items[1:]:
            scale = scale + item
        shift = self.table["shift"] + self.pair[0] * self.pair[1] + len(self.words) * 1000.0
        output = self.inner(x) * scale + shift
        return output if math.isnan(self.limit) else output.clamp(max=self.limit)


CHANGES = {
    "item": lambda model: setattr(model, "items", [model.items[0], model.items[1] * 3]),
    "order": lambda model: setattr(model, "items", model.items[::-1]),
    "more items": lambda model: setattr(model, "items", [*model.items, model.items[0]]),
    "equal items": lambda model: setattr(model, "items", [item.clone() for item in model.items]),
    "value": lambda model: setattr(model, "table", {"shift": model.table["shift"] + 5}),
    "more keys": lambda model: setattr(model, "table", {**model.table, "third": model.table["shift"]}),
    "pair": lambda model: setattr(model, "pair", (model.pair[0] * 2, 1)),
    "number": lambda model: setattr(model, "pair", (model.pair[0], 2)),
    "words": lambda model: setattr(model, "words", [*model.words, "three"]),
    "limit": lambda model: setattr(model, "limit", 1.5),
}


# Comparing two tensors of one element gives a bool; comparing larger tensors gives a tensor without a truth value.
@pytest.mark.parametrize("size", [1, 4])
def test_replicas_follow_scripted_modules(size):
    """From each change, also to equal tensors, until the next refresh; an attribute that is NaN does not count."""
    model = torch.jit.script(Holds(size, math.nan).eval())
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    x = torch.randn(9, size)
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        for change in CHANGES.values():
            assert not made.stale()
            change(model)
            assert made.stale()
            made.refresh()
            for replica in made.current:
                torch.testing.assert_close(replica.module(x), torch.jit.freeze(model)(x))
            torch.testing.assert_close(p(x), torch.jit.freeze(model)(x))
        assert p.stats().shards == (5, 4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return x + self.count


def test_buffers_of_scripted_modules_come_back():
    model = torch.jit.script(Counting())
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        for calls in (1, 2, 3):
            assert p(torch.zeros(5)).tolist() == [calls] * 5
            assert model.count.item() == calls

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
        self.items = torch.jit.Attribute([torch.ones(size), torch.full((size,), 2.0)], list[torch.Tensor])
        self.table = torch.jit.Attribute({"shift": torch.full((size,), 10.0)}, dict[str, torch.Tensor])
        self.pair, self.words, self.limit = (torch.ones(size), 1), ["one", "two"], limit

    def forward(self, x):
        shift = self.table["shift"] + self.pair[0] * self.pair[1] + len(self.words) * 1000.0
        output = x * self.items[0] + self.items[-1] + shift
        return output if math.isnan(self.limit) else output.clamp(max=self.limit)


CHANGES = {
    "items": lambda model: model.items[::-1],
    "table": lambda model: {**model.table, "third": model.table["shift"]},
    "pair": lambda model: (model.pair[0], 2),
    "words": lambda model: [*model.words, "three"],
    "limit": lambda model: 1.5,
}


@pytest.mark.parametrize("size", [1, 4])  # larger tensors compare to a tensor without a truth value
def test_scripted_modules_are_followed(size):
    """From each change, also to equal tensors, until the next refresh; an attribute that is NaN does not count."""
    model = torch.jit.script(Holds(size, math.nan).eval())
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    x = torch.randn(9, size)
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        for name, change in [("items", lambda model: [item.clone() for item in model.items]), *CHANGES.items()]:
            assert not made.stale()
            setattr(model, name, change(model))
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


def test_scripted_buffers_come_back():
    model = torch.jit.script(Counting())
    with torch.no_grad(), parallel(model, ["cpu"] * 2) as p:
        for calls in (1, 2, 3):
            assert p(torch.zeros(5)).tolist() == [calls] * 5
            assert model.count.item() == calls

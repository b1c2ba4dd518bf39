"""Scripted modules keep their attributes in C++. Replicas are refreshed if, and only if, these attributes change."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import parallel
from parawrap.replicas import ReplicaSet

CPU = torch.device("cpu")
TWO = ["cpu"] * 2


class Holds(nn.Module):
    """Has tensors in a list, a dict, and a tuple, strings in a list, and a number that may be NaN."""

    def __init__(self, size: int, limit: float) -> None:
        super().__init__()
        items = [torch.ones(size), torch.full((size,), 2.0)]
        table = {"shift": torch.full((size,), 10.0), "other": torch.zeros(size)}
        self.items = torch.jit.Attribute(items, list[torch.Tensor])
        self.table = torch.jit.Attribute(table, dict[str, torch.Tensor])
        self.pair = (torch.full((size,), 100.0), 1)
        self.words = ["one", "two"]
        self.limit = limit

    def forward(self, x):
        scale = self.items[0]
        for item in self.items[1:]:
            scale = scale + item
        shift = self.table["shift"] + self.pair[0] * self.pair[1] + len(self.words) * 1000.0
        output = x * scale + shift
        return output if math.isnan(self.limit) else output.clamp(max=self.limit)


def scripted(size, limit=math.nan):
    return torch.jit.script(Holds(size, limit).eval())


def another_item(model):
    model.items = [model.items[0], model.items[1] * 3]


def an_item_more(model):
    model.items = [*model.items, model.items[0]]


def items_in_another_order(model):
    model.items = model.items[::-1]


def equal_items(model):
    model.items = [item.clone() for item in model.items]


def another_value(model):
    model.table = {**model.table, "shift": model.table["shift"] + 5}


def an_equal_value(model):
    model.table = {**model.table, "shift": model.table["shift"].clone()}


def a_key_more(model):
    model.table = {**model.table, "third": model.table["shift"]}


def another_pair(model):
    model.pair = (model.pair[0] * 2, 1)


def an_equal_pair(model):
    model.pair = (model.pair[0].clone(), 1)


def another_number_in_a_pair(model):
    model.pair = (model.pair[0], 2)


def a_word_more(model):
    model.words = [*model.words, "three"]


def a_number(model):
    model.limit = 1.5


CHANGES = (
    another_item,
    an_item_more,
    items_in_another_order,
    equal_items,
    another_value,
    an_equal_value,
    a_key_more,
    another_pair,
    an_equal_pair,
    another_number_in_a_pair,
    a_word_more,
    a_number,
)

every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
# Comparing two tensors of one element gives a bool; comparing larger tensors gives a tensor without a truth value.
every_size = pytest.mark.parametrize("size", [1, 4])


@every_size
@every_change
def test_a_change_in_a_scripted_module_makes_replicas_stale(change, size):
    """Replicas are stale from the change until the next refresh, also if a new tensor has equal values."""
    model = scripted(size, math.inf)
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    assert not made.stale()
    change(model)
    assert made.stale()
    made.refresh()
    assert not made.stale()


@every_size
def test_replicas_of_an_unchanged_scripted_module_are_not_stale(size):
    """Repeated checks find no change, also if an attribute is NaN, which is not equal to itself."""
    model = scripted(size)
    assert math.isnan(model.limit)
    made = ReplicaSet(model, [CPU] * 2)
    made.refresh()
    assert not any(made.stale() for _ in range(5))


@every_size
@every_change
def test_calls_of_a_scripted_module_follow_its_changes(change, size, monkeypatch):
    """Calls have the plain output before and after a change, and only the change refreshes the replicas."""
    model = scripted(size)
    x = torch.randn(9, size)
    refresh, refreshes = ReplicaSet.refresh, []
    monkeypatch.setattr(ReplicaSet, "refresh", lambda made: (refreshes.append(1), refresh(made)))
    with torch.no_grad(), parallel(model, TWO) as p:

        def call():
            scaled = x * torch.stack(model.items).sum(0)
            expected = scaled + model.table["shift"] + model.pair[0] * model.pair[1] + len(model.words) * 1000.0
            assert_close(model(x), expected if math.isnan(model.limit) else expected.clamp(max=model.limit))

        for _ in range(5):
            call()
        assert len(refreshes) == 1
        change(model)
        for _ in range(4):
            call()
        assert len(refreshes) == 2
        assert p.stats().shards == (5, 4)

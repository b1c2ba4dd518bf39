"""`Tuplewise`: a sequence with the attributes, calls, and items of each of its items."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from parawrap import Tuplewise, recursive_to


def test_acts_on_each_item():
    """Indexing, attributes, and calls can be chained, and attributes can be set."""
    assert Tuplewise([(0, 1), (2, 3), (4, 5)])[0] == [0, 2, 4]
    parts = Tuplewise([torch.zeros(2), torch.ones(3)])
    assert parts.shape[0] == (2, 3)
    assert parts.add(1).sum().item() == [2, 6]
    assert isinstance(parts.shape, Tuplewise)
    items = [SimpleNamespace(a=1), SimpleNamespace(a=2)]
    Tuplewise(items).a = 5
    assert [item.a for item in items] == [5, 5]
    assert recursive_to(Tuplewise([torch.zeros(1)]), torch.float64).dtype == [torch.float64]


def test_is_a_sequence_of_its_items():
    parts = Tuplewise(iter("ab"))
    assert (list(parts), len(parts), repr(parts)) == (["a", "b"], 2, "Tuplewise(['a', 'b'])")
    assert parts != [1]
    assert parts != "ab"
    assert not Tuplewise([])


def test_copies_need_no_items_at_first():
    """`__getattr__` does not recurse on an instance that has no items yet."""
    parts = Tuplewise([[1], [2]])
    assert copy.deepcopy(parts) == pickle.loads(pickle.dumps(parts)) == [[1], [2]]


def test_errors_are_those_of_the_items():
    with pytest.raises(AttributeError, match="'int' object has no attribute 'shape'"):
        _ = Tuplewise([torch.zeros(1), 3]).shape
    assert not hasattr(Tuplewise([1]), "__array__")

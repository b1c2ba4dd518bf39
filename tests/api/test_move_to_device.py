"""`recursive_to`, `recursive_cuda`, `cuda_attrs`, and `Batch`."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap import Batch, cuda_attrs, recursive_cuda, recursive_to

Edge = namedtuple("Edge", ["start", "to"])


def movable(*methods):
    """Return a value with methods that return the value."""
    value = Mock(spec=methods)
    value.configure_mock(**{f"{name}.return_value": value for name in methods})
    return value


class Pair(Batch):
    def __init__(self, x, y) -> None:
        self.x, self.y = x, y


def test_recursive_to_walks_containers():
    """Tensors at any depth are moved; other values, order, and types stay.

    A field named `to` is not called.
    """
    value = {
        "b": [torch.zeros(1), "text", None, torch.nn.Linear],
        "a": Edge((torch.zeros(1), 3), torch.zeros(1)),
    }
    value["c"] = UserDict(x=torch.zeros(1))
    moved = recursive_to(value, torch.float64)
    assert list(moved) == ["b", "a", "c"]
    assert (
        moved["b"][0].dtype
        is moved["a"].to.dtype
        is moved["a"].start[0].dtype
        is moved["c"]["x"].dtype
        is torch.float64
    )
    assert moved["b"][1:] == ["text", None, torch.nn.Linear]
    assert (type(moved["a"]), type(moved["c"])) == (Edge, UserDict)
    assert value["b"][0].dtype is torch.float32


def test_recursive_to_calls_their_to():
    """A PackedSequence keeps the dtype of its batch sizes, and keyword arguments are passed on."""
    moved = recursive_to([pack_sequence([torch.zeros(2), torch.zeros(1)])], torch.float64)[0]
    assert (type(moved), moved.data.dtype, moved.batch_sizes.dtype) == (
        PackedSequence,
        torch.float64,
        torch.int64,
    )
    only_to = movable("to")
    assert recursive_to((only_to,), "cpu", non_blocking=True) == (only_to,)
    assert only_to.mock_calls == [call.to("cpu", non_blocking=True)]


def test_recursive_cuda_moves_values(monkeypatch):
    """A value is moved by `cuda`, else by `to`, else stays. The default is the current device."""
    values = [movable("cuda", "to"), movable("to"), 3]
    assert recursive_cuda(values, 1, non_blocking=True) == values
    assert values[0].mock_calls == [call.cuda(1, non_blocking=True)]
    assert values[1].mock_calls == [call.to(1, non_blocking=True)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert recursive_cuda(movable("cuda")).mock_calls == [call.cuda(3)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recursive_cuda(movable("to")).mock_calls == [call.to("cuda")]


def test_cuda_attrs_moves_in_place():
    """If one attribute cannot be moved, no attribute changes."""
    obj = SimpleNamespace(a=movable("cuda"), b=[movable("cuda")], c="text")
    assert cuda_attrs(obj, 0, non_blocking=True) is obj
    assert obj.a.mock_calls == obj.b[0].mock_calls == [call.cuda(0, non_blocking=True)]
    obj = SimpleNamespace(a=[1], b=SimpleNamespace(cuda=lambda device: None))
    before = obj.a
    with pytest.raises(TypeError):
        cuda_attrs(obj, 0)
    assert obj.a is before


def test_batch_moves_its_attributes():
    """Each method returns the batch. Nested batches and slots are moved too."""

    @dataclass(slots=True)
    class Slotted(Batch):
        x: torch.Tensor

    batch = Pair(torch.zeros(1), {"inner": Pair(torch.zeros(1), 3)})
    assert recursive_to((batch,), torch.float64)[0] is batch
    assert batch.x.dtype is batch.y["inner"].x.dtype is torch.float64
    assert Slotted(torch.zeros(1)).to(torch.float64).x.dtype is torch.float64
    pair = Pair([movable("cuda", "pin_memory")], movable("cuda", "pin_memory"))
    assert pair.cuda(2).pin_memory() is pair
    assert pair.x[0].mock_calls == pair.y.mock_calls == [call.cuda(2), call.pin_memory()]

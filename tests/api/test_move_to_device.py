"""`recursive_to`, `recursive_cuda`, `cuda_attrs`, and `Batch`."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap import Batch, cuda_attrs, recursive_cuda, recursive_to

Edge = namedtuple("Edge", ["start", "to"])


class Recorder:
    """A value that records how it was moved."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple, dict]] = []

    def cuda(self, *args, **kwargs):
        self.calls.append(("cuda", args, kwargs))
        return self

    def pin_memory(self):
        self.calls.append(("pin_memory", (), {}))
        return self


class OnlyTo:
    def to(self, device, *, non_blocking=False):
        self.moved = (device, non_blocking)
        return self


class Forgetful:
    """A value with `to` and `cuda` methods that return None."""

    def to(self, device):
        self.device = device

    cuda = to


class Pair(Batch):
    def __init__(self, x, y) -> None:
        self.x, self.y = x, y


def test_recursive_to_walks_containers():
    """Tensors at any depth are moved; other values, order, and types stay. A field named `to` is not called."""
    value = {"b": [torch.zeros(1), "text", None, torch.nn.Linear], "a": Edge((torch.zeros(1), 3), torch.zeros(1))}
    value["c"] = UserDict(x=torch.zeros(1))
    moved = recursive_to(value, torch.float64)
    assert list(moved) == ["b", "a", "c"]
    assert moved["b"][0].dtype is moved["a"].to.dtype is moved["a"].start[0].dtype is moved["c"]["x"].dtype is torch.float64
    assert moved["b"][1:] == ["text", None, torch.nn.Linear]
    assert (type(moved["a"]), type(moved["c"])) == (Edge, UserDict)
    assert value["b"][0].dtype is torch.float32


def test_recursive_to_calls_their_to():
    """A PackedSequence keeps the dtype of its batch sizes, and keyword arguments are passed on."""
    moved = recursive_to([pack_sequence([torch.zeros(2), torch.zeros(1)])], torch.float64)[0]
    assert (type(moved), moved.data.dtype, moved.batch_sizes.dtype) == (PackedSequence, torch.float64, torch.int64)
    assert recursive_to((OnlyTo(),), "cpu", non_blocking=True)[0].moved == ("cpu", True)


def test_recursive_cuda(monkeypatch):
    """A value is moved by `cuda`, else by `to`, else stays. The default is the current device."""
    recorder, only_to, other = recursive_cuda([Recorder(), OnlyTo(), 3], 1, non_blocking=True)
    assert recorder.calls == [("cuda", (1,), {"non_blocking": True})]
    assert (only_to.moved, other) == ((1, True), 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert recursive_cuda(Recorder()).calls == [("cuda", (3,), {})]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert recursive_cuda(OnlyTo()).moved == ("cuda", False)


@pytest.mark.parametrize(("move", "name"), [(recursive_to, "to"), (recursive_cuda, "cuda")], ids=["to", "cuda"])
def test_move_that_returns_none_raises(move, name):
    with pytest.raises(TypeError, match=rf"Forgetful\.{name}\(\) returned None\. End it with `return self`"):
        move([Forgetful()], "cpu")


def test_cuda_attrs_moves_in_place():
    """If one attribute cannot be moved, no attribute changes."""
    obj = SimpleNamespace(a=Recorder(), b=[Recorder()], c="text")
    assert cuda_attrs(obj, 0, non_blocking=True) is obj
    assert obj.a.calls == obj.b[0].calls == [("cuda", (0,), {"non_blocking": True})]
    obj = SimpleNamespace(a=[1], b=Forgetful())
    before = obj.a
    with pytest.raises(TypeError):
        cuda_attrs(obj, 0)
    assert obj.a is before


def test_batch_moves_its_attributes():
    """Each method returns the batch. Nested batches and slots are moved too."""

    @dataclass(slots=True)
    class Slotted(Batch):
        x: torch.Tensor

    batch = Pair(torch.zeros(1), {"inner": Pair(torch.zeros(1), Recorder())})
    assert recursive_to((batch,), torch.float64)[0] is batch
    assert batch.x.dtype is batch.y["inner"].x.dtype is torch.float64
    assert Slotted(torch.zeros(1)).to(torch.float64).x.dtype is torch.float64
    recorders = Pair([Recorder()], Recorder())
    assert recorders.cuda(2).pin_memory() is recorders
    assert recorders.x[0].calls == recorders.y.calls == [("cuda", (2,), {}), ("pin_memory", (), {})]

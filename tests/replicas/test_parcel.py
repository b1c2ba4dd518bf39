"""`Parcel`: many tensors are copied to a device in few transfers."""

from __future__ import annotations

import pytest
import torch

from parawrap.backends import _transfer
from parawrap.replicas import _batched_copies
from parawrap.replicas._batched_copies import Parcel, copies_at

CPU = torch.device("cpu")


@pytest.fixture
def sent(monkeypatch):
    """The tensors that are copied to another device."""
    brought = []

    def bring(tensor, device):
        brought.append(tensor)
        return _transfer.bring(tensor, device)

    def bring_into(target, tensor):
        brought.append(tensor)
        _transfer.bring_into(target, tensor)

    monkeypatch.setattr(_batched_copies, "bring", bring)
    monkeypatch.setattr(_batched_copies, "bring_into", bring_into)
    return brought


def tensors():
    """Return tensors of several dtypes, shapes, and strides."""
    return [
        torch.randn(3, 4),
        torch.arange(5),
        torch.randn(()),
        torch.randn(2, 0),
        torch.randn(4, 6).T,
        torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(3, dtype=torch.float64),
        torch.tensor([True, False]),
        torch.randn(1).expand(7),
        torch.arange(3, dtype=torch.int64),
    ]


def test_order_shapes_and_values_are_kept():
    """Each copy has the position, shape, dtype, and values of its original."""
    given = tensors()
    arrived = copies_at(CPU, given)
    assert [(each.shape, each.dtype) for each in arrived] == [(each.shape, each.dtype) for each in given]
    for one, other in zip(arrived, given, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_small_tensors_are_packed_by_dtype(sent):
    """There is one transfer per dtype."""
    copies_at(CPU, tensors())
    assert sorted((str(each.dtype), each.ndim) for each in sent) == [
        ("torch.bool", 1),
        ("torch.float32", 1),
        ("torch.float64", 1),
        ("torch.int64", 1),
    ]


def test_large_tensors_are_not_packed(sent, monkeypatch):
    """A tensor above the limit is transferred directly, without a copy into a pack."""
    monkeypatch.setattr(_batched_copies, "_SMALL", 64)
    large, small = torch.randn(5, 5), [torch.randn(2), torch.randn(3)]
    copies_at(CPU, [small[0], large, small[1]])
    assert [each is large for each in sent] == [True, False]


def test_packs_are_bounded(sent, monkeypatch):
    """No pack is larger than the limit, and every tensor is copied."""
    monkeypatch.setattr(_batched_copies, "_MOST", 100)
    given = [torch.full((6,), float(i)) for i in range(10)]
    arrived = copies_at(CPU, given)
    assert all(each.nbytes <= 100 for each in sent)
    assert [each.unique().item() for each in arrived] == list(range(10))


def test_a_parcel_is_packed_once_for_all_devices(monkeypatch):
    """A parcel that is written twice is packed once."""
    packed = []
    pack = _batched_copies._packed
    monkeypatch.setattr(_batched_copies, "_packed", lambda tensors: packed.append(len(tensors)) or pack(tensors))
    parcel = Parcel([torch.randn(2), torch.randn(3)])
    for _ in range(2):
        parcel.write([torch.empty(2), torch.empty(3)])
    assert packed == [2]


def test_no_tensors():
    """No tensors have no copies."""
    assert copies_at(CPU, []) == []

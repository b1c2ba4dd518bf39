"""Many tensors are copied to a device in few transfers."""

from __future__ import annotations

import pytest
import torch

from parawrap.replicas import _batched_copies, lasting
from parawrap.replicas._batched_copies import bytes_of, copies_at

CPU = torch.device("cpu")


@pytest.fixture
def sent(monkeypatch):
    """The tensors that are copied to another device."""
    brought = []
    bring, bring_into = _batched_copies.bring, _batched_copies.bring_into
    monkeypatch.setattr(_batched_copies, "bring", lambda each, device: (brought.append(each), bring(each, device))[1])
    monkeypatch.setattr(_batched_copies, "bring_into", lambda to, each: (brought.append(each), bring_into(to, each)))
    return brought


def tensors():
    """Return tensors of several dtypes, shapes, and strides."""
    return [
        *(torch.randn(3, 4), torch.arange(5), torch.randn(()), torch.randn(2, 0), torch.randn(4, 6).T, torch.arange(3)),
        *(torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(3, dtype=torch.float64)),
        *(torch.tensor([True, False]), torch.randn(1).expand(7), torch.eye(3).to_sparse()),
    ]


def test_copies_keep_order_shape_and_values(sent):
    """Small tensors are packed by dtype, and a single one of its dtype travels alone."""
    given = tensors()
    arrived = copies_at(CPU, given)
    for one, other in zip(arrived, given, strict=True):
        assert one is not other
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert sorted(str(each.dtype) for each in sent) == ["torch.bool", "torch.float32", "torch.float64", "torch.int64"]
    assert copies_at(CPU, []) == []
    assert (bytes_of(torch.ones(2, 3)), bytes_of(torch.eye(3).to_sparse())) == (24, 0)


def test_large_tensors_are_not_packed(sent):
    """Also next to small ones. They keep their place."""
    given = [torch.full((number,), float(number)) for number in (3, 1 << 19, 1, 8)]
    arrived = copies_at(CPU, given)
    assert [each.unique().item() for each in arrived] == [3, 1 << 19, 1, 8]
    assert sorted(each.numel() for each in sent) == [12, 1 << 19]


def test_lasting_tensors_outlive_the_callers_mode():
    with torch.inference_mode():
        with lasting():
            assert not torch.ones(1).is_inference()
            assert not torch.is_grad_enabled()
        assert torch.ones(1).is_inference()

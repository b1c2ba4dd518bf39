"""Many tensors are copied to a device in few transfers."""

from __future__ import annotations

import torch

from parawrap.replicas import _batched_copies
from parawrap.replicas._batched_copies import bytes_of, copies_at

CPU = torch.device("cpu")


def test_copies_keep_order_and_values(monkeypatch):
    """Small tensors are packed by dtype; a large one, and a single one of its dtype, travel alone."""
    sent = []
    transfer, transfer_into = _batched_copies.transfer, _batched_copies.transfer_into
    monkeypatch.setattr(_batched_copies, "transfer", lambda each, device: (sent.append(each), transfer(each, device))[1])
    monkeypatch.setattr(_batched_copies, "transfer_into", lambda to, each: (sent.append(each), transfer_into(to, each)))
    given = [
        *(torch.randn(3, 4), torch.arange(5), torch.randn(()), torch.randn(2, 0), torch.randn(4, 6).T, torch.arange(3)),
        *(torch.randn(1, 3, 2, 2).to(memory_format=torch.channels_last), torch.randn(3, dtype=torch.float64)),
        *(torch.tensor([True, False]), torch.randn(1).expand(7), torch.eye(3).to_sparse(), torch.ones(1 << 19)),
    ]
    arrived = copies_at(CPU, given)
    for one, other in zip(arrived, given, strict=True):
        assert one is not other
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    kinds = ["torch.bool", "torch.float32", "torch.float32", "torch.float64", "torch.int64"]
    assert sorted(str(each.dtype) for each in sent) == kinds
    assert copies_at(CPU, []) == []
    assert (bytes_of(torch.ones(2, 3)), bytes_of(torch.eye(3).to_sparse())) == (24, 0)

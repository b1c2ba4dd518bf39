"""`Ledger`: every change of a tensor's memory, form, or version is detected, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap.replicas import Ledger, buffers_written_unseen, may_be_written_unseen, with_other_buffers


@pytest.mark.parametrize("change", [torch.Tensor.half, torch.Tensor.clone, torch.Tensor.t, lambda data: data[:1]])
def test_another_form_is_detected(change):
    weight = nn.Parameter(torch.randn(3, 3))
    ledger = Ledger([weight], [])
    assert ledger.same_form()
    weight.requires_grad_(False)
    assert (ledger.same_form(), ledger.moved()) == (False, [])
    weight.requires_grad_()
    weight.data = change(weight.data)
    assert not ledger.same_form()
    assert ledger.moved()


def test_versions_show_writes_in_place():
    """Of copied tensors, until `enter_versions` is called. Inference tensors have none, and count as written."""
    weight, other = torch.zeros(2), torch.zeros(2)
    ledger = Ledger([weight, other], [weight])
    other.add_(1)
    assert ledger.unwritten()
    weight.add_(1)
    assert not ledger.unwritten()
    assert [id(tensor) for tensor in ledger.written()] == [id(weight)]
    ledger.enter_versions()
    assert ledger.unwritten()
    ledger.suspect([weight])
    assert not ledger.unwritten()
    with torch.inference_mode():
        weight = torch.zeros(2)
    assert not Ledger([weight], [weight]).unwritten()


def test_writes_without_versions():
    """Fused optimizers and norms write parameters and statistics, and leave their versions alone."""
    model = nn.Linear(2, 2)
    ledger, steps = Ledger([], []), torch.optim.SGD(model.parameters())
    assert not ledger.has_seen_steps
    steps.step()
    assert ledger.has_seen_steps
    ledger.enter_versions()
    assert not ledger.has_seen_steps
    norm, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2).eval()
    found = buffers_written_unseen([norm, other, nn.ReLU()])
    assert list(map(id, found)) == [id(norm.running_mean), id(norm.running_var)]
    assert not may_be_written_unseen(norm, norm.num_batches_tracked)
    written = with_other_buffers([norm.num_batches_tracked], [norm, other])
    assert {*map(id, written)} == {*map(id, norm.buffers())}

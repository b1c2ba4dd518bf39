"""`Ledger`: every change of a tensor's memory, form, or version is detected, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parawrap.replicas._ledger import Ledger


def half(tensor):
    tensor.data = tensor.data.half()


def other_memory(tensor):
    tensor.data = tensor.data.clone()


def transposed(tensor):
    tensor.data = tensor.data.t()


def fewer_rows(tensor):
    tensor.data = tensor.data[:1]


def freeze(tensor):
    tensor.requires_grad_(False)


@pytest.mark.parametrize("change", [half, other_memory, transposed, fewer_rows, freeze])
def test_another_form_of_a_tensor_is_detected(change):
    """The form of a tensor is its memory, strides, sizes, dtype, and requires_grad."""
    weight = nn.Parameter(torch.randn(3, 3))
    ledger = Ledger([weight], [])
    assert ledger.same_form()
    change(weight)
    assert not ledger.same_form()


def test_versions_show_writes_in_place():
    """An in-place write to a copied tensor is detected until `enter_versions` is called."""
    weight, other = torch.zeros(2), torch.zeros(2)
    ledger = Ledger([weight, other], [weight])
    weight.add_(1)
    other.add_(1)
    assert not ledger.unwritten()
    assert [id(tensor) for tensor in ledger.written()] == [id(weight)]
    ledger.enter_versions()
    assert ledger.unwritten()


def test_inference_tensors_count_as_written():
    """A tensor made in inference mode has no version counter, so it always counts as written."""
    with torch.inference_mode():
        weight = torch.zeros(2)
    ledger = Ledger([weight], [weight])
    assert not ledger.unwritten()
    assert ledger.written()[0] is weight

"""Parts of one output: padded, moved, or refused."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.shards import joined, refusal

META = torch.device("meta")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_parts_are_refused():
    """torch.cat would take the scale of the first part."""
    parts = [
        torch.quantize_per_tensor(torch.ones(rows, 2), 0.5, 1, torch.quint8) for rows in (3, 1)
    ]
    assert "Return tensor.dequantize()" in refusal(*parts)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_layouts_that_torch_cannot_concatenate():
    parts = [torch.ones(rows, 2).to_sparse_csr() for rows in (3, 1)]
    message = refusal(*parts)
    assert "tensors of layout torch.sparse_csr, which torch cannot concatenate" in message
    assert "Return dense tensors" in message


def test_pad_fills_to_the_longest_lane():
    """Every dim except the dim of the rows is padded at its end, with gradients."""
    one, other = torch.ones(3, 5, 1, requires_grad=True), torch.ones(1, 4, 2, requires_grad=True)
    for value in (0, 7.5):
        found = joined(one, other, join="pad", pad_value=value)
        assert found.shape == (4, 5, 2)
        assert found[:3, :, :1].eq(1).all()
        assert found[3:, :4, :].eq(1).all()
        assert (found == value).sum() == 3 * 5 + 2
    found.sum().backward()
    assert (one.grad.sum(), other.grad.sum()) == (15, 8)
    for dim in (1, -1):
        found = joined(torch.ones(2, 3), torch.ones(4, 1), join="pad", dim=dim)
        assert (found.shape, found.sum()) == ((4, 4), 10)
        assert found[2:, :3].eq(0).all()
    assert "shapes (3, 1), (1,), which differ beyond dim 0" in refusal(
        torch.zeros(3, 1), torch.zeros(1), join="pad"
    )
    assert "without the rows" in refusal(
        torch.zeros(2, 1), torch.zeros(1, 3), join="pad", out_dims=0
    )
    assert joined(torch.zeros(3, 2), torch.zeros(4, 4), out_dims="ragged", join="pad").shape == (
        7,
        4,
    )


def test_every_value_is_moved():
    """Numbers, single outputs, lists, and shared tensors lie on the output device too."""
    outputs = [{"y": torch.ones(rows), "v": "x", "loss": torch.tensor(1.0)} for rows in (3, 1)]
    found = joined(*outputs, device=META, reduce="mean")
    assert (found["y"].device, found["loss"].device, found["v"]) == (META, META, "x")
    assert [one["y"].device for one in joined(*outputs, device=META, join="list")] == [META, META]
    assert joined(outputs[0], sizes=(3,), device=META)["y"].device == META
    assert joined([torch.zeros(2)] * 3, [torch.zeros(2)], device=META)[3].device == META
    shared = torch.zeros(3)
    assert joined(shared, shared, device=META).device == META
    assert joined(shared, shared.clone(), device=META, out_dims=None).device == META

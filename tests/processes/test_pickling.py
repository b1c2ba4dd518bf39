"""Values arrive unchanged: tensors and arrays with their memory, and modules."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from parawrap.processes.packing import Packer, restore
from tests.helpers.packing import sent

DTYPES = [
    torch.float64,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
]


@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    dtype=st.sampled_from(DTYPES),
    step=st.integers(1, 2),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_any_view_arrives(shape, dtype, step, data):
    tensor = torch.arange(int(np.prod(shape))).to(dtype).reshape(shape)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for dim in range(tensor.ndim):
        start = data.draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor.narrow(dim, start, tensor.shape[dim] - start)
    tensor = tensor[::step] if tensor.ndim else tensor.expand(3)
    got = sent(tensor)
    assert (got.dtype, got.shape, got.stride(), got.requires_grad) == (
        dtype,
        tensor.shape,
        tensor.stride(),
        False,
    )
    assert got.reshape(-1).tolist() == tensor.reshape(-1).tolist()


class Image(torch.Tensor):
    """A tensor subclass such as torchvision's."""


def with_attribute(tensor):
    tensor.origin = "weights"
    return tensor


def describe(tensor):
    """Return what must be equal in a copy of a tensor."""
    is_sparse = tensor.layout is not torch.strided
    return {
        "kind": (
            type(tensor),
            tensor.dtype,
            tensor.layout,
            tensor.device,
            tensor.requires_grad,
            tensor.is_leaf,
        ),
        "shape": tensor.shape,
        "origin": getattr(tensor, "origin", None),
        "persistent": getattr(tensor, "persistent", None),
        "values": None
        if tensor.is_meta
        else (tensor.to_dense() if is_sparse else tensor.detach()).tolist(),
    }


KINDS = {
    "parameter": lambda: nn.Parameter(torch.ones(2)),
    "buffer": lambda: nn.Buffer(torch.ones(2), persistent=False),
    "conj": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "meta": lambda: torch.empty(1 << 20, 1 << 20, device="meta", dtype=torch.bfloat16),
    "subclass": lambda: with_attribute(torch.arange(4.0).as_subclass(Image)),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_each_tensor_kind_arrives(kind):
    tensor = KINDS[kind]()
    assert describe(sent(tensor)) == describe(tensor)


def test_shared_memory_is_shared():
    """A write to one unpacked view is visible in the other, but not in the original."""
    whole, array = torch.zeros(1 << 21), np.zeros(3)  # one is large enough to be memory-mapped
    got = sent([whole, whole[2:4], torch.from_numpy(array), torch.from_numpy(array), whole])
    got[1].fill_(7)
    got[2].fill_(1)
    assert got[0][:5].tolist() == [0, 0, 7, 7, 0]
    assert got[3].tolist() == [1, 1, 1]
    assert got[4] is got[0]
    assert (whole.sum(), array.sum()) == (0, 0)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.empty((0, 3)),
        np.array(["a", None, 3], dtype=object),
        np.ma.masked_array([1, 2], [False, True]),
        np.frombuffer(b"read-only", np.int8),
    ],
    ids=["fortran", "empty", "objects", "masked", "read-only"],
)
def test_arrays_arrive_with_values(array):
    got = sent(array)
    assert (type(got), got.dtype, got.shape, got.tolist()) == (
        type(array),
        array.dtype,
        array.shape,
        array.tolist(),
    )
    assert got.flags.writeable == array.flags.writeable
    assert got.flags.f_contiguous == array.flags.f_contiguous or not array.flags.contiguous


def test_modules_are_sent_by_name():
    """Modules and operators are sent by name, also those of classes that cannot be pickled."""
    of_torch = [
        torch.backends.cudnn,
        torch.backends.mkldnn,
        torch.utils.deterministic,
        torch.classes,
    ]
    operators = [
        torch.ops,
        torch.ops.aten,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.ops.higher_order.cond,
    ]
    given = [torch.backends, *of_torch, *operators]
    assert all(got is each for got, each in zip(sent(given), given, strict=True))


def test_container_that_contains_itself():
    """It arrives in a message, whatever else it contains."""
    for part in (1, Path("folder")):
        node = {"part": part}
        node["itself"] = node
        packer = Packer()
        item = packer.add(node, "value")
        found = restore(item, memoryview(packer.to_bytes()))
        assert found["itself"] is found
        assert found["part"] == part

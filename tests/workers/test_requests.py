"""Values arrive in the lanes, and return, as they were.

`tests/processes/test_pickling.py` has other kinds.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import pytest
import torch
from torch import nn
from torch.testing import assert_close

MIB = 1 << 20
TENSORS = {
    "step": lambda: torch.arange(100.0).view(10, 10)[::2, 3:5],
    "expanded": lambda: torch.randn(1, 3).expand(5, 3),
    "channels last": lambda: torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "empty": lambda: torch.empty(5, 0),
    "inference": torch.inference_mode()(lambda: torch.ones(5, 3)),
    "large": lambda: torch.randn(5, 300_000),
    "large column": lambda: torch.randn(300, 400)[:, 3],
    "0-d": lambda: torch.tensor(3.5),
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(5).to_sparse(),
    "parameter": lambda: nn.Parameter(torch.randn(5, 3)),
    "float8": lambda: torch.randn(2, 3).to(torch.float8_e4m3fn),
}


@dataclass
class Holding:
    tensor: torch.Tensor


def facts(tensor):
    """Return all that describes a tensor except its values."""
    has_strides = tensor.layout is torch.strided and tensor.numel() > 0
    strides = tensor.stride() if has_strides else None
    return (
        tensor.dtype,
        tensor.layout,
        tuple(tensor.shape),
        strides,
        tensor.requires_grad,
        tensor.is_conj(),
    )


def look(x):
    return x, facts(x)


def test_tensors_arrive_and_return(block):
    """Tensors arrive and return with their values, dtype, layout, strides, and bits."""
    for name, make in TENSORS.items():
        tensor = make()
        output, seen = block.submit(look, tensor).result()
        assert (seen, facts(output)) == (facts(tensor), facts(tensor)), name
        assert_close(output, tensor, msg=lambda text, name=name: f"{name}: {text}")


def test_output_on_freed_memory(block):
    """An output that is not plain may be a view of a tensor that is freed with the call."""

    def rows(x):
        return Holding(torch.cat([x] * 50)[: len(x)])

    x = torch.ones(5000, 8)
    for output in (block.submit(rows, x).result(), *block.map([(rows, x)] * 4, chunksize=1)):
        assert_close(output.tensor, x)
    x = torch.rand(MIB)
    view, expected = (
        block.submit(lambda x: x[10:].view(2, -1), x).result(),
        x[10:].view(2, -1).clone(),
    )
    del x
    for _ in range(4):  # other messages do not use the memory of the view
        block.submit(torch.clone, torch.zeros(MIB)).result()
    assert_close(view, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("size", [3, 600])
def test_write_into_a_tensor(block, mode, size):
    """A write into a tensor comes back, also into one of 1 MiB and more, where the output lies in
    the memory of the argument.
    """

    def add(x):
        return x.add_(1)

    with mode():
        for _ in range(2):
            x = torch.zeros(size, 600)
            assert_close(block.submit(add, x).result(), torch.ones(size, 600))
            assert_close(x, torch.ones(size, 600))
            assert_close(list(block.map([(add, x)])), [torch.full((size, 600), 2.0)])
            assert_close(block(add, x), torch.full((size, 600), 3.0))
            assert_close(x, torch.full((size, 600), 3.0))


def test_identity_of_tensors_holds(block):
    """In a call and in its output, a tensor that occurs twice is one tensor, and two views of one
    memory share it.
    """

    def look(one, other, row):
        assert one is other
        assert row.data_ptr() == one[1].data_ptr()
        return one, other, row

    x = torch.randn(5, 3)
    look(*block.submit(look, x, x, x[1]).result())


@pytest.mark.parametrize("kind", ["process"], indirect=True, scope="module")
def test_shard_travels_without_batch(block):
    """The storage of a view has only the view's elements in the worker."""

    def measure(x):
        return x.stride(), x.untyped_storage().nbytes()

    assert block.submit(measure, torch.randn(300, 400)[5:7]).result() == ((400, 1), 2 * 400 * 4)


@pytest.mark.parametrize("kind", ["process"], indirect=True, scope="module")
def test_messages_that_grow(block):
    """Memory that tensors have outgrown is freed, and its descriptor closed.

    A large text never blocks.
    """
    held = []
    for size in range(16, 24):
        assert block.submit(torch.sum, torch.ones(1 << size)).result() == 1 << size
        held.append(psutil.Process().num_fds())
    assert max(held) - min(held) <= 2  # one per lane, with its first tensor
    assert block.submit(len, "x" * (4 * MIB)).result() == 4 * MIB

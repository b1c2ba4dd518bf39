"""Every kind of value arrives in a worker, and returns, as it was."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry

LARGE = torch.arange(120_000.0).reshape(300, 400)

VALUES = {
    "bfloat16": LARGE.bfloat16(),
    "complex": torch.complex(LARGE, LARGE),
    "conjugate": torch.complex(LARGE, LARGE).conj(),
    "bool": LARGE > 5,
    "0-d": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "transposed": LARGE.t(),
    "column": LARGE[:, 3],
    "rows of a larger tensor": LARGE[100:130],
    "one row": LARGE[5:6],
    "small": torch.arange(6, dtype=torch.int16),
    "small, of a dtype that few models have": torch.arange(6).to(torch.uint16),
    "expanded": LARGE[0].expand(50, -1),
    "channels_last": LARGE.reshape(1, 3, 100, 400).to(memory_format=torch.channels_last),
    "sparse": torch.eye(4).to_sparse(),
    "numpy": LARGE.numpy(),
    "text": ["a", {"b": None}],
}


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    name: str


class Doing(nn.Module):
    def forward(self, x):
        return x

    def aliases(self, a, b):
        a += 1
        return b

    def same(self, a, b):
        return a is b

    def stride(self, x):
        return x.stride(), x.untyped_storage().nbytes()

    def filled(self, a, b):
        torch.add(torch.zeros(1), 1, out=a)
        torch.add(torch.zeros(1), 2, out=b)
        return a.tolist(), b.tolist()


@pytest.mark.parametrize("name", VALUES)
def test_value_returns_as_it_was(opened, name):
    """A value that goes to a worker and back has its type, dtype, shape, strides, and elements."""
    session, value = opened(model := Doing(), 1), VALUES[name]
    output = session.submit(Entry(model), (value,), {}).result()
    assert type(output) is type(value)
    assert_close(output, value) if not isinstance(value, list) else None
    if isinstance(value, torch.Tensor):
        assert output.dtype == value.dtype
        if value.layout is torch.strided:
            assert output.stride() == value.stride()
    if isinstance(value, list):
        assert output == value


def test_dataclass_returns_as_it_was(opened):
    """A dataclass with a tensor arrives as the same class."""
    session = opened(model := Doing(), 1)
    output = session.submit(Entry(model), (Pair(LARGE, "x"),), {}).result()
    assert type(output) is Pair
    assert_close(output.first, LARGE)


def test_arguments_that_share_memory_share_it_in_the_worker(opened):
    """A write into one view is seen in the other, and in the caller's memory, as with the plain call."""
    session = opened(model := Doing(), 1, methods=(None, "aliases"))
    memory = torch.zeros(100)
    output = session.submit(Entry(model.aliases, "aliases"), (memory[10:60], memory[:20]), {}).result()
    assert output.tolist() == [0.0] * 10 + [1.0] * 10
    assert memory.sum() == memory[10:60].sum() == 50


def test_empty_arguments_stay_apart_in_the_worker(opened):
    """A model can write different numbers into two empty arguments."""
    session = opened(model := Doing(), 1, methods=(None, "filled"))
    output = session.submit(Entry(model.filled, "filled"), (torch.empty(0), torch.empty(0)), {}).result()
    assert output == ([1], [2])


def test_one_tensor_given_twice_is_one_tensor_in_the_worker(opened):
    """Two arguments that are the same object are so in the worker."""
    session = opened(model := Doing(), 1, methods=(None, "same"))
    x = torch.ones(3)
    assert session.submit(Entry(model.same, "same"), (x, x), {}).result()
    assert not session.submit(Entry(model.same, "same"), (x, x.clone()), {}).result()


def test_a_shard_is_sent_without_the_rest_of_its_batch(opened):
    """The storage of a view has only the view's elements in the worker."""
    session = opened(model := Doing(), 1, methods=(None, "stride"))
    assert session.submit(Entry(model.stride, "stride"), (LARGE[5:7],), {}).result() == ((400, 1), 2 * 400 * 4)

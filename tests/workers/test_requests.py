"""Values arrive in the lanes, and return, as they were."""

from __future__ import annotations

import datetime as dt
import enum
import os
from collections import deque, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

Point = namedtuple("Point", ["x", "y"])


class Color(enum.Enum):
    RED = 1


def inference():
    with torch.inference_mode():
        return torch.ones(5, 3)


def with_attribute():
    tensor = torch.randn(5, 3)
    tensor.note = "kept"
    return tensor


ROWS = {
    "plain": lambda: torch.randn(5, 3),
    "step": lambda: torch.arange(100.0).view(10, 10)[::2, 3:5],
    "transposed": lambda: torch.randn(3, 5).T,
    "expanded": lambda: torch.randn(1, 3).expand(5, 3),
    "channels last": lambda: torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "bool": lambda: torch.randn(5, 3) > 0,
    "empty": lambda: torch.empty(5, 0),
    "inference": inference,
}
TENSORS = ROWS | {
    "large": lambda: torch.randn(5, 300_000),
    "large rows": lambda: torch.randn(300, 400)[100:130],
    "large column": lambda: torch.randn(300, 400)[:, 3],
    "0-d": lambda: torch.tensor(3.5),
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
    "float8": lambda: torch.randn(5, 3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(5).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(5, 3), 0.1, 0, torch.quint8),
    "parameter": lambda: nn.Parameter(torch.randn(5, 3)),
    "attribute": with_attribute,
}
OTHERS = {
    "array": lambda: np.arange(6).reshape(2, 3),
    "large array": lambda: np.arange(120_000.0).reshape(300, 400),
    "array of strings": lambda: np.array(["a", "bc"]),
    "array scalar": lambda: np.float32(1.5),
    "containers": lambda: [(), {}, [], {"a": ({1: None},)}, {1, 2}, frozenset({3}), deque([1])],
    "numbers": lambda: (1, 2.5, True, 3 + 4j, 10**30, float("inf")),
    "bytes": lambda: (b"\\x00\\xff", bytearray(b"ab"), "text\\0é"),
    "enum": lambda: Color.RED,
    "time": lambda: dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    "torch": lambda: (torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.strided),
    "range": lambda: (range(3), slice(1, None, 2), ...),
    "path": lambda: Path("a") / "b",
    "function": lambda: (len, os.path.join, torch.relu),
    "class": lambda: (Point, Color, torch.nn.Linear),
}


def facts(tensor):
    """Return all that describes a tensor except its values."""
    strided = tensor.layout is torch.strided
    return (
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride() if strided and tensor.numel() > 0 else None,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        dict(tensor.__dict__),
    )


def look(x):
    return x, facts(x)


def echo(*args, **kwargs):
    return args, kwargs


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_tensors_arrive_and_return(block):
    """Values, dtype, layout, strides, and bits."""
    cases = {name: make() for name, make in TENSORS.items()}
    found = {}
    for name, tensor in cases.items():
        output, seen = block.submit(look, tensor).result()
        found[name] = seen, facts(output)
        assert_close(output, tensor, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    assert found == {name: (facts(tensor), facts(tensor)) for name, tensor in cases.items()}


def test_other_values_arrive_and_return(block):
    for name, make in OTHERS.items():
        ((value,), _) = block.submit(echo, make()).result()
        assert type(value) is type(make()), name
        assert np.array_equal(value, make()) if "array" in name else value == make(), name


def test_identity_holds(block):
    """In a call and in its output, a tensor that occurs twice is one tensor, and two views of one memory share it."""

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

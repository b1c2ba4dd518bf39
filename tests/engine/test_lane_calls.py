"""The arguments of a batch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap.engine import as_call

PACKED = pack_sequence([torch.zeros(1)])


@pytest.mark.parametrize(
    ("batch", "args", "kwargs"),
    [
        ((1, 2), (1, 2), {}),
        ((), (), {}),
        ({"x": 1}, (), {"x": 1}),
        ({1: 2}, ({1: 2},), {}),
        ([1, 2], ([1, 2],), {}),
        (3, (3,), {}),
        (PACKED, (PACKED,), {}),
    ],
    ids=["tuple", "empty", "dict", "keys", "list", "number", "packed"],
)
def test_a_batch_becomes_arguments(batch, args, kwargs):
    found_args, found_kwargs = as_call(batch)
    assert len(found_args) == len(args)
    assert all(type(one) is type(other) for one, other in zip(found_args, args, strict=True))
    assert isinstance(batch, PackedSequence) or (found_args, found_kwargs) == (args, kwargs)

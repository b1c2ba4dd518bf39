"""The work of lanes: the arguments of a batch, and the record of a call."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from parawrap.engine import Work, as_call, timed

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


def test_timed_calls_are_recorded():
    """With lane, start, end, and error. Without a record, the function is just called."""
    spans = []

    def record(*span):
        spans.append(span)

    assert timed(record, 3, divmod, 7, 2) == (3, 1)
    assert timed(None, 3, divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError) as caught:
        timed(record, None, divmod, 7, 0)
    (lane, start, end, error), (other, *_, failure) = spans
    assert (lane, error, other, failure) == (3, None, None, caught.value)
    assert start <= end


@pytest.mark.parametrize(
    ("work", "text"),
    [(Work("forward", None, None), "forward"), (Work("f", 0, 1), "f, batch 0, 1 row"), (Work("f", None, 2), "f, 2 rows")],
)
def test_work_is_described(work, text):
    assert str(work) == text

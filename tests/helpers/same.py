"""Compare outputs of any structure."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.testing import assert_close

from parawrap.api._containers import Parts


def assert_same(one, other):
    """Assert that two outputs have equal types, structure, and values, up to rounding."""
    one, other = (tuple(each) if isinstance(each, Parts) else each for each in (one, other))
    assert type(one) is type(other)
    if isinstance(one, Mapping):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, PackedSequence):
        assert_same(tuple(one), tuple(other))
    elif isinstance(one, (list, tuple, deque)):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    elif dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        assert_same(
            *(
                {name: getattr(each, name) for name in names if hasattr(each, name)}
                for each in (one, other)
            )
        )
    elif isinstance(one, torch.Tensor):
        assert_close(one, other, equal_nan=True)
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.kind in "fc":
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        else:
            assert one.tolist() == other.tolist()
    elif isinstance(one, (float, np.floating)):
        assert one == pytest.approx(other, rel=1e-5, nan_ok=True)
    else:
        assert one == other

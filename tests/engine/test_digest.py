"""Digests: equal for equal values in every process, and different for different values."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from parawrap.engine._digest import DIGEST_BYTES, digest_value
from tests.helpers.properties import given, st

tensors = st.builds(
    lambda rows, dtype: torch.arange(rows * 2).reshape(-1, 2).to(dtype),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]),
)
few = st.integers(0, 7)  # the repr of a set of larger numbers depends on its history
leaves = st.none() | st.booleans() | few | st.text("ab", max_size=2) | tensors | st.frozensets(few, max_size=3)
values = leaves | st.lists(leaves, max_size=3) | st.dictionaries(st.sampled_from("ab"), leaves, max_size=2)


@given(values, values)
def test_digests_depend_on_values_alone(one, other):
    assert digest_value(one) == digest_value(copy.deepcopy(one))
    assert len(digest_value(one)) == DIGEST_BYTES
    assert (digest_value(one) == digest_value(other)) == (repr(one) == repr(other) or one is other)


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda x: x.reshape(3, 2), lambda x: x + 1, lambda x: x.tolist()])
def test_other_tensors_have_other_digests(change):
    x = torch.arange(6.0).reshape(2, 3)
    assert digest_value(x) != digest_value(change(x))


def test_memory_and_identity_do_not_count():
    """Of views, of equal objects at several places, and of conjugates."""
    whole = torch.arange(12.0)
    text = "".join(["a", "b"])
    assert digest_value(whole[3:6]) == digest_value(whole[3:6].clone())
    assert digest_value(whole.view(3, 4).T) == digest_value(whole.view(3, 4).T.contiguous())
    assert digest_value([text, text]) == digest_value(["ab", "".join(["a", "b"])])
    z = torch.tensor([1 + 2j])
    assert digest_value(z.conj()) == digest_value(z.conj().resolve_conj())
    assert digest_value(torch.eye(2).to_sparse()) == digest_value(torch.eye(2).to_sparse())


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel")
@pytest.mark.parametrize(
    "make", [lambda: torch.quantize_per_tensor(torch.ones(1), 1, 0, torch.quint8), lambda: torch.ones(1).untyped_storage()]
)
def test_values_without_a_digest_are_refused(make):
    with pytest.raises(pickle.PicklingError):
        digest_value(make())

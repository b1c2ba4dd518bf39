"""`map(resume=folder)` recognizes equal batches in every process, and refuses other ones, whatever their kind."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
import subprocess
import sys
import threading
from array import array
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from parawrap import ResumeError, parallel
from parawrap.engine._digest import digest_value

TWO = ["cpu"] * 2


@dataclass(eq=False)
class Sample:
    """A dataclass of a user."""

    value: object = None


def marked(value, mark):
    value.mark = mark
    return value


EYE = torch.eye(2)
DIFFERENT = {
    "equal numbers": [1, True, 1.0],
    "texts": ["a", b"a", "b", None],
    "lists": [["a", "b"], ["ab"], ("a", "b"), [10**5000], [10**5000 + 1]],
    "sets": [{1, 2}, {1, 3}, frozenset({1, 2}), frozenset({(1, "a")}), frozenset({(1, "b")})],
    "functions": [len, sum, math.sqrt, int, re.compile("a"), re.compile("b")],
    "objects": [Sample({"x"}), Sample({"y"}), Sample(torch.zeros(1)), Sample(torch.ones(1))],
    "arrays": [array("f", [1.0]), array("d", [1.0]), np.arange(3), np.arange(3.0), np.arange(1, 4)],
    "dtypes": [np.array([1], "M8[s]"), np.array([1], "M8[ms]"), np.datetime64(5, "s"), np.datetime64(5, "ns")],
    "masks": [np.ma.array([1, 2], mask=[True, False]), np.ma.array([1, 2], mask=[False, True])],
    "objects in arrays": [np.array(["a"], object), np.array(["b"], object), np.empty((0, 3), object)],
    "tensors": [EYE, EYE * 2, EYE.double(), EYE[0], EYE * 1j, marked(EYE.clone(), "a"), marked(EYE.clone(), "b")],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_batches_differ(kind):
    assert len({digest_value(value) for value in DIFFERENT[kind]}) == len(DIFFERENT[kind])


def nested(dense):
    return torch.nested.nested_tensor([dense, dense[:1]])


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*nested tensors")
@pytest.mark.parametrize("form", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, nested])
def test_sparse_and_nested_batches(form):
    assert digest_value(form(EYE)) == digest_value(form(EYE.clone()))
    assert len({digest_value(form(each)) for each in (EYE, EYE * 2, EYE.flip(0))}) == 3


text = "one text"
EQUAL = {
    "texts": ([text, text], [text, "".join(["one ", "text"])]),
    "lists": ([[1], [1]], [[1]] * 2),
    "view": (torch.arange(9)[3:6], torch.arange(3, 6)),
    "column": (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
    "gradient": (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
    "conjugate": (torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1))),
    "nan": (torch.full((2,), math.nan), torch.full((2,), math.nan)),
    "sets": ({"b", "a"}, {"a", "b"}),
    "array": (np.arange(9)[3:6], np.arange(3, 6)),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_batches_are_recognized(kind):
    """A digest depends on values, not on the memory that they are in."""
    one, same = EQUAL[kind]
    assert digest_value(one) == digest_value(same)


SAMPLES = """
import torch
from pathlib import Path
from parawrap.engine._digest import digest_value

tensor = torch.arange(12.0).view(3, 4)
sets = {*"abcdefgh"}, {"k": frozenset("ijklmnop")}
samples = [*sets, Path("x"), tensor[1], tensor.t(), tensor.to_sparse(), tensor.numpy()[:, 1]]
print([digest_value(sample).hex() for sample in samples])
"""


def test_digests_in_another_process():
    """Sets and hashes of strings have another order in each process."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environ = {**os.environ, "PYTHONHASHSEED": seed}
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(SAMPLES, {"__name__": "__main__"})
    assert here.getvalue() == subprocess.check_output([sys.executable, "-c", SAMPLES], text=True, env=environ)


def cyclic(make):
    sample = Sample()
    sample.value = make(sample)
    return sample


UNSTABLE = {
    "lock": threading.Lock(),
    "generator": (i for i in range(2)),
    "meta": torch.ones(2, device="meta"),
    "storage": torch.ones(2).untyped_storage(),
    "deep": functools.reduce(lambda inner, _: [inner], range(100_000), []),
    "cycle": cyclic(lambda sample: sample),
    "set cycle": cyclic(lambda sample: {sample}),
}


@pytest.mark.parametrize("kind", UNSTABLE)
def test_other_batches_need_a_key(tmp_path, kind):
    """A later run could not detect a changed source, so nothing is computed. A key replaces the pickle."""
    batch, options = UNSTABLE[kind], {"prepare": lambda _: torch.ones(1)}
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p:
        with pytest.raises(ResumeError, match=r"(?s)^batch 0 cannot be pickled: .* Give map\(key=") as caught:
            list(p.map([(batch,)], resume=tmp_path, **options))
        assert caught.value.__notes__ == ["while batch 0 of the stream was read, counted from 0"]
        assert not list(tmp_path.glob("*.output"))
        assert list(p.map([(batch,)], resume=tmp_path, key=lambda _: "the batch", **options)) == [1]
        with pytest.raises(ResumeError, match=r"^the key of batch 0 cannot be pickled: .*lock.* a string or a number"):
            list(p.map([(batch,)], resume=tmp_path / "other", key=lambda _: threading.Lock(), **options))

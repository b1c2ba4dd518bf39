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
import warnings
from array import array
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial

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


class Slotted(torch.Tensor):
    """A tensor with a state that `vars` does not show."""

    __slots__ = ("mark",)


class Hidden(str):
    """A text that its repr does not show."""

    __slots__ = ()

    def __repr__(self):
        return "***"


class Built:
    """An object that pickle makes by a bound method."""

    def __init__(self, number):
        self.number = number

    def make(self):
        return Built(self.number)

    def __reduce__(self):
        return Factory(self.number).make, ()


class Factory(Built):
    __reduce__ = object.__reduce__


class Pair(torch.Tensor):
    """A tensor that consists of two others, without memory of its own."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


def marked(value, mark):
    value.mark = mark
    return value


EYE = torch.eye(2)
DIFFERENT = {
    "equal numbers": [1, True, 1.0],
    "texts": ["a", b"a", "b", Hidden("a"), Hidden("b"), None],
    "lists": [["a", "b"], ["ab"], ("a", "b"), [10**5000], [10**5000 + 1]],
    "sets": [{1, 2}, {1, 3}, frozenset({1, 2}), frozenset({(1, "a")}), frozenset({(1, "b")})],
    "containers": [defaultdict(int), defaultdict(float), deque([1], maxlen=1), deque([1], maxlen=2)],
    "functions": [len, sum, math.sqrt, int, re.compile("a"), re.compile("b")],
    "objects": [Sample({"x"}), Sample({"y"}), Sample(torch.zeros(1)), Sample(torch.ones(1)), Built(1), Built(2)],
    "arrays": [array("f", [1.0]), array("d", [1.0]), np.arange(3), np.arange(3.0), np.arange(1, 4)],
    "dtypes": [np.array([1], "M8[s]"), np.array([1], "M8[ms]"), np.datetime64(5, "s"), np.datetime64(5, "ns")],
    "masks": [np.ma.array([1, 2], mask=[True, False]), np.ma.array([1, 2], mask=[False, True])],
    "objects in arrays": [
        np.array(["a"], object),
        np.array(["b"], object),
        np.empty((0, 3), object),
        np.empty((0, 5), object),
    ],
    "records": [np.array([(1, text)], [(name, int), ("o", object)]) for text in "ab" for name in ("O1", "O2")],
    "tensors": [EYE, EYE * 2, EYE.double(), EYE[0], EYE * 1j, marked(EYE.clone(), "a"), marked(EYE.clone(), "b")],
    "subclasses": [
        marked(EYE.as_subclass(Slotted), 1),
        marked(EYE.as_subclass(Slotted), 5),
        Pair(EYE, EYE),
        Pair(EYE, EYE * 2),
    ],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_batches_differ(kind):
    assert len({digest_value(value) for value in DIFFERENT[kind]}) == len(DIFFERENT[kind])


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*nested tensors")
@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "nested"])
def test_sparse_and_nested_batches(layout):
    """Their digest covers the values, not only the shape."""
    forms = {
        "coo": torch.Tensor.to_sparse,
        "csr": torch.Tensor.to_sparse_csr,
        "csc": torch.Tensor.to_sparse_csc,
        "bsr": lambda dense: dense.to_sparse_bsr((1, 1)),
        "nested": lambda dense: torch.nested.nested_tensor([dense, dense[:1]]),
    }
    assert digest_value(forms[layout](EYE)) == digest_value(forms[layout](EYE.clone()))
    assert len({digest_value(forms[layout](each)) for each in (EYE, EYE * 2, EYE.flip(0))}) == 3


text = "one text"
EQUAL = {
    "texts": ([text, text], [text, "".join(["one ", "text"])]),
    "lists": ([[1], [1]], [[1]] * 2),
    "view": (torch.arange(9)[3:6], torch.arange(3, 6)),
    "column": (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
    "gradient": (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
    "conjugate": (torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1))),
    "twice": ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]),
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
from datetime import date
from pathlib import Path
from parawrap.engine._digest import digest_value

class Tags(set):
    pass

tensor = torch.arange(12.0).view(3, 4)
sets = {*"abcdefgh"}, {"k": frozenset("ijklmnop"), "tags": Tags("qrstuvwx")}
samples = [*sets, Path("x"), date(2026, 1, 1), tensor[1], tensor.t(), tensor.to_sparse(), tensor.numpy()[:, 1]]
print([digest_value(sample).hex() for sample in samples])
"""


def test_digests_in_another_process():
    """Sets and hashes of strings have another order in each process."""
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    here = io.StringIO()
    with contextlib.redirect_stdout(here):
        exec(SAMPLES, {"__name__": "__main__"})
    there = subprocess.run(
        [sys.executable, "-c", SAMPLES],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": seed},
    )
    assert here.getvalue() == there.stdout


def cyclic(make):
    sample = Sample()
    sample.value = make(sample)
    return sample


def quantized():
    with warnings.catch_warnings(action="ignore"):
        return torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)


UNSTABLE = {
    "lock": threading.Lock(),
    "generator": (i for i in range(2)),
    "meta": torch.ones(2, device="meta"),
    "storage": torch.ones(2).untyped_storage(),
    "mkldnn": torch.ones(2).to_mkldnn(),
    "quantized": quantized(),
    "partial": partial(lambda: 1),
    "deep": functools.reduce(lambda inner, _: [inner], range(100_000), []),
    "cycle": cyclic(lambda sample: sample),
    "list cycle": cyclic(lambda sample: [sample]),
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
        for _ in range(2):
            assert list(p.map([(batch,)], resume=tmp_path, key=lambda _: "the batch", **options)) == [1]
        assert p.stats().calls == 1
        with pytest.raises(ResumeError, match=r"^the key of batch 0 cannot be pickled: .*lock.* a string or a number"):
            list(p.map([(batch,)], resume=tmp_path / "other", key=lambda _: threading.Lock(), **options))

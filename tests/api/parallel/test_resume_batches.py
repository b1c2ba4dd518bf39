"""`map(resume=folder)` recognizes equal batches in every process, and refuses other ones, whatever their kind."""

from __future__ import annotations

import cmath
import functools
import math
import os
import re
import subprocess
import sys
import threading
from array import array
from collections import UserDict, defaultdict, deque
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from parawrap import ResumeError, parallel
from parawrap.engine._digest import digest_value

TWO = ["cpu"] * 2
pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:.*nested tensors", "ignore:.*quantize")


@dataclass(frozen=True)
class Sample:
    name: object
    tags: set[str]


class Marked(list):
    """A list with an attribute."""

    def __init__(self, items, mark=None):
        super().__init__(items)
        self.mark = mark


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


class Scaled(torch.Tensor):
    """A tensor with a scale in a slot."""

    __slots__ = ("scale",)


class Picture:
    """An object that keeps its values where `vars` does not show them."""

    __slots__ = ("pixels",)

    def __init__(self, pixels):
        self.pixels = pixels


def marked(tensor, name, mark):
    setattr(tensor, name, mark)
    return tensor


def pair_of(make, one, other):
    return make(one), make(other)


DIFFERENT = [
    ("a", "b"),
    (1, True),
    (1, 1.0),
    (b"a", "a"),
    (None, 0),
    (["a", "b"], ["ab"]),
    ({"x": 1}, {"x": 2}),
    ({1, 2}, {1, 3}),
    (frozenset({(1, "a")}), frozenset({(1, "b")})),
    ([10**5000], [10**5000 + 1]),
    (int, float),
    (len, sum),
    (math.sqrt, cmath.sqrt),
    pair_of(Path, "a.png", "b.png"),
    pair_of(re.compile, "a", "b"),
    pair_of(partial(date, 2026, 1), 1, 2),
    pair_of(Picture, b"white", b"black"),
    pair_of(Hidden, "a", "b"),
    pair_of(Built, 1, 2),
    pair_of(defaultdict, int, float),
    pair_of(lambda size: deque([1], maxlen=size), 1, 2),
    pair_of(lambda a: UserDict(a=a), 1, 2),
    pair_of(partial(Marked, [1]), "a", "b"),
    pair_of(lambda tag: Sample("a", {"x", tag}), "y", "z"),
    pair_of(lambda item: Sample(torch.full((1,), item), set()), 0.0, 1.0),
    pair_of(lambda code: array(code, [1.0, 2.0]), "f", "d"),
    pair_of(lambda item: array("d", [item]), 1.0, 2.0),
    pair_of(np.arange, 3, 3.0),
    pair_of(np.float32, 1, 2),
    pair_of(lambda item: np.array([item], dtype=object), "a", "b"),
    pair_of(lambda mask: np.ma.array([1, 2], mask=mask), [True, False], [False, True]),
    pair_of(lambda unit: np.array([1], unit), "M8[s]", "M8[ms]"),
    pair_of(lambda unit: np.datetime64(5, unit), "s", "ns"),
    pair_of(lambda item: np.array([(1, item)], [("n", int), ("o", object)]), "a", "b"),
    pair_of(lambda name: np.array([(1,)], [(name, "i4")]), "O1", "O2"),
    pair_of(lambda columns: np.empty((0, columns), object), 3, 5),
    pair_of(lambda factor: torch.ones(2, dtype=torch.complex64) * factor, 1, 1j),
    pair_of(lambda mark: marked(torch.ones(2), "mark", mark), "a", "b"),
    pair_of(lambda scale: marked(torch.ones(2).as_subclass(Scaled), "scale", scale), 1, 5),
    pair_of(lambda right: Pair(torch.ones(2), right), torch.ones(2), torch.zeros(2)),
]


@pytest.mark.parametrize(("first", "second"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_batches_of_any_kind_differ(tmp_path, first, second):
    with torch.no_grad(), parallel(lambda x: 1, TWO) as p:
        for _ in range(2):
            assert list(p.map([(first,)], resume=tmp_path)) == [1]
        assert p.stats().calls == 1
        with pytest.raises(ResumeError, match="batch 0 is not"):
            list(p.map([(second,)], resume=tmp_path))


@pytest.mark.parametrize(
    "form",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda dense: dense.to_sparse_bsr((1, 1)),
        lambda dense: torch.nested.nested_tensor([dense, dense[:1]]),
    ],
    ids=["coo", "csr", "csc", "bsr", "nested"],
)
def test_sparse_and_nested_batches_differ(form):
    """Their digest covers the values, not only the shape."""
    eye = torch.eye(2)
    assert digest_value(form(eye)) == digest_value(form(eye.clone()))
    assert len({digest_value(form(each)) for each in (eye, eye * 2, eye.flip(0))}) == 3


text = "one text"


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ([text, text], [text, "".join(["one ", "text"])]),
        ([[1], [1]], [[1]] * 2),
        (torch.arange(9)[3:6], torch.arange(3, 6)),
        (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
        (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
        (torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1))),
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]),
        (torch.full((2,), math.nan), torch.full((2,), math.nan)),
        ({"b", "a"}, {"a", "b"}),
        (np.arange(9)[3:6], np.arange(3, 6)),
    ],
    ids=["texts", "lists", "view", "column", "gradient", "conjugate", "twice", "nan", "sets", "array"],
)
def test_equal_batches_are_recognized(one, same):
    """A digest depends on values, not on the memory that they are in."""
    assert digest_value(one) == digest_value(same)


SAMPLES = """
import torch
from datetime import date
from pathlib import Path
from parawrap.engine._digest import digest_value

class Tags(set):
    pass

tensor = torch.arange(12.0).view(3, 4)
samples = [
    {*"abcdefgh"}, {"k": frozenset("ijklmnop"), "tags": Tags("qrstuvwx")}, Path("x"), date(2026, 1, 1), tensor[1], tensor.t(),
    tensor.to_sparse(), {"x": tensor, "nan": float("nan")}, tensor.numpy()[:, 1],
]
print([digest_value(sample).hex() for sample in samples])
"""


def test_digests_do_not_depend_on_the_process():
    """Sets and hashes of strings have another order in each process."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SAMPLES], stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in "12"
    ]
    (one, _), (other, _) = (process.communicate() for process in processes)
    assert one
    assert one == other


# -- batches without a stable pickle


@dataclass(eq=False)
class Node:
    """An object that refers to others, and maybe to itself."""

    others: object = None


def cyclic(make):
    node = Node()
    node.others = make(node)
    return node


@pytest.mark.parametrize(
    "batch",
    [
        threading.Lock(),
        (i for i in range(2)),
        torch.ones(2, device="meta"),
        torch.ones(2).untyped_storage(),
        torch.ones(2).to_mkldnn(),
        lambda: 1,
        partial(lambda: 1),
        functools.reduce(lambda inner, _: [inner], range(100_000), []),
        cyclic(lambda node: node),
        cyclic(lambda node: [node]),
        cyclic(lambda node: {node}),
    ],
    ids=["lock", "generator", "meta", "storage", "mkldnn", "lambda", "partial", "deep", "cycle", "list", "set"],
)
def test_other_batches_need_a_key(tmp_path, batch):
    """A later run could not detect a changed source, so nothing is computed. A key replaces the pickle."""
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p:
        with pytest.raises(ResumeError, match=r"(?s)^batch 0 cannot be pickled: .* Give map\(key=") as caught:
            list(p.map([(batch,)], resume=tmp_path))
        assert caught.value.__notes__ == ["while batch 0 of the stream was read, counted from 0"]
        assert not list(tmp_path.glob("*.output"))
        for _ in range(2):
            options = {"key": lambda _: "the batch", "prepare": lambda _: torch.ones(1)}
            assert list(p.map([(batch,)], resume=tmp_path, **options)) == [1]
        assert p.stats().calls == 1


def test_quantized_batches_need_a_key(tmp_path):
    """Their pickle has an address in memory."""
    batch = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p, pytest.raises(ResumeError, match="of a quantized one"):
        list(p.map([(batch,)], resume=tmp_path))

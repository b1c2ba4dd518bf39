"""Cut calls, plain calls, and whole calls. Each is decided from the call alone, and frees its tensors."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import weakref

import psutil
import pytest
import torch
from torch import nn

from parawrap import parallel
from parawrap.errors import GatherError, ShardError
from tests.helpers.waiting import PATIENCE_S

TWO, THREE = ["cpu"] * 2, ["cpu"] * 3


def outcome(p, args, kwargs):
    before = p.stats().plain
    try:
        output = p(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None if p.stats().plain > before else p.stats().shards, output


CALLS = {
    "twice": lambda x, n=None, flag=False, items=None: torch.cat([x, x]),
    "fixed": lambda x, n=None, flag=False, items=None: torch.ones(5),
    "number": lambda x, n=None, flag=False, items=None: x.mean() if flag else x,
    "list": lambda x, n=None, flag=False, items=None: list(map(str, x.tolist())) if flag else ["a"] * 5,
    "fails": lambda x, n=None, flag=False, items=None: 1 / 0 if flag else x,
}


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_decided_alone(name):
    """A call after many others of every size and kind does what it does in a block of its own."""
    calls = [
        ((torch.arange(float(rows)),), options)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9, 16)
        for options in ({}, {"n": 3}, {"n": 4}, {"flag": True}, {"items": ["a"] * 5}, {"items": iter("abc")})
    ]
    alone = []
    for each in calls:
        with parallel(CALLS[name], THREE) as p:
            alone.append(outcome(p, *each))
    order = list(range(len(calls))) * 2
    random.Random(0).shuffle(order)
    with parallel(CALLS[name], THREE) as p:
        for index in order:
            assert repr(outcome(p, *calls[index])) == repr(alone[index])


def test_writes_into_whole_tensors():
    """Each lane would have written once."""

    def run(x, total, *, writes=True):
        total.add_(1) if writes else total.add(1)
        return x

    with parallel(run, TWO, in_dims={"total": None}) as p:
        with pytest.raises(ShardError, match="into a tensor that every lane gets whole"):
            p(torch.ones(9), torch.zeros(3))
        p(torch.ones(9), torch.zeros(3), writes=False)
        with torch.inference_mode():
            p(torch.ones(9), torch.zeros(3))  # tensors without versions


def test_unused_names_of_in_dims_warn():
    p = parallel(lambda x, **options: x, TWO, in_dims={"maks": None})
    p(torch.ones(9))
    with pytest.warns(UserWarning, match="in_dims names 'maks', and no call passed a keyword argument of that name"):
        p.close()


WAYS = {
    "call": lambda p, x: p(x),
    "submit": lambda p, x: p.submit(x).result(PATIENCE_S),
    "map": lambda p, x: list(p.map([x, x.clone()])),
}


@pytest.mark.parametrize("grad", [False, True], ids=["in-lanes", "in-turns"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("fails", [ValueError, GatherError, None], ids=["fails", "refused", "returns"])
def test_calls_free_their_tensors(way, grad, fails):
    """Without a garbage collection, whether they return, fail, or are refused, in whichever threads the lanes ran."""

    def run(x):
        if fails is ValueError:
            raise ValueError(len(x))
        y = torch.cat([x, x]) if fails else x * 2
        held.append(weakref.ref(y))
        return y

    held = []
    gc.collect()
    gc.disable()
    try:
        with parallel(run, TWO) as p:
            for _ in range(50):
                x = torch.randn(9, 4, requires_grad=grad)
                held.append(weakref.ref(x))
                with contextlib.suppress(ValueError, GatherError):
                    way(p, x)
                del x
        assert [index for index, each in enumerate(held) if each() is not None] == []
    finally:
        gc.enable()


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.long
@pytest.mark.stress
def test_memory_and_threads_stay_flat():
    """Over 30,000 calls and submits with changing rows, and over 100 blocks."""
    model, norm = nn.Linear(4, 2), nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    with torch.no_grad(), parallel(model, TWO, out_dims=0) as p:
        for index in range(30_000):
            if index == 2_000:
                before = rss()
            p(torch.randn(2 + index % 4, 4))
            if index % 100 == 0:
                p.submit(torch.randn(2, 4)).result(PATIENCE_S)
        assert rss() - before < 8 * 2**20
    for index in range(140):
        if index == 40:
            threads, before = threading.active_count(), rss()
        with parallel(norm, THREE) as p:
            p(torch.randn(8, 64)).sum().backward()
            p.submit(torch.randn(8, 64)).result(PATIENCE_S)
    assert threading.active_count() == threads
    assert rss() - before < 12 * 2**20

"""Many calls and many blocks leave memory and threads as they were."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import psutil
import pytest
import torch
from torch import nn

from parawrap import GatherError, parallel

MIB = 2**20


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.long
@pytest.mark.stress
def test_many_calls_in_one_block_keep_memory_flat():
    """Memory does not grow over 100,000 calls and submits with changing rows."""
    model = nn.Linear(4, 2)
    xs = [torch.randn(rows, 4) for rows in (2, 3, 5, 8)]
    with torch.no_grad(), parallel(model, ["cpu"] * 2, out_dims=0) as p:

        def calls(count):
            for index in range(count):
                model(xs[index % 4])
                if index % 100 == 0:
                    p.submit(xs[0]).result(20)

        calls(2_000)
        before = rss()
        calls(98_000)
        assert rss() - before < 8 * MIB
        assert p.stats().calls == 101_000


@pytest.mark.long
@pytest.mark.stress
def test_many_blocks_keep_threads_and_memory_flat():
    """Neither threads nor memory grow over 200 blocks."""
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    x = torch.randn(8, 64)

    def blocks(count):
        for _ in range(count):
            with parallel(model, ["cpu"] * 3) as p:
                model(x).sum().backward()
                p.submit(x).result(20)

    blocks(40)
    threads, before = threading.active_count(), rss()
    blocks(200)
    assert threading.active_count() == threads
    assert rss() - before < 12 * MIB


def called(p, x):
    p(x)


def submitted(p, x):
    p.submit(x).result(20)


def mapped(p, x):
    for _ in p.map([x, x.clone(), x.clone()]):
        pass


@pytest.mark.stress
@pytest.mark.parametrize("grad", [False, True], ids=["in-lanes", "in-turns"])
@pytest.mark.parametrize("way", [called, submitted, mapped])
def test_calls_that_fail_free_their_tensors(way, grad):
    """None of the tensors of 200 failed calls waits for the garbage collector, in whichever threads the lanes ran."""

    def fail(x):
        raise ValueError(len(x))

    given = []
    with no_garbage_collection():
        with parallel(fail, ["cpu"] * 2) as p:
            for _ in range(200):
                x = torch.randn(9, 4, requires_grad=grad)
                given.append(weakref.ref(x))
                with contextlib.suppress(ValueError):
                    way(p, x)
                del x
        assert [index for index, held in enumerate(given) if held() is not None] == []


@pytest.mark.stress
def test_refused_outputs_are_freed():
    """None of the outputs of 100 calls that cannot be joined waits for the garbage collector."""

    def double(x):
        y = torch.cat([x, x])
        given.append(weakref.ref(y))
        return y

    given = []
    with no_garbage_collection():
        with parallel(double, ["cpu"] * 2) as p:
            for rows in (5, 9, 16) * 33:
                with pytest.raises(GatherError):
                    p(torch.randn(rows, 4))
        assert [index for index, held in enumerate(given) if held() is not None] == []


@contextlib.contextmanager
def no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

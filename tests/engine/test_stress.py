"""Many calls and many blocks leave memory and threads where they were."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import psutil
import pytest
import torch
from torch import nn

from parawrap import parallel

MIB = 2**20


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.stress
def test_many_calls_in_one_block_keep_memory_flat():
    """100,000 calls, submits among them, with changing rows, under no_grad: memory does not grow."""
    model = nn.Linear(4, 2)
    xs = [torch.randn(rows, 4) for rows in (2, 3, 5, 8)]
    with torch.no_grad(), parallel(model, ["cpu"] * 2, plan="lanes") as p:

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


@pytest.mark.stress
def test_many_blocks_keep_threads_and_memory_flat():
    """200 blocks opened and closed: as many threads as before, and memory does not grow."""
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
@pytest.mark.parametrize("plan", [None, "auto", "lanes"])
@pytest.mark.parametrize("way", [called, submitted, mapped])
@pytest.mark.usefixtures("helps_at_once")
def test_calls_that_fail_let_go_of_what_they_held(way, plan):
    """Not one tensor of 200 calls that failed is left to the garbage collector, whoever ran the lanes."""

    def fail(x):
        if len(given) % 3 == 0:
            time.sleep(0.001)  # long enough for the lanes to be worth waking
        raise ValueError(len(x))

    given = []
    with no_garbage_collection():
        with parallel(fail, ["cpu"] * 2, plan=plan) as p:
            for _ in range(200):
                x = torch.randn(8, 4)
                given.append(weakref.ref(x))
                with contextlib.suppress(ValueError):
                    way(p, x)
                del x
        assert [index for index, held in enumerate(given) if held() is not None] == []


@contextlib.contextmanager
def no_garbage_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

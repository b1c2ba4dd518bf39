"""`parallel(..., workers="process")`: the block, its streams, and the options that it refuses."""

from __future__ import annotations

import os
import threading
from concurrent.futures import CancelledError

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import build, parallel
from parawrap.errors import SessionError, ShardError

CPUS = ["cpu", "cpu"]


class Endless(nn.Module):
    def forward(self, x):
        threading.Event().wait()
        return x


class Where(nn.Module):
    def forward(self, x):
        return x + 1, os.getpid()


@torch.no_grad()
def test_block_is_the_same_object():
    """Inside the block the model's own calls run in the workers; afterwards the model is what it was."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x, before = torch.randn(9, 4), dict(vars(model))
    expected = model(x)
    with parallel(model, CPUS, workers="process") as p:
        assert_close(model(x), expected)
        assert_close(model(x), expected)
        assert p.stats().shards == (5, 4)
    assert vars(model) == before
    assert_close(model(x), expected)


@torch.no_grad()
def test_map_runs_in_workers_and_keeps_order():
    """`map` yields in order, from processes other than this one."""
    with parallel(Where(), CPUS, workers="process") as p:
        outputs = list(p.map(torch.arange(20.0).split(1)))
    assert [int(x) for x, _ in outputs] == list(range(1, 21))
    assert os.getpid() not in {pid for _, pid in outputs}


@torch.no_grad()
def test_two_blocks_at_once_are_apart():
    """Two blocks on two models give each model's own output."""
    first, second, x = nn.Linear(3, 3), nn.Linear(3, 3), torch.randn(8, 3)
    expected = first(x), second(x)
    with parallel(first, CPUS, workers="process"), parallel(second, CPUS, workers="process"):
        assert_close((first(x), second(x)), expected)


@torch.no_grad()
def test_exception_in_the_block_ends_running_calls():
    """A block that ends with an exception does not wait for the calls that its workers run."""
    with pytest.raises(KeyError), parallel(Endless(), CPUS, workers="process") as p:  # noqa: PT012
        future = p.submit(torch.ones(2))
        raise KeyError
    with pytest.raises((SessionError, CancelledError)):
        future.result()


def test_unknown_kind_of_worker_is_refused():
    """`workers` and `retries` are checked before anything starts."""
    with pytest.raises(ShardError, match="workers='fiber'"):
        parallel(nn.Identity(), CPUS, workers="fiber")
    with pytest.raises(ShardError, match="retries=-1"):
        parallel(nn.Identity(), CPUS, workers="process", retries=-1)


@torch.no_grad()
def test_build_needs_processes():
    """A target that workers build is refused with lanes in threads."""
    with parallel(build(nn.Linear, 2, 2), CPUS) as p, pytest.raises(SessionError, match='workers="process"'):
        p(torch.ones(8, 2))

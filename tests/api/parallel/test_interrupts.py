"""Ctrl-C at any moment leaves locks free, the block usable or closed, and the model as it was."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import DataParallel, parallel
from parawrap.engine.lanes import CallParts, Lanes, here
from parawrap.engine.model_state import Snapshot
from tests.helpers import interrupts
from tests.helpers.interrupts import moments_of
from tests.helpers.waiting import PATIENCE_S, eventually

X = torch.randn(9, 4)
THREE = ["cpu"] * 3
# Every so many moments are tried, so that a test takes a second or two; and by `make test-long`.
# Primes, so that no loop hides a moment
STEP, STEP_OF_BLOCKS, STEP_LONG = 47, 97, 7


class Writes(nn.Linear):
    """A class of one's own, whose calls write an attribute."""

    def __init__(self):
        super().__init__(4, 2)
        self.step, self.options = 0, {"a": 1}

    def forward(self, x, found=None):
        self.seen = len(x)
        if found is not None:
            found["x"] = x
        return super().forward(x)


def change(model):
    model.step += 1
    model.options = dict(model.options)
    model(X)


WORK = {
    "call": lambda model, p: model(X),
    "call with a dict": lambda model, p: model(X, {}),
    "call after a change": lambda model, p: change(model),
    "plain call": lambda model, p: model(X[:1]),
    "map": lambda model, p: list(p.map([X, X, X])),
    "submit": lambda model, p: p.submit(X).result(PATIENCE_S),
}


def check_calls(kind, step):
    model = Writes().eval()
    expected = model(X)
    with ThreadPoolExecutor(1) as another, parallel(model, THREE, out_dims=0) as p:
        model(X)
        for moment in moments_of(lambda: WORK[kind](model, p), step):
            assert here.lane is None, moment
            assert not torch.is_grad_enabled(), moment
            found = another.submit(torch.no_grad()(model), X).result(PATIENCE_S)
            assert_close(
                [found, model(X), p.submit(X).result(PATIENCE_S)], [expected] * 3, msg=moment
            )
    assert "forward" not in vars(model)


def check_blocks(step):
    model = Writes().eval()
    before, expected, blocks = vars(model), model(X), []
    other = nn.Linear(4, 2)

    def use_another():
        with parallel(other, THREE, out_dims=0):
            return torch.no_grad()(other)(X)

    def use():
        blocks.append(parallel(model, THREE, out_dims=0))
        with blocks[-1]:
            model(X)

    with ThreadPoolExecutor(1) as another:
        for moment in moments_of(use, step):
            assert vars(model) is before, moment
            assert not torch.is_grad_enabled(), moment
            assert "forward" not in vars(model), moment
            assert_close(model(X), expected, msg=moment)
            # All blocks open and close under one lock
            another.submit(use_another).result(PATIENCE_S)
            blocks.clear()


put_back = pytest.mark.filterwarnings("ignore:the model wrote", "ignore:parallel.*had no effect")


@put_back
@torch.no_grad()
@pytest.mark.parametrize("kind", WORK)
def test_interrupted_calls(kind):
    """The next calls of this thread and of another one are right."""
    check_calls(kind, STEP)


@put_back
@torch.no_grad()
@pytest.mark.parametrize("kind", ["block", "DataParallel"])
def test_an_interrupt_after_forward(kind, monkeypatch):
    """What forward left in the lanes is put back, also if Ctrl-C comes before the look at it."""

    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            at_end()
            return x * self.count

    def interrupt(_):
        raise KeyboardInterrupt

    def interrupt_next_look():
        monkeypatch.setattr(Snapshot, "is_same", interrupt)

    at_end = interrupt_next_look
    model = Counts().eval()
    is_block = kind == "block"
    owner = parallel(model, THREE, out_dims=0) if is_block else DataParallel(model, THREE)
    net = model if is_block else owner
    with owner if is_block else closing(owner):
        with pytest.raises(KeyboardInterrupt):
            net(X)
        monkeypatch.undo()
        at_end = lambda: None  # noqa: E731  # the name that forward calls
        assert_close(net(X), X)


def test_an_interrupt_after_an_error():
    """An interrupted caller begins no other part, also if another lane has failed before."""
    begun, held = [], threading.Event()

    def run(x):
        begun.append(here.lane.index)
        if here.lane.index == 1:
            raise ValueError
        eventually(lambda: lanes[1].tasks == 1, "lane 1 has failed")
        raise KeyboardInterrupt

    with parallel(run, THREE, out_dims=0) as p:
        lanes = p._session.lanes.all
        lanes[2].inbox.put(lambda _: held.wait(PATIENCE_S))
        with pytest.raises(KeyboardInterrupt):
            p(X)
        held.set()
    assert sorted(begun) == [0, 1]


@put_back
@torch.no_grad()
def test_interrupted_blocks():
    """Ctrl-C may come while a block opens, runs its first call, and closes."""
    check_blocks(STEP_OF_BLOCKS)


@torch.no_grad()
def test_interrupted_calls_of_a_block(monkeypatch):
    """Ctrl-C in a call of the block itself leaves the model plain after the block."""
    # The other files have a thousand moments, at which the block does not change the model
    monkeypatch.setattr(interrupts, "PACKAGE", f"{interrupts.PACKAGE}api/parallel.py")
    model = nn.Linear(4, 2).eval()

    def use():
        with parallel(model, THREE, out_dims=0) as block:
            block(X[:1])

    for moment in moments_of(use):
        assert "forward" not in vars(model), moment


@put_back
@torch.no_grad()
@pytest.mark.long
def test_interrupts_at_all_moments():
    for kind in WORK:
        check_calls(kind, STEP_LONG)
    check_blocks(STEP_LONG)


def test_an_interrupt_in_a_later_part(monkeypatch):
    """Ctrl-C in another lane's part that the caller runs drops the parts that have not begun."""
    monkeypatch.setattr(CallParts, "wake_next", lambda _: None)  # the caller runs all parts
    lanes, done = Lanes([torch.device("cpu")] * 3), []

    def fail(error):
        raise error

    tasks = [lambda: fail(ValueError()), lambda: done.append(1), lambda: fail(KeyboardInterrupt())]
    _, errors = lanes.run(tasks)
    lanes.close()
    assert [type(error) for _, error in errors] == [ValueError, KeyboardInterrupt]
    assert done == []

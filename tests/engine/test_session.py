"""A session: cut calls, plain calls, and whole calls. Each is decided from the call alone."""

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
from torch.testing import assert_close

from parawrap import parallel
from parawrap.engine import Entry, Session
from parawrap.errors import GatherError, ShardError
from parawrap.shards import Cutter, JoinRules, Parameters, balanced_sizes, uneven_sizes
from tests.helpers.waiting import PATIENCE_S

CPU = torch.device("cpu")


@pytest.fixture
def opened():
    def open_session(target, lanes=2, *, cutter=None, **options):
        rules = JoinRules(**options)
        cutter = cutter or Cutter(sizes=uneven_sizes if rules.needs_proof else balanced_sizes)
        sessions.append(Session(target, [CPU] * lanes, cutters={None: cutter}, rules=rules))
        return sessions[-1]

    sessions = []
    yield open_session
    for session in sessions:
        session.close()


def call(session, *args, **kwargs):
    return session.call(Entry(session.target), args, kwargs)


def test_a_call_uses_every_lane(opened):
    """At the same time. With `out_dims` the shards are balanced, and else they have sizes of their own."""
    gate, x = threading.Barrier(2), torch.arange(16.0)
    for options, sizes in (({}, (9, 7)), ({"out_dims": 0}, (8, 8)), ({"join": "list"}, (8, 8))):
        session = opened(lambda x: (gate.wait(PATIENCE_S), x * 2)[1], **options)
        found = call(session, x)
        assert_close(torch.cat(found) if type(found) is list else found, x * 2)
        stats = session.stats()
        assert (stats.shards, [lane.rows for lane in stats.lanes]) == (sizes, list(sizes))
        assert (stats.calls, stats.plain, [lane.tasks for lane in stats.lanes]) == (1, 0, [1, 1])


def outcome(session, args, kwargs):
    before = session.stats().plain
    try:
        output = call(session, *args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None if session.stats().plain > before else session.stats().shards, output


CALLS = {
    "twice": lambda x, n=None, flag=False, items=None: torch.cat([x, x]),
    "fixed": lambda x, n=None, flag=False, items=None: torch.ones(5),
    "number": lambda x, n=None, flag=False, items=None: x.mean() if flag else x,
    "list": lambda x, n=None, flag=False, items=None: list(map(str, x.tolist())) if flag else ["a"] * 5,
    "fails": lambda x, n=None, flag=False, items=None: 1 / 0 if flag else x,
}


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_decided_alone(opened, name):
    """A call after many others of every size and kind does what it does in a session of its own."""
    calls = [
        ((torch.arange(float(rows)),), options)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9, 16)
        for options in ({}, {"n": 3}, {"n": 4}, {"flag": True}, {"items": ["a"] * 5}, {"items": iter("abc")})
    ]
    session = opened(CALLS[name], 3)
    alone = [outcome(opened(CALLS[name], 3), *each) for each in calls]
    order = list(range(len(calls))) * 2
    random.Random(0).shuffle(order)
    for index in order:
        assert repr(outcome(session, *calls[index])) == repr(alone[index])


def test_writes_into_whole_tensors(opened):
    """Each lane would have written once."""

    def run(x, total, *, writes=True):
        total.add_(1) if writes else total.add(1)
        return x

    cutter = Cutter(in_dims={"total": None}, parameters=Parameters(run), sizes=uneven_sizes)
    session = opened(run, cutter=cutter)
    with pytest.raises(ShardError, match="into a tensor that every lane gets whole"):
        call(session, torch.ones(9), torch.zeros(3))
    call(session, torch.ones(9), torch.zeros(3), writes=False)
    with torch.inference_mode():
        call(session, torch.ones(9), torch.zeros(3))  # tensors without versions


def test_unused_names_of_in_dims_warn():
    def run(x, **options):
        return x

    cutter = Cutter(in_dims={"maks": None}, parameters=Parameters(run), sizes=uneven_sizes)
    session = Session(run, [CPU] * 2, cutters={None: cutter}, rules=JoinRules())
    call(session, torch.ones(9))
    with pytest.warns(UserWarning, match="in_dims names 'maks', and no call passed a keyword argument of that name"):
        session.close()


def test_submitted_calls_run_whole(opened):
    """Keywords and containers are passed on; rows are counted before the call, which may empty its batch."""
    session = opened(lambda batch, scale: batch.pop("x") * scale)
    entry = Entry(session.target)
    assert session.submit(entry, ({"x": torch.ones(3)},), {"scale": 2}).result(PATIENCE_S).tolist() == [2, 2, 2]
    prepared = session.submit(entry, ({"x": torch.ones(4)},), {}, lambda batch: (batch, 3))
    assert prepared.result(PATIENCE_S).tolist() == [3] * 4
    assert (session.stats().calls, sum(lane.rows for lane in session.stats().lanes)) == (2, 7)


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
        with parallel(run, ["cpu"] * 2) as p:
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
    with torch.no_grad(), parallel(model, ["cpu"] * 2, out_dims=0) as p:
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
        with parallel(norm, ["cpu"] * 3) as p:
            p(torch.randn(8, 64)).sum().backward()
            p.submit(torch.randn(8, 64)).result(PATIENCE_S)
    assert threading.active_count() == threads
    assert rss() - before < 12 * 2**20

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
from parawrap.errors import GatherError, SessionError, ShardError
from parawrap.lanes import here
from parawrap.shards import Cutter, JoinRules, Parameters, balanced, uneven
from tests.helpers.waiting import PATIENCE_S

CPU = torch.device("cpu")
uneven_sizes = pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")


@pytest.fixture
def opened():
    """Open sessions that are closed at the end of the test."""

    def open_session(target, lanes=2, *, cutter=None, **options):
        rules = JoinRules(**options)
        cutter = cutter or Cutter(sizes=uneven if rules.needs_proof else balanced)
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
    """Return what a call gives: the sizes of its shards and its output, or its error."""
    before = session.stats().plain
    try:
        output = call(session, *args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None if session.stats().plain > before else session.stats().shards, output


CALLS = {
    "rows": lambda x, n=None, flag=False, items=None: x * 2,
    "twice": lambda x, n=None, flag=False, items=None: torch.cat([x, x]),
    "total": lambda x, n=None, flag=False, items=None: x.sum(0),
    "fixed": lambda x, n=None, flag=False, items=None: torch.ones(5),
    "number": lambda x, n=None, flag=False, items=None: x.mean() if flag else x,
    "list": lambda x, n=None, flag=False, items=None: list(map(str, x.tolist())) if flag else ["a"] * 5,
    "fails": lambda x, n=None, flag=False, items=None: 1 / 0 if flag else x,
    "other": lambda x, n=None, flag=False, items=None: (x, "a") if flag else x[0],
}


@uneven_sizes
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_decided_from_the_call_alone(opened, name, lanes):
    """A call after many others of every size and kind does what it does in a session of its own."""
    calls = [
        ((torch.arange(float(rows)),), options)
        for rows in (0, 1, 2, 3, 4, 5, 8, 9, 16)
        for options in ({}, {"n": 3}, {"n": 4}, {"flag": True}, {"items": ["a"] * 5}, {"items": iter("abc")})
    ]
    session = opened(CALLS[name], lanes)
    alone = [outcome(opened(CALLS[name], lanes), *each) for each in calls]
    order = list(range(len(calls))) * 2
    random.Random(0).shuffle(order)
    for index in order:
        assert repr(outcome(session, *calls[index])) == repr(alone[index])


@uneven_sizes
def test_calls_that_cannot_be_cut_run_plainly(opened):
    """Once, in the caller, outside any lane, and unchecked: with at most one row, without tensors, and after `close`."""
    seen = []
    session = opened(lambda x: (seen.append(here.lane), x if isinstance(x, int) else torch.cat([x, x]))[1])
    for rows in (0, 1, 2, 4):
        assert call(session, torch.zeros(rows)).shape == (2 * rows,)
    assert call(session, 2) == 2
    assert (seen, session.stats().plain) == ([None] * 5, 5)
    session.close()
    session.close()
    assert call(session, torch.zeros(9)).shape == (18,)
    with pytest.raises(SessionError, match="the lanes are closed"):
        session.submit(Entry(session.target), (torch.zeros(9),), {})


def test_a_call_inside_a_lane_runs_plainly(opened):
    def run(x):
        assert here.lane is not None
        return call(session, x[:, 0]) if x.ndim > 1 else x * 2

    session, x = opened(run), torch.randn(16, 3)
    assert_close(call(session, x), x[:, 0] * 2)


TABLE = torch.zeros(3)


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: torch.cat([x, x]), "out_dims"),
        (lambda x: x.sum(), "reduce"),
        (lambda x: (x * 2, TABLE), r"output\[1\] cannot be joined.*None for one value"),
        (lambda x: (x, (x >= 0)[:1].sum(0, keepdim=True)), r"output\[1\] cannot be joined.*None for one value"),
    ],
    ids=["twice", "number", "filled", "counts"],
)
def test_outputs_are_refused_in_every_call(opened, function, says):
    """No call returns an output that sizes show to be wrong, also if a tensor or a count is equal by luck."""
    session = opened(function)
    for rows in (5, 9, 16) * 2:
        with pytest.raises(GatherError, match=says):
            call(session, torch.arange(float(rows)))
    assert session.stats().calls == 0


@uneven_sizes
def test_reductions_are_the_same_in_every_call(opened):
    """A stack has one value per shard, also of a plain call; means and sums are the plain ones."""
    for reduce in ("stack", lambda vector: vector):
        session = opened(lambda x: x.sum(), reduce=reduce)
        assert [call(session, torch.ones(rows)).shape for rows in (1, 4, 5, 16)] == [(1,), (1,), (2,), (2,)]
    for reduce in ("mean", "sum"):
        session = opened(lambda x, reduce=reduce: getattr(x, reduce)(), reduce=reduce)
        for rows in (1, 4, 5, 16):
            assert_close(call(session, torch.arange(float(rows))), getattr(torch.arange(float(rows)), reduce)())


@pytest.mark.parametrize("wrote", [True, False])
def test_writes_into_whole_tensors_are_refused(opened, wrote):
    """Each lane would have written once."""

    def run(x, total):
        total.add_(1) if wrote else total.add(1)
        return x

    cutter = Cutter(in_dims={"total": None}, parameters=Parameters(run), sizes=uneven)
    session = opened(run, cutter=cutter)
    with pytest.raises(ShardError, match="into a tensor that every lane gets whole") if wrote else contextlib.nullcontext():
        call(session, torch.ones(9), torch.zeros(3))
    with torch.inference_mode():
        call(session, torch.ones(9), torch.zeros(3))  # tensors without versions


def test_unused_names_of_in_dims_warn_at_the_end():
    def run(x, **options):
        return x

    cutter = Cutter(in_dims={"maks": None}, parameters=Parameters(run), sizes=uneven)
    session = Session(run, [CPU] * 2, cutters={None: cutter}, rules=JoinRules())
    call(session, torch.ones(9))
    with pytest.warns(UserWarning, match="in_dims names 'maks', and no call passed a keyword argument of that name"):
        session.close()


# Whole calls


def test_submitted_calls_run_whole(opened):
    """Keywords and containers are passed on; rows are counted before the call, which may empty its batch."""
    session = opened(lambda batch, scale: batch.pop("x") * scale)
    entry = Entry(session.target)
    assert session.submit(entry, ({"x": torch.ones(3)},), {"scale": 2}).result(PATIENCE_S).tolist() == [2, 2, 2]
    prepared = session.submit(entry, ({"x": torch.ones(4)},), {}, lambda batch: (batch, 3))
    assert prepared.result(PATIENCE_S).tolist() == [3] * 4
    assert (session.stats().calls, sum(lane.rows for lane in session.stats().lanes)) == (2, 7)


# Memory


@contextlib.contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


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
    with no_garbage_collection():
        with parallel(run, ["cpu"] * 2) as p:
            for _ in range(50):
                x = torch.randn(9, 4, requires_grad=grad)
                held.append(weakref.ref(x))
                with contextlib.suppress(ValueError, GatherError):
                    way(p, x)
                del x
        assert [index for index, each in enumerate(held) if each() is not None] == []


def rss():
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.mark.long
@pytest.mark.stress
def test_memory_and_threads_stay_flat():
    """Over 100,000 calls and submits with changing rows, and over 200 blocks."""
    model, norm = nn.Linear(4, 2), nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    xs = [torch.randn(rows, 4) for rows in (2, 3, 5, 8)]

    def calls(p, count):
        for index in range(count):
            p(xs[index % 4])
            if index % 100 == 0:
                p.submit(xs[0]).result(PATIENCE_S)

    def blocks(count):
        for _ in range(count):
            with parallel(norm, ["cpu"] * 3) as p:
                p(torch.randn(8, 64)).sum().backward()
                p.submit(torch.randn(8, 64)).result(PATIENCE_S)

    with torch.no_grad(), parallel(model, ["cpu"] * 2, out_dims=0) as p:
        calls(p, 2_000)
        before = rss()
        calls(p, 98_000)
        assert rss() - before < 8 * 2**20
    blocks(40)
    threads, before = threading.active_count(), rss()
    blocks(200)
    assert threading.active_count() == threads
    assert rss() - before < 12 * 2**20

"""A session: cut calls, plain calls, and whole calls."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry, Session
from parawrap.errors import GatherError, SessionError, ShardError
from parawrap.lanes import here
from parawrap.shards import Cutter, JoinRules, Parameters, balanced, uneven

CPU = torch.device("cpu")


class Open:
    """Sessions that are closed at the end of the test."""

    def __init__(self):
        self.sessions = []

    def __call__(self, target, lanes=2, *, cutter=None, **options):
        rules = JoinRules(**options)
        cutter = cutter or Cutter(sizes=uneven if rules.needs_proof else balanced)
        session = Session(target, [CPU] * lanes, cutters={None: cutter}, rules=rules)
        self.sessions.append(session)
        return session


@pytest.fixture
def opened():
    opened = Open()
    yield opened
    for session in opened.sessions:
        session.close()


def call(session, *args, **kwargs):
    return session.call(Entry(session.target), args, kwargs)


def sizes(session):
    return session.stats().shards


# Copies


def test_every_lane_runs_a_replica(opened):
    """Replicas, that of lane 0 too, have the memory of the module's parameters and are not the module."""
    model = nn.Linear(4, 2)
    made = [replica.module for replica in opened(model, 3).pool.refresh()]
    assert len({id(module) for module in (model, *made)}) == 4
    assert {type(module) for module in made} == {nn.Linear}
    assert {module.weight.data_ptr() for module in made} == {model.weight.data_ptr()}


def test_refresh_does_nothing_twice(opened):
    """Without a change the same replicas are returned, and nothing is counted."""
    session = opened(nn.BatchNorm1d(4).eval(), 3)
    assert [id(r.module) for r in session.pool.refresh()] == [id(r.module) for r in session.pool.refresh()]
    assert [replica.lane for replica in session.pool.refresh()] == [0, 1, 2]
    assert session.stats().refreshes == 0


def test_lanes_that_run_a_function_need_no_replicas(opened):
    """Every lane calls the function itself."""
    session = opened(torch.neg)
    assert [replica.module for replica in session.pool.refresh()] == [torch.neg] * 2
    assert call(session, torch.ones(5)).tolist() == [-1] * 5


# Calls


def recording(shapes):
    """Return a function that returns its rows and records them."""

    def run(x, *rest, **options):
        shapes.append(len(x))
        return x * 2

    return run


def test_a_call_uses_every_lane(opened):
    """Each lane gets a shard of a size of its own, and the sizes are reported."""
    seen = []
    session, x = opened(recording(seen)), torch.arange(20.0)
    assert_close(call(session, x), x * 2)
    assert sorted(seen) == [9, 11]
    assert sizes(session) == (11, 9)


def test_the_lanes_of_a_call_may_wait_for_each_other(opened):
    """Without gradients, the lanes of the first call run at the same time too."""
    gate = threading.Barrier(2)
    session = opened(lambda x: (gate.wait(20), x)[1])
    assert call(session, torch.zeros(9)).shape == (9,)


def test_declared_outputs_need_no_different_sizes(opened):
    """With `out_dims`, shards are balanced."""
    seen = []
    session = opened(recording(seen), out_dims=0)
    call(session, torch.zeros(16))
    assert seen == [8, 8]


def outcome(session, args, kwargs):
    """Return what a call gives: the sizes of its shards and its output, or its error."""
    before = session.stats().plain
    try:
        output = call(session, *args, **kwargs)
    except Exception as error:
        return type(error), str(error)
    return None if session.stats().plain > before else sizes(session), output


CALLS = {
    "rows": lambda x, n=None, flag=False, items=None: x * 2,
    "twice": lambda x, n=None, flag=False, items=None: torch.cat([x, x]),
    "total": lambda x, n=None, flag=False, items=None: x.sum(0),
    "fixed": lambda x, n=None, flag=False, items=None: torch.ones(5),
    "first": lambda x, n=None, flag=False, items=None: x[:3],
    "number": lambda x, n=None, flag=False, items=None: x.mean() if flag else x,
    "list": lambda x, n=None, flag=False, items=None: x.tolist() if flag else ["a"] * 5,
    "fails": lambda x, n=None, flag=False, items=None: 1 / 0 if flag else x,
    "other": lambda x, n=None, flag=False, items=None: (x, "a") if flag else x[0],
}


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
@pytest.mark.parametrize("lanes", [2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_decided_from_the_call_alone(opened, name, lanes):
    """A call after a hundred others of every size and kind does what it does in a session of its own."""
    shuffled = random.Random(0)
    calls = [
        ((torch.arange(float(rows)),), options)
        for rows in (0, 1, 2, 3, 4, 5, 6, 8, 9, 16, 17)
        for options in ({}, {"n": 3}, {"n": 4}, {"flag": True}, {"items": ["a"] * 5}, {"items": iter("abc")})
    ]
    session = opened(CALLS[name], lanes)
    alone = [outcome(opened(CALLS[name], lanes), *each) for each in calls]
    order = list(range(len(calls))) * 2
    shuffled.shuffle(order)
    for index in order:
        assert repr(outcome(session, *calls[index])) == repr(alone[index])


@pytest.mark.parametrize("rows", [0, 1])
def test_calls_of_at_most_one_row_run_plainly(opened, rows):
    """A call without rows to share runs once, in the caller, outside any lane."""
    seen, lanes = [], []
    session = opened(lambda x: (seen.append(len(x)), lanes.append(here.lane), x)[2])
    assert call(session, torch.zeros(rows)).shape == (rows,)
    assert (seen, lanes, session.stats().plain) == ([rows], [None], 1)


def test_a_call_without_tensors_runs_plainly(opened):
    """There is nothing to cut, so the function is called once."""
    session = opened(lambda number: number + 1)
    assert call(session, 2) == 3
    assert session.stats().plain == 1


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_any_row_count_gives_the_plain_answer(opened, lanes):
    """Whatever the rows of a call, a row-wise function has its plain answer."""
    session = opened(lambda x: (x * 2, {"l": list(map(str, x.tolist()))}), lanes)
    for rows in range(60):
        x = torch.arange(float(rows))
        y, others = call(session, x)
        assert_close(y, x * 2)
        assert others["l"] == list(map(str, x.tolist()))


def test_a_tensor_that_every_lane_fills_is_refused(opened):
    """A tensor that only the function holds is not one value: each lane may have written its rows into it."""
    table = torch.zeros(3)
    session = opened(lambda x: (x * 2, table))
    for _ in range(3):
        with pytest.raises(GatherError, match=r"output\[1\] cannot be joined.*None for one value"):
            call(session, torch.arange(9.0))


def test_counts_that_are_equal_by_luck_are_refused(opened):
    """Two lanes that both count 2 have counted 4."""
    session = opened(lambda x: (x, (x > 3).sum(0)))
    x = torch.tensor([[9.0], [0.0], [9.0], [0.0], [0.0], [9.0], [9.0], [0.0], [0.0]])
    for _ in range(2):
        with pytest.raises(GatherError, match=r"output\[1\] cannot be joined.*out_dims=0.*None for one value"):
            call(session, x)


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
@pytest.mark.parametrize(("rows", "values"), [(1, 1), (4, 1), (5, 2), (16, 2)])
@pytest.mark.parametrize("reduce", ["stack", lambda vector: vector])
def test_a_stack_has_one_value_per_shard(opened, reduce, rows, values):
    """A call that runs plainly is one shard, so it has one value."""
    session = opened(lambda x: x.sum(), reduce=reduce)
    for _ in range(2):
        assert call(session, torch.ones(rows)).shape == (values,)


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_a_reduction_is_the_same_in_every_call(opened, reduce):
    """The mean is weighted by the rows of each shard, so shards of different sizes have the plain mean."""
    x = torch.arange(16.0)
    session = opened(lambda x: getattr(x, reduce)(), reduce=reduce)
    for _ in range(3):
        assert_close(call(session, x), getattr(x, reduce)())


# Refusals


@pytest.mark.parametrize("rows", [5, 16])
def test_an_output_that_does_not_follow_the_rows_is_refused_in_every_call(opened, rows):
    """No call returns an output that sizes show to be wrong."""
    session = opened(lambda x: torch.cat([x, x]))
    for _ in range(4):
        with pytest.raises(GatherError, match="out_dims"):
            call(session, torch.arange(float(rows)))


@pytest.mark.filterwarnings("ignore:a call of .* because the sizes of shards must differ")
def test_a_call_that_runs_plainly_returns_its_output_unchecked(opened):
    """A call of one row, or of 4 rows on 2 lanes, runs plainly, so its output is the plain one at every call."""
    session = opened(lambda x: torch.cat([x, x]))
    for rows in (1, 2, 4) * 3:
        assert call(session, torch.zeros(rows)).shape == (2 * rows,)
    assert session.stats().plain == 9


@pytest.mark.parametrize("rows", [5, 9, 16])
def test_a_number_without_a_reduction_is_refused_in_every_call(opened, rows):
    """A loss needs `reduce` whenever the call is cut."""
    session = opened(lambda x: x.sum())
    for _ in range(3):
        with pytest.raises(GatherError, match="reduce"):
            call(session, torch.arange(float(rows)))


def test_an_error_of_the_model_changes_nothing(opened):
    """A call after one that raised is cut as before."""
    seen, fails = [], [True]

    def run(x):
        seen.append(len(x))
        if fails:
            raise KeyError(len(x))
        return x

    session = opened(run)
    with pytest.raises(KeyError):
        call(session, torch.zeros(9))
    fails.clear(), seen.clear()
    assert call(session, torch.zeros(9)).shape == (9,)
    assert sorted(seen) == [4, 5]


# The warning about a large shard


def test_a_large_shard_warns_once_per_session(opened):
    """The warning names the rows, the lanes, and out_dims=0, and appears once, whatever calls follow."""
    session = opened(torch.neg)
    call(session, torch.zeros(16))
    with pytest.warns(UserWarning, match=r"a call of 8 rows on 2 lanes has a shard of 5 rows.*With out_dims=0") as caught:
        call(session, torch.zeros(8))
    assert len(caught) == 1
    for rows in (8, 6, 10):
        call(session, torch.zeros(rows))


@pytest.mark.parametrize("options", [{"out_dims": 0}, {"join": "list"}])
def test_balanced_shards_do_not_warn(opened, options):
    """With `out_dims`, and with join="list", shards are balanced, and there is nothing to warn about."""
    session = opened(torch.neg, **options)
    for rows in range(20):
        call(session, torch.zeros(rows))


# Whole calls, and the end


def test_submitted_calls_run_whole(opened):
    """A submitted call is not cut, whatever its rows."""
    seen = []
    session = opened(recording(seen))
    doubled = session.submit(Entry(session.target), (torch.ones(16),), {}).result(20)
    assert session.stats().lanes[0].rows + session.stats().lanes[1].rows == 16
    assert (seen, doubled.sum().item()) == ([16], 32)


def test_a_submitted_call_may_hold_more_than_tensors(opened):
    """Keywords and containers are passed on as they are."""
    session = opened(lambda batch, scale: batch["x"] * scale)
    output = session.submit(Entry(session.target), ({"x": torch.ones(3)},), {"scale": 2}).result(20)
    assert (sum(lane.rows for lane in session.stats().lanes), output.tolist()) == (3, [2, 2, 2])


def test_rows_are_counted_before_the_call(opened):
    """A function that empties its batch has the rows that it was given."""
    session = opened(lambda batch: batch.pop("x") * 2)
    session.submit(Entry(session.target), ({"x": torch.ones(3)},), {}, lambda batch: (batch,)).result(20)
    assert sum(lane.rows for lane in session.stats().lanes) == 3


def test_cancel_drops_calls_that_have_not_started(opened):
    """Calls that lanes have started go on."""
    release, began = threading.Event(), threading.Event()
    session = opened(lambda x: (began.set(), release.wait(20), x)[2], 1 + 1)
    entry = Entry(session.target)
    running = [session.submit(entry, (torch.zeros(1),), {}) for _ in range(2)]
    assert began.wait(20)
    waiting = [session.submit(entry, (torch.zeros(1),), {}) for _ in range(8)]
    session.cancel()
    release.set()
    session.close()
    assert all(future.done() for future in (*running, *waiting))
    assert sum(future.cancelled() for future in waiting) >= 7


def test_a_call_inside_a_lane_runs_plainly(opened):
    """A function that calls its own session gets the plain answer, in its lane."""
    lanes = []

    def run(x):
        lanes.append(here.lane)
        return call(session, x[:, 0]) if x.ndim > 1 else x * 2

    session, x = opened(run), torch.randn(16, 3)
    for _ in range(2):
        lanes.clear()
        assert_close(call(session, x), x[:, 0] * 2)
        assert None not in lanes


def test_a_closed_session_runs_plainly(opened):
    """After `close` a call is the plain call, and `submit` raises."""
    model = nn.Linear(4, 2)
    session = opened(model)
    session.close()
    session.close()
    x = torch.randn(3, 4)
    assert_close(call(session, x), model(x))
    with pytest.raises(SessionError, match="closed"):
        session.submit(Entry(model), (x,), {})


def test_a_session_holds_no_objects_of_its_callers(opened):
    """Arguments of a call are free once the call has returned."""

    class Context:
        pass

    def run(x, context):
        return x * 2

    cutter = Cutter(in_dims={"context": None}, parameters=Parameters(run), sizes=uneven)
    session, x = opened(run, cutter=cutter), torch.ones(9, 2)
    contexts = [Context() for _ in range(3)]
    held = [weakref.ref(each) for each in contexts]
    for each in contexts:
        call(session, x, each)
    del contexts, each
    gc.collect()
    assert [reference() for reference in held] == [None] * 3


def test_numbers_that_change_with_each_call_are_nothing_special(opened):
    """A step counter among the arguments neither warns nor fills a cache."""
    session, x = opened(lambda x, step: x + step), torch.ones(9, 2)
    for step in range(200):
        assert call(session, x, step)[0, 0] == 1 + step


def test_a_write_into_a_tensor_that_every_lane_gets_whole_is_refused(opened):
    """Each lane would have written once."""

    def run(x, total):
        total += 1
        return x

    cutter = Cutter(in_dims={"total": None}, parameters=Parameters(run), sizes=uneven)
    with pytest.raises(ShardError, match="wrote in place into a tensor that every lane gets whole"):
        call(opened(run, cutter=cutter), torch.ones(9), torch.zeros(3))

"""`map`, `submit`, `stats`, and `trace` of a block."""

from __future__ import annotations

import json
import os
import threading
from collections import namedtuple
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, SessionError, ShardError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


# -- map -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("buffersize", [None, 1, 2, 50])
def test_map_yields_every_result_in_order(count, buffersize):
    """For every `buffersize`, map yields one result per batch, in the order of the batches."""
    with parallel(lambda x: x + 1, THREE) as p:
        results = list(p.map(batches(count), buffersize=buffersize))
    assert [result[0].item() for result in results] == [index + 1 for index in range(count)]


@pytest.mark.parametrize(
    ("source", "cure"),
    [
        (torch.zeros(6, 2), r"p.map\(x.split\(32\)\)"),
        ({"x": torch.zeros(6, 2)}, r"p.map\(\[batch\]\)"),
        (nn.Linear(2, 1).state_dict(), r"p.map\(\[batch\]\)"),
        ("text", r"p.map\(\[batch\]\)"),
    ],
    ids=["tensor", "dict", "weights", "text"],
)
def test_map_refuses_one_batch(source, cure):
    """Iterating a tensor gives single rows, and iterating a dict its keys. The error names a list of batches."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=cure):
        p.map(source)


def test_an_error_with_a_dict_of_weights_names_the_way_to_pass_it():
    """Map passes a dict as keyword arguments. The note says so, and its cure works."""
    weights = [nn.Linear(2, 1).state_dict() for _ in range(3)]

    def total(weights):
        return sum(tensor.sum() for tensor in weights.values())

    with torch.no_grad(), parallel(total, TWO) as p:
        with pytest.raises(TypeError) as caught:
            list(p.map(weights))
        assert "use map(..., prepare=lambda batch: (batch,))" in caught.value.__notes__[-1]
        assert list(p.map(weights, prepare=lambda batch: (batch,))) == list(map(total, weights))


def test_map_keeps_the_order_if_lanes_finish_out_of_order():
    """Results of later batches wait for a slow batch."""
    release = threading.Event()

    def target(x):
        if x[0].item() == 0:
            release.wait(20)
        elif x[0].item() == 1:
            release.set()
        return x

    with parallel(target, TWO) as p:
        assert [y[0].item() for y in p.map(batches(5))] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("buffersize", [1, 2, 5])
def test_map_takes_at_most_buffersize_batches_ahead(buffersize):
    """At most `buffersize` batches are in flight at any moment."""
    taken = 0
    most = 0
    given_back = 0

    def source():
        nonlocal taken, most
        for batch in batches(12):
            taken += 1
            most = max(most, taken - given_back)
            yield batch

    with parallel(lambda x: x, TWO) as p:
        for _ in p.map(source(), buffersize=buffersize):
            given_back += 1
    assert (taken, given_back) == (12, 12)
    assert most == buffersize


def test_map_takes_two_batches_per_lane_by_default():
    """The default `buffersize` is 2 per lane, and no batch is taken before the first `next`."""
    taken = []

    def source():
        for batch in batches(30):
            taken.append(batch)
            yield batch

    with parallel(lambda x: x, THREE) as p:
        stream = p.map(source())
        assert not taken
        next(stream)
        assert len(taken) == 6
        stream.close()


@pytest.mark.parametrize("buffersize", [0, -1])
def test_map_with_a_buffersize_below_one_is_refused(buffersize):
    """`map` raises at the call, not at the first result."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=f"buffersize={buffersize}"):
        p.map([], buffersize=buffersize)


def test_map_does_not_cut_and_uses_every_lane():
    """Each batch runs whole in one lane, and both lanes run at the same time."""
    barrier = threading.Barrier(2)
    rows = []

    def target(x):
        barrier.wait(20)
        rows.append(len(x))
        return x

    with parallel(target, TWO) as p:
        list(p.map(batches(6, rows=5)))
        assert [lane.tasks for lane in p.stats().lanes] == [3, 3]
        assert [lane.rows for lane in p.stats().lanes] == [15, 15]
    assert rows == [5] * 6


Two = namedtuple("Two", ["x", "y"])


@pytest.mark.parametrize(
    "batch",
    [
        (torch.ones(2), torch.full((2,), 3.0)),
        {"x": torch.ones(2), "y": torch.full((2,), 3.0)},
        Two(torch.ones(2), torch.full((2,), 3.0)),
    ],
    ids=["tuple", "dict", "namedtuple"],
)
def test_map_spreads_tuples_and_dicts(batch):
    """A tuple becomes positional arguments, and a dict becomes keyword arguments."""

    class Minus(nn.Module):
        def forward(self, x, y):
            return y - x

    with parallel(Minus(), TWO) as p:
        assert [out.tolist() for out in p.map([batch] * 3)] == [[2.0, 2.0]] * 3


def test_map_passes_other_batches_as_one_argument():
    """A list, a string, a number, or None is one argument."""
    with parallel(lambda batch: batch, TWO) as p:
        assert list(p.map([[1, 2], "ab", 3, None])) == [[1, 2], "ab", 3, None]


def test_map_accepts_a_data_loader():
    """`map` over a DataLoader yields all rows in order."""
    data = list(torch.arange(10.0)[:, None])
    with parallel(lambda x: x * 2, TWO) as p:
        results = list(p.map(torch.utils.data.DataLoader(data, batch_size=4)))
    assert torch.cat(results)[:, 0].tolist() == [2.0 * index for index in range(10)]


def test_map_raises_an_error_of_the_source_at_its_position():
    """`map` yields the results of earlier batches first, then raises the source's exception."""

    def source():
        yield from batches(3)
        raise LookupError("no more")

    results = []
    with parallel(lambda x: x, THREE) as p:
        stream = p.map(source())
        with pytest.raises(LookupError, match="no more"):
            results.extend(y[0].item() for y in stream)
    assert results == [0, 1, 2]


@pytest.mark.parametrize("buffersize", [1, 4, 20])
def test_map_raises_an_error_of_the_model_at_its_position(buffersize):
    """`map` yields the results of earlier batches first, then raises the exception with a note on its lane."""

    def target(x):
        if x[0].item() == 3:
            raise LookupError("three")
        return x

    results = []
    with parallel(target, THREE) as p:
        with pytest.raises(LookupError, match="three") as caught:
            results.extend(y[0].item() for y in p.map(batches(9), buffersize=buffersize))
        assert "on cpu" in caught.value.__notes__[0]
        assert p(torch.zeros(4)).shape == (4,)
    assert results == [0, 1, 2]


def test_map_raises_an_error_of_counting_rows_at_its_position():
    """If a batch's rows cannot be counted, map yields the results of earlier batches first."""
    from parawrap import register_split

    class Uncounted:
        def __init__(self, value):
            self.value = value

        def __len__(self):
            if self.value == 3:
                raise LookupError("uncounted")
            return 1

    register_split(Uncounted, split=lambda value, sizes: [value] * len(sizes), join=lambda parts: parts[0])
    results = []
    with parallel(lambda x: x.value, TWO) as p, pytest.raises(LookupError, match="uncounted"):
        results.extend(p.map([Uncounted(index) for index in range(6)]))
    assert results == [0, 1, 2]


def test_closing_map_drops_batches_that_have_not_started():
    """After close() of the generator, no further batch starts, and the lanes are idle."""
    hold = threading.Event()
    started = []

    def target(x):
        started.append(x[0].item())
        if x[0].item() > 0:
            hold.wait(20)
        return x

    with parallel(target, TWO) as p:
        stream = p.map(batches(20), buffersize=8)
        assert next(stream)[0].item() == 0
        stream.close()
        hold.set()
        assert p.submit(torch.full((1, 1), 99.0)).result(20).item() == 99
    assert len(started) <= 5
    assert max(x for x in started if x != 99) <= 3


def test_breaking_out_of_map_leaves_the_block_usable():
    """A `break` in the loop closes the generator."""
    with parallel(lambda x: x, TWO) as p:
        for _ in p.map(batches(50)):
            break
        assert len(list(p.map(batches(5)))) == 5


def test_map_shows_progress_on_stderr(capfd):
    """With `progress=True`, map draws a bar with rates on stderr, and prints nothing on stdout."""
    pytest.importorskip("tqdm")
    with parallel(lambda x: x, TWO) as p:
        assert len(list(p.map(batches(6), progress=True))) == 6
    out, err = capfd.readouterr()
    assert out == ""
    assert "6/6" in err
    assert "rows/s" in err


def test_map_without_progress_is_silent(capfd):
    """By default, map prints nothing."""
    with parallel(lambda x: x, TWO) as p:
        list(p.map(batches(6)))
    assert capfd.readouterr() == ("", "")


def test_map_raises_after_the_end_of_its_block():
    """Reading a generator of map after the block raises SessionError instead of running plainly."""
    with parallel(lambda x: x, TWO) as p:
        stream = p.map(batches(30), buffersize=2)
        next(stream)
    with pytest.raises(SessionError):
        list(stream)


def test_map_has_the_gradients_of_plain_calls():
    """Backward through the outputs of map gives the plain gradients."""
    model = nn.Linear(1, 1)
    with parallel(model, TWO) as p:
        torch.cat(list(p.map(batches(5)))).sum().backward()
    grad = model.weight.grad.clone()
    model.zero_grad()
    torch.cat([model(x) for x in batches(5)]).sum().backward()
    assert_close(grad, model.weight.grad)


def test_hooks_on_the_model_run_once_per_batch_in_map():
    """`map` runs batches whole, so the model's own hooks see whole batches."""
    model = nn.Linear(1, 1)
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    with parallel(model, TWO) as p:
        list(p.map(batches(6)))
    assert seen == [2] * 6


# -- submit --------------------------------------------------------------------------------------------------------------


def test_submit_returns_a_future_of_a_whole_call():
    """`submit` does not cut the batch, and returns a concurrent.futures.Future."""
    with parallel(lambda x, *, k: (len(x), x * k), THREE) as p:
        future = p.submit(torch.ones(7), k=3)
        assert isinstance(future, Future)
        rows, out = future.result(20)
    assert rows == 7
    assert out.tolist() == [3.0] * 7


def test_submit_accepts_arguments_that_cannot_be_cut():
    """Because submit does not cut, different row counts and lists are allowed."""
    with parallel(lambda a, b, c: (a, b, c), TWO) as p:
        a, b, c = p.submit(torch.ones(3), torch.ones(2), ["x", "y", "z"]).result(20)
    assert (len(a), len(b), c) == (3, 2, ["x", "y", "z"])


def test_submitted_calls_run_in_idle_lanes():
    """While one lane is blocked, the other lanes run all later calls, and the counters show it."""
    hold = threading.Event()
    started = threading.Event()

    def target(x):
        if x[0].item() < 0:
            started.set()
            hold.wait(20)
        return x

    with parallel(target, THREE) as p:
        held = p.submit(-torch.ones(1))
        started.wait(20)
        for future in [p.submit(torch.ones(2)) for _ in range(12)]:
            future.result(20)
        lanes = p.stats().lanes
        hold.set()
        held.result(20)
    assert (lanes[held.lane].tasks, lanes[held.lane].rows) == (0, 0)  # its call has not returned
    assert sum(lane.tasks for lane in lanes) == 12
    assert sum(lane.rows for lane in lanes) == 24


def test_counters_include_calls_that_finished_at_the_end_of_the_block():
    """After the block, the counters include calls that were still queued when it ended."""
    hold = threading.Event()

    def target(x):
        hold.wait(20)
        return x

    with parallel(target, TWO) as p:
        futures = [p.submit(torch.ones(3)) for _ in range(20)]
        hold.set()
    assert all(future.done() for future in futures)
    assert (p.stats().calls, sum(lane.tasks for lane in p.stats().lanes)) == (20, 20)
    assert sum(lane.rows for lane in p.stats().lanes) == 60


def test_a_future_that_has_not_started_can_be_cancelled():
    """A cancelled call never runs. A call that has started cannot be cancelled."""
    hold, started = threading.Event(), threading.Event()
    ran = []

    def target(x):
        ran.append(x[0].item())
        started.set()
        hold.wait(20)
        return x

    with parallel(target, ["cpu"]) as p:
        first = p.submit(torch.zeros(1))
        started.wait(20)
        second, third = p.submit(torch.ones(1)), p.submit(torch.full((1,), 2.0))
        assert second.cancel()
        assert not first.cancel()
        hold.set()
        assert third.result(20).item() == 2
        with pytest.raises(CancelledError):
            second.result(20)
    assert ran == [0, 2]


def test_a_callback_on_a_future_can_submit_again():
    """A callback that submits another call does not deadlock."""
    done = threading.Event()
    with parallel(lambda x: x + 1, TWO) as p:
        p.submit(torch.zeros(1)).add_done_callback(
            lambda future: p.submit(future.result()).add_done_callback(lambda again: done.set())
        )
        assert done.wait(20)


# -- stats and trace -------------------------------------------------------------------------------------------------------


def test_stats_count_calls_rows_and_tasks():
    """`stats()` has the calls, the plain calls, the last shards, and each lane's tasks and rows."""
    with parallel(lambda x: x, THREE) as p:
        p(torch.zeros(7))
        p(torch.zeros(0))
        p(torch.zeros(4))
        p.submit(torch.zeros(5)).result(20)
        stats = p.stats()
    assert (stats.calls, stats.plain, stats.shards) == (4, 1, (2, 1, 1))
    assert sum(lane.rows for lane in stats.lanes) == 16
    assert sum(lane.tasks for lane in stats.lanes) == 7
    assert all(lane.busy_s > 0 for lane in stats.lanes)
    assert "4 calls (1 plain)" in str(stats)


def test_stats_can_be_read_after_the_block():
    """After the block, `stats()` returns the last counters."""
    with parallel(lambda x: x, TWO) as p:
        p(torch.zeros(5))
    assert p.stats().calls == 1


@pytest.mark.parametrize("rows", [3, 9])
def test_stats_leave_out_calls_whose_output_is_refused(rows):
    """A call that raises GatherError after its lanes have finished does not count."""
    with parallel(lambda x: x.mean(), TWO) as p:
        with pytest.raises(GatherError):
            p(torch.randn(rows, 2))
        assert p.stats().calls == 0


def test_a_trace_is_written_at_the_end_of_its_block(tmp_path):
    """The file has one complete event per task and a name for each lane."""
    path = tmp_path / "lanes.json"
    with parallel(lambda x: x, THREE) as p:
        p(torch.zeros(7))
        with p.trace(path) as trace:
            for _ in range(4):
                p(torch.zeros(7))
            p.submit(torch.zeros(2)).result(20)
        p(torch.zeros(7))
    events = json.loads(path.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == len(trace.spans) == 13
    assert {event["tid"] for event in work} == {0, 1, 2}
    assert all(event["dur"] >= 0 for event in work)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [f"lane {i} on cpu" for i in range(3)]


def test_a_trace_may_lie_in_the_home_folder(tmp_path, monkeypatch):
    """``~`` is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with parallel(lambda x: x, TWO) as p, p.trace("~/lanes.json"):
        p(torch.zeros(7))
    assert json.loads((tmp_path / "lanes.json").read_text())["traceEvents"]


def test_a_trace_is_written_after_an_exception(tmp_path):
    """The file has the spans of the call that raised, with the type of the exception."""

    def fail(x):
        raise ZeroDivisionError

    with parallel(fail, TWO) as p, pytest.raises(ZeroDivisionError), p.trace(tmp_path / "t.json"):
        p(torch.zeros(7))
    errors = [event["args"]["error"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"][2:]]
    assert errors == ["ZeroDivisionError"] * 2


def test_spans_are_named_by_method_batch_and_rows(tmp_path):
    """Cut calls have the rows of each shard, batches of a stream their number, and plain calls no lane."""

    class Net(nn.Linear):
        def embed(self, x):
            return self(x)

    model = Net(4, 2)
    with torch.no_grad(), parallel(model, TWO, out_dims=0, methods=("forward", "embed")) as p:
        with p.trace(tmp_path / "t.json") as trace:
            model(torch.zeros(7, 4))
            list(p.method("embed").map([torch.zeros(rows, 4) for rows in (1, 5)]))
            p.method("forward").submit(torch.zeros(3, 4)).result()
            model(torch.zeros(1, 4))
        works = {(span.lane is None, *span.work) for span in trace.spans}
    assert works == {
        (False, "forward", None, 4),
        (False, "forward", None, 3),
        (False, "embed", 0, 1),
        (False, "embed", 1, 5),
        (True, "forward", None, None),
    }
    assert sorted(str(span.work) for span in trace.spans if span.work.batch is not None) == [
        "embed, batch 0, 1 row",
        "embed, batch 1, 5 rows",
    ]


def test_a_function_has_its_name_in_a_trace(tmp_path):
    """The spans of a function have its name. A call of the target inside a lane is part of the lane's span."""

    def doubled(x):
        return p(x[:, 0]) if x.dim() == 2 else 2 * x

    with parallel(doubled, TWO, out_dims=0) as p, p.trace(tmp_path / "t.json") as trace:
        p(torch.zeros(4, 1))
    assert sorted((span.lane, span.work.method) for span in trace.spans) == [(0, "doubled"), (1, "doubled")]


def test_prepare_is_a_span_of_its_own(tmp_path):
    """`prepare` and the call of the model are separate spans of the same batch, one after the other."""
    with parallel(lambda x: x, TWO) as p, p.trace(tmp_path / "t.json") as trace:
        list(p.map([torch.zeros(3)] * 4, prepare=lambda batch: batch + 1))
    for number in range(4):
        prepare, call = (span for span in trace.spans if span.work.batch == number)
        assert prepare.work.method == "prepare"
        assert (prepare.lane, call.work.rows) == (call.lane, 3)
        assert prepare.end <= call.start


def test_traces_may_overlap(tmp_path):
    """Each of two open traces has the calls inside its own block."""
    with parallel(lambda x: x, TWO, out_dims=0) as p:
        with p.trace(tmp_path / "outer.json") as outer:
            p(torch.zeros(4))
            with p.trace(tmp_path / "inner.json") as inner:
                p(torch.zeros(4))
        p(torch.zeros(4))
    assert len(outer.spans) == 4
    assert len(inner.spans) == 2


def test_a_trace_that_fails_hides_no_exception(tmp_path):
    """If the file cannot be written after an exception of the block, this exception is raised, with a note."""
    folder = tmp_path / "folder"

    def leave(error):
        folder.mkdir()
        with p.trace(folder / "t.json"):
            folder.rmdir()
            if error is not None:
                raise error

    with parallel(lambda x: x, TWO) as p:
        with pytest.raises(ZeroDivisionError) as caught:
            leave(ZeroDivisionError())
        assert "the trace could not be written" in caught.value.__notes__[0]
        with pytest.raises(FileNotFoundError):
            leave(None)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("gone/t.html", r"the folder of '.*gone/t\.html' does not exist\. Create '.*gone' first"),
        ("t.png", r"'.*t\.png' is not NAME\.html"),
        ("a\0.html", r"'.*a\\x00\.html' cannot be written: embedded null"),
    ],
)
def test_a_trace_that_cannot_be_written_is_refused(tmp_path, name, match):
    """`trace` raises ShardError before the block, and creates nothing."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=match):
        p.trace(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_keeps_its_place_when_the_folder_changes(tmp_path, monkeypatch):
    """A relative path is relative to the working directory of the call of `trace`."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with parallel(lambda x: x, TWO) as p, p.trace("t.json"):
        os.chdir("other")
    assert [path.name for path in tmp_path.rglob("*.json")] == ["t.json"]
    assert (tmp_path / "t.json").exists()


def test_a_trace_has_no_call_that_began_before_it(tmp_path):
    """A call that runs when a trace is opened is not part of it, also if another trace is open."""
    begun, go = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        assert go.wait(20)
        return x

    with parallel(wait, TWO) as p, p.trace(tmp_path / "outer.json") as outer:
        early = p.submit(torch.zeros(2))
        assert begun.wait(20)
        with p.trace(tmp_path / "inner.json") as inner:
            go.set()
            early.result(20)
            p.submit(torch.zeros(3)).result(20)
    assert [span.work.rows for span in outer.spans] == [2, 3]
    assert [span.work.rows for span in inner.spans] == [3]


@pytest.mark.parametrize("again", ["inside", "after"])
def test_a_trace_is_used_once(tmp_path, again):
    """A second `with` block of the same trace raises SessionError. The file has the spans of the first one."""
    with parallel(lambda x: x, TWO, out_dims=0) as p:
        with p.trace(tmp_path / "t.json") as trace:
            p(torch.zeros(4))
            if again == "inside":
                with pytest.raises(SessionError, match=r"t\.json' was already used\. Call p\.trace\(\.\.\.\) for each"):
                    trace.__enter__()
        if again == "after":
            with pytest.raises(SessionError, match="was already used"):
                trace.__enter__()
    assert len(trace.spans) == 2
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 4


class GrowingSpans(list):
    """Spans that get a plain call after each iteration."""

    def __iter__(self):
        spans = tuple(super().__iter__())
        yield from spans
        self.append(spans[0]._replace(lane=None))


def test_a_timeline_may_be_read_while_calls_run(tmp_path):
    """`timeline` has the calls up to now, also if another thread adds the first plain call meanwhile."""
    with parallel(lambda x: x, TWO, out_dims=0) as p, p.trace(tmp_path / "t.json") as trace:
        p(torch.zeros(4))
        trace.spans = GrowingSpans(trace.spans)
        assert "2 spans" in str(trace.timeline())


def test_an_exception_in_the_block_cancels_queued_calls():
    """If an exception leaves the block, calls that have not started are cancelled."""
    started, release, ran = threading.Event(), SimpleQueue(), []

    def target(x):
        started.set()
        release.get(timeout=5)  # a second call may start before it is cancelled
        ran.append(x)
        return x

    def interrupted(p, futures):
        with p:
            futures += [p.submit(torch.zeros(1)) for _ in range(50)]
            started.wait(20)
            release.put(None)
            raise KeyboardInterrupt

    futures = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(parallel(target, ["cpu"]), futures)
    assert sum(future.cancelled() for future in futures) >= 48
    assert len(ran) <= 2


def test_an_error_for_a_list_batch_explains_how_batches_are_passed():
    """DataLoader's default collate returns lists. If the model raises TypeError, a note says that tuples are spread."""
    with parallel(nn.Linear(3, 1), TWO) as p, pytest.raises(TypeError) as caught:
        list(p.map([[torch.zeros(2, 3), torch.zeros(2)]]))
    assert any("prepare=tuple" in note for note in caught.value.__notes__)

"""`map` and `submit`: whole calls, each in one lane."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import namedtuple
from concurrent.futures import CancelledError, Future
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, SessionError, ShardError, parallel, register_split
from parawrap.lanes import here
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3
Two = namedtuple("Two", ["x", "y"])


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


def first_values(outputs):
    return [output[0].item() for output in outputs]


# -- batches


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("buffersize", [None, 1, 2, 50])
def test_map_yields_in_order(count, buffersize):
    with parallel(lambda x: x + 1, THREE) as p:
        outputs = list(p.map(batches(count), buffersize=buffersize))
    assert first_values(outputs) == [index + 1 for index in range(count)]


@pytest.mark.parametrize("batch", [(torch.ones(2), torch.full((2,), 3.0)), Two(torch.ones(2), torch.full((2,), 3.0)), None])
def test_map_spreads_tuples_and_dicts(batch):
    batch = {"x": torch.ones(2), "y": torch.full((2,), 3.0)} if batch is None else batch
    with parallel(lambda x, y: y - x, TWO) as p:
        assert [out.tolist() for out in p.map([batch] * 3)] == [[2.0, 2.0]] * 3
    with parallel(lambda batch: batch, TWO) as p:
        assert list(p.map([[1, 2], "ab", 3, None])) == [[1, 2], "ab", 3, None]


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
    """Iterating a tensor gives single rows, and iterating a dict its keys."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=cure):
        p.map(source)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"buffersize": 0}, "buffersize=0"),
        ({"buffersize": -1}, "buffersize=-1"),
        ({"chunksize": 0}, "chunksize=0"),
        ({"buffersize": 2, "chunksize": 3}, "buffersize=2 has no room for chunksize=3"),
        ({"prepare": "tuple"}, "prepare='tuple' is not callable"),
        ({"key": len}, "key= is given without resume="),
        ({"key": "name", "resume": "folder"}, "key='name' is not callable"),
    ],
    ids=str,
)
def test_wrong_options_of_map(options, says):
    """The error comes at the call of `map`."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=says):
        p.map([], **options)


def test_batches_run_whole_in_every_lane():
    """Both lanes run at the same time, and hooks of the model see whole batches."""
    barrier, rows = threading.Barrier(2), []
    model = nn.Linear(1, 1)
    model.register_forward_pre_hook(lambda module, args: barrier.wait(PATIENCE_S) < 0 or None)
    model.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    with parallel(model, TWO) as p:
        outputs = list(p.map(batches(6, rows=5)))
        assert [lane.rows for lane in p.stats().lanes] == [15, 15]
    assert rows == [5] * 6
    torch.cat(outputs).sum().backward()
    assert_close(model.weight.grad, sum(batches(6, rows=5)).sum()[None, None])


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("buffersize", [None, 1, 5])
def test_batches_in_flight(buffersize, ordered):
    """At most `buffersize`, by default two per lane. None is taken before the first `next`."""
    taken, most, given_back = 0, 0, 0

    def source():
        nonlocal taken, most
        for batch in batches(12):
            taken += 1
            most = max(most, taken - given_back)
            yield batch

    with parallel(lambda x: x, TWO) as p:
        stream = p.map(source(), buffersize=buffersize, ordered=ordered)
        assert taken == 0
        for _ in stream:
            given_back += 1
    assert (taken, given_back, most) == (12, 12, buffersize or 4)


@pytest.mark.parametrize("ordered", [True, False])
def test_the_source_is_read_ahead(ordered):
    """Here, a batch ends only when the next one was read."""
    read = [threading.Event() for _ in range(6)]

    def target(x):
        following = int(x[0].item()) + 1
        assert following == len(read) or read[following].wait(PATIENCE_S)
        return x

    def source():
        for index, batch in enumerate(batches(6)):
            read[index].set()
            yield batch

    with parallel(target, TWO) as p:
        assert sorted(first_values(p.map(source(), ordered=ordered, buffersize=2))) == list(range(6))


@pytest.mark.parametrize("ordered", [True, False])
def test_ordered_outputs_wait_for_a_slow_batch(ordered):
    """With ordered=False, each output comes as soon as it is computed."""
    release, seen = threading.Event(), []

    def target(x):
        if x[0].item() == 0:
            release.wait(PATIENCE_S)
        elif ordered:
            release.set()
        return x

    with parallel(target, TWO) as p:
        for output in p.map(batches(8), ordered=ordered):
            seen.append(output[0].item())
            if len(seen) == 7:
                release.set()
    assert seen == [*range(8)] if ordered else seen[-1] == 0
    assert sorted(seen) == [*range(8)]


@pytest.mark.parametrize("ordered", [True, False])
def test_closing_drops_batches(ordered):
    """Batches that no lane has started never start, and the block stays usable."""
    ran, release = [], threading.Event()

    def target(x):
        ran.append(x[0].item())
        if x[0].item() > 0:
            release.wait(PATIENCE_S)
        return x

    with parallel(target, TWO) as p:
        stream = p.map(batches(30), ordered=ordered, buffersize=20)
        assert next(stream)[0].item() == 0
        stream.close()
        release.set()
        assert len(list(p.map(batches(1)))) == 1
    assert max(ran) <= 3


def test_a_stream_ends_with_its_block():
    """Reading it then raises instead of running plainly, also with `return_exceptions`."""
    for return_exceptions in (True, False):
        with parallel(lambda x: x, TWO) as p:
            stream = p.map(batches(30), buffersize=2, return_exceptions=return_exceptions)
            next(stream)
        with pytest.raises(SessionError):
            list(stream)


# -- errors


class RefusedError(LookupError):
    """An exception that a weak reference may point to."""


def source_that_fails():
    yield from batches(3)
    raise LookupError("three")


@pytest.mark.parametrize("where", ["source", "model", "rows"])
@pytest.mark.parametrize("buffersize", [1, 20])
def test_an_error_comes_at_its_position(where, buffersize):
    """After the outputs of earlier batches, and the block stays usable."""

    def target(x):
        if where == "model" and x[0] == 3:
            raise LookupError("three")
        return x.value if where == "rows" else x[0].item()

    register_split(Uncounted, split=lambda value, sizes: [value] * len(sizes), join=lambda parts: parts[0])
    sources = {"source": source_that_fails(), "model": batches(9), "rows": map(Uncounted, range(9))}
    outputs = []
    with parallel(target, THREE) as p:
        with pytest.raises(LookupError, match="three"):
            outputs.extend(p.map(sources[where], buffersize=buffersize))
        assert outputs == [0, 1, 2]
        assert len(list(p.map(batches(2) if where != "rows" else [Uncounted(1)] * 2))) == 2


@pytest.mark.parametrize("ordered", [True, False])
def test_return_exceptions(ordered):
    """An exception comes in place of its batch with its number, also if the model cannot take the batch."""
    source = [*batches(3), {"y": 1}, *batches(2)]

    def target(x):
        if x[0].item() == 1:
            raise RefusedError
        return x

    with parallel(target, TWO) as p:
        pairs = list(p.map(source, return_exceptions=True, with_inputs=True, ordered=ordered))
    by_number = {next(index for index, each in enumerate(source) if each is batch): output for batch, output in pairs}
    kinds = {number: type(output) for number, output in by_number.items() if isinstance(output, Exception)}
    assert kinds == {1: RefusedError, 3: TypeError, 5: RefusedError}
    assert all(f"in batch {number} of the stream, counted from 0" in by_number[number].__notes__ for number in kinds)
    assert [by_number[number][0].item() for number in (0, 2, 4)] == [0, 2, 0]


@pytest.mark.parametrize("inside", [False, True], ids=["in the caller", "in a lane"])
def test_yielded_errors_are_freed(inside):
    """Neither the stream nor its frames refer to an exception that the user dropped."""
    alive = []

    def fail(x):
        if len(x) == 2:
            raise RefusedError
        return x

    def read(batch):
        refs = [weakref.ref(error) for error in p.map(batches(4), return_exceptions=True)]
        alive.extend(ref() for ref in refs if ref() is not None)
        return batch

    with torch.no_grad(), parallel(fail, TWO) as p:
        gc.collect()
        gc.disable()
        try:
            list(p.map(batches(1, rows=3), prepare=read)) if inside else read(None)
        finally:
            gc.enable()
    assert alive == []


# -- options


def test_prepare_runs_in_the_lane():
    """It returns the arguments, in the forms of a batch. `with_inputs` yields the batch as the source gave it."""
    lanes, both = set(), threading.Barrier(2)

    def prepare(batch):
        lanes.add(here.lane.index)
        both.wait(PATIENCE_S)
        return {"x": torch.tensor(batch), "scale": 2}

    source = [[1.0, 2.0], [3.0], [4.0], [5.0]]
    with parallel(lambda x, scale: x * scale, TWO) as p:
        pairs = list(p.map(source, prepare=prepare, with_inputs=True))
        assert sum(lane.rows for lane in p.stats().lanes) == 5
    assert [output.tolist() for _, output in pairs] == [[2, 4], [6], [8], [10]]
    assert all(batch is given for (batch, _), given in zip(pairs, source, strict=True))
    assert lanes == {0, 1}


def test_a_batch_is_freed_with_its_output():
    """A stream of large batches keeps no batch that is done."""
    alive = []

    def make(value):
        batch = torch.full((2, 1), value)
        alive.append(weakref.ref(batch))
        return batch

    with parallel(lambda x: x + 1, ["cpu"]) as p:
        for index, _ in enumerate(p.map(map(make, range(6)), buffersize=1)):
            gc.collect()
            assert [ref() for ref in alive[: index + 1]] == [None] * (index + 1)


class Coder(nn.Module):
    def forward(self, x):
        return x + 1

    def encode(self, x, *, scale=1):
        return x * scale + 10


def test_each_method_has_its_streams():
    """`p.method(name)` chooses. `forward` is the call of the module, with its hooks."""
    model = Coder()
    model.register_forward_hook(lambda module, args, output: output * 2)
    with parallel(model, TWO, methods=("forward", "encode")) as p:
        assert first_values(p.method("forward").map(batches(3))) == [2, 4, 6]
        assert first_values(p.method("encode").map(batches(3))) == [10, 11, 12]
        assert p.method("encode").submit(torch.ones(2, 1), scale=3).result(PATIENCE_S).tolist() == [[13], [13]]
        assert p.method("encode")(torch.ones(7, 1), scale=3).tolist() == [[13]] * 7
        assert p.stats().shards == (4, 3)  # a call is cut
        assert repr(p.method("encode")) == f"{p!r}.method('encode')"
    with parallel(model, TWO, methods=("encode",)) as p:
        assert first_values([*p.map(batches(2)), p.submit(torch.zeros(2, 1)).result(PATIENCE_S)]) == [10, 11, 10]


# -- progress


class Bar:
    """The part of tqdm that the bar uses."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, total, desc, unit):
        self.total, self.desc, self.unit = total, desc, unit
        self.count, self.closed, self.speeds = 0, False, {}
        self.made.append(self)

    def set_postfix(self, speeds, *, refresh):
        self.speeds = speeds

    def update(self):
        self.count += 1

    def close(self):
        self.closed = True


@pytest.mark.parametrize(
    ("source", "options", "total", "desc"),
    [
        (batches(3), {}, 3, None),
        (iter(batches(3)), {}, None, None),
        (batches(3), {"total": 9, "desc": "embed"}, 9, "embed"),
    ],
    ids=["sized", "unknown", "given"],
)
def test_the_bar_of_a_stream(monkeypatch, source, options, total, desc):
    monkeypatch.setattr(pytest.importorskip("tqdm.auto"), "tqdm", Bar)
    Bar.made.clear()
    with parallel(lambda x: x, TWO) as p:
        assert first_values(p.map(source, progress=True, **options)) == [0, 1, 2]
    (bar,) = Bar.made
    assert (bar.total, bar.desc, bar.unit, bar.count, bar.closed) == (total, desc, "batch", 3, True)
    assert bar.speeds


def test_progress_is_on_stderr(capfd):
    """Without `progress`, map prints nothing."""
    pytest.importorskip("tqdm")
    with parallel(lambda x: x, TWO) as p:
        list(p.map(batches(6)))
        assert capfd.readouterr() == ("", "")
        list(p.map(batches(6), progress=True))
    out, err = capfd.readouterr()
    assert out == ""
    assert "6/6" in err
    assert "rows/s" in err


# -- submit and stats


def test_submit_returns_a_future_of_a_whole_call():
    """The batch is not cut, so any arguments are allowed."""
    with parallel(lambda a, b, *, c: (a, b, c), THREE) as p:
        future = p.submit(torch.ones(7), torch.ones(2), c=["x", "y"])
        assert isinstance(future, Future)
        a, b, c = future.result(PATIENCE_S)
    assert (len(a), len(b), c) == (7, 2, ["x", "y"])


def test_submitted_calls_run_in_idle_lanes():
    """While one lane is blocked, the others run all later calls. close() waits for all, and `stats` counts them."""
    hold, started = threading.Event(), threading.Event()

    def target(x):
        if x[0].item() < 0:
            started.set()
            hold.wait(PATIENCE_S)
        return x

    with parallel(target, THREE) as p:
        futures = [p.submit(-torch.ones(1))]
        started.wait(PATIENCE_S)
        for future in [p.submit(torch.ones(2)) for _ in range(12)]:
            future.result(PATIENCE_S)
        lanes = p.stats().lanes
        assert (sum(lane.tasks for lane in lanes), sum(lane.rows for lane in lanes)) == (12, 24)
        futures += [p.submit(-torch.ones(1)) for _ in range(5)]
        hold.set()
    assert all(future.done() for future in futures)
    assert (p.stats().calls, sum(lane.tasks for lane in p.stats().lanes)) == (18, 18)


def test_cancelled_calls_never_run():
    """A call that has started cannot be cancelled. An exception that leaves the block cancels all others."""
    hold, started, ran = threading.Event(), threading.Event(), []

    def target(x):
        ran.append(x[0].item())
        started.set()
        hold.wait(PATIENCE_S)
        return x

    def use():
        with parallel(target, ["cpu"]) as p:
            futures.extend(p.submit(torch.full((1,), float(index))) for index in range(20))
            started.wait(PATIENCE_S)
            assert [futures[1].cancel(), futures[0].cancel()] == [True, False]
            with pytest.raises(CancelledError):
                futures[1].result(PATIENCE_S)
            futures[2].add_done_callback(lambda _: hold.set())  # of its cancellation
            raise KeyboardInterrupt

    futures = []
    with pytest.raises(KeyboardInterrupt):
        use()
    assert ran == [0]
    assert all(future.cancelled() for future in futures[1:])


def test_a_callback_can_submit_again():
    done = threading.Event()
    with parallel(lambda x: x + 1, TWO) as p:
        p.submit(torch.zeros(1)).add_done_callback(
            lambda future: p.submit(future.result()).add_done_callback(lambda again: done.set())
        )
        assert done.wait(PATIENCE_S)


def test_stats_count_calls_rows_and_tasks():
    """Also after the block. A call whose output is refused does not count."""
    with parallel(lambda x: x.mean() if x.ndim == 2 else x, THREE) as p:
        for rows in (7, 0, 4):
            p(torch.zeros(rows))
        p.submit(torch.zeros(5)).result(PATIENCE_S)
        with pytest.raises(GatherError):
            p(torch.zeros(7, 2))
    stats = p.stats()
    assert (stats.calls, stats.plain, stats.shards) == (4, 1, (2, 1, 1))
    assert "4 calls (1 plain)" in str(stats)
    assert all(lane.busy_s > 0 for lane in stats.lanes)

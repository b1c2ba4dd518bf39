"""`map` and `submit`: whole calls, each in one lane. `stats` and `trace` show them."""

from __future__ import annotations

import gc
import json
import threading
import time
import weakref
from concurrent.futures import Future

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import GatherError, ReplicaError, SessionError, ShardError, parallel
from parawrap.engine.lanes import here
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


def first_values(outputs):
    return [output[0].item() for output in outputs]


@pytest.mark.parametrize(
    "batch", [(torch.ones(2), torch.zeros(2)), {"x": torch.ones(2), "y": torch.zeros(2)}], ids=type
)
def test_map_spreads_tuples_and_dicts(batch):
    """Any other batch is one argument.

    `prepare` runs in a lane and returns the arguments in the same forms.
    """
    with parallel(lambda x, y: x - y, TWO) as p:
        assert [out.tolist() for out in p.map([batch] * 2)] == [[1.0, 1.0]] * 2
        pairs = list(
            p.map(
                [3, 4], prepare=lambda count: (torch.ones(count), here.lane.index), with_inputs=True
            )
        )
        assert [(count, len(output)) for count, output in pairs] == [(3, 3), (4, 4)]
    with parallel(lambda batch: batch, TWO) as p:
        assert list(p.map([[1, 2], "ab", 3, None])) == [[1, 2], "ab", 3, None]


@pytest.mark.parametrize("workers", ["thread", "process"])
def test_a_stream_ends_with_its_block(workers):
    with parallel(torch.tanh, TWO, workers=workers) as p:
        stream, begun = (
            p.map(batches(3), chunksize=2),
            p.map(batches(9), buffersize=2, return_exceptions=True),
        )
        next(begun)
    for unread, message in ((stream, "read the outputs of map before it ends"), (begun, "closed")):
        with pytest.raises(SessionError, match=message):
            list(unread)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("buffersize", [None, 1])
def test_batches_in_flight(buffersize, ordered):
    """At most `buffersize` batches are in flight, by default four per lane. None is taken before
    the first `next`. Outputs are in order.
    """
    taken, most, outputs = 0, 0, []

    def source():
        nonlocal taken, most
        for batch in batches(12):
            taken += 1
            most = max(most, taken - len(outputs))
            yield batch

    with parallel(lambda x: x, TWO) as p:
        stream = p.map(source(), buffersize=buffersize, ordered=ordered)
        assert taken == 0
        for output in stream:
            outputs.append(output[0].item())
    assert (sorted(outputs) if not ordered else outputs, most) == ([*range(12)], buffersize or 8)


def test_batches_run_whole_in_all_lanes():
    """Both lanes of a stream run at the same time, hooks of the model see whole batches, and
    gradients are the plain ones.
    """
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


def test_outputs_behind_a_slow_batch():
    """With ordered=False, each output comes as soon as it is computed."""
    release, seen = threading.Event(), []

    def target(x):
        if x[0].item() == 0:
            release.wait(PATIENCE_S)
        return x

    with parallel(target, TWO) as p:
        for output in p.map(batches(8), ordered=False):
            seen.append(output[0].item())
            if len(seen) == 7:
                release.set()
    assert (seen[-1], sorted(seen)) == (0, [*range(8)])


def test_batches_that_wait_for_the_reader():
    """Forward may wait until the caller has read earlier outputs, also after batches that were
    short.
    """
    reading, read = threading.Condition(), 0

    def forward(x):
        time.sleep(0.0003)
        with reading:
            assert reading.wait_for(lambda: x[0].item() < read + 2, PATIENCE_S)
        return x

    with parallel(forward, TWO) as p:
        for index, output in enumerate(p.map(batches(40))):
            assert output[0].item() == index
            with reading:
                read += 1
                reading.notify_all()


@pytest.mark.parametrize("ordered", [True, False])
def test_an_error_among_short_batches(ordered):
    """The outputs of all earlier batches come first."""

    def forward(x):
        time.sleep(0.0003)
        return x if x[0].item() != 30 else x.reshape(3, 3, 3)

    read = []
    with parallel(forward, TWO) as p, pytest.raises(RuntimeError, match="shape") as caught:
        read.extend(output[0].item() for output in p.map(batches(40), ordered=ordered))
    assert "in batch 30 of the stream" in "".join(caught.value.__notes__)
    assert not ordered or read == [*range(30)]


def test_closing_drops_batches():
    """Batches that no lane has started never start."""
    ran, release = [], threading.Event()

    def target(x):
        ran.append(x[0].item())
        if x[0].item() > 0:
            release.wait(PATIENCE_S)
        return x

    with parallel(target, TWO) as p:
        stream = p.map(batches(30), buffersize=20)
        assert next(stream)[0].item() == 0
        stream.close()
        release.set()
    assert max(ran) <= 3


def test_batches_are_freed():
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
    """`p.method(name)` chooses the method that a stream runs. `forward` is the call of the module,
    with its hooks.
    """
    model = Coder()
    model.register_forward_hook(lambda module, args, output: output * 2)
    with parallel(model, TWO, methods=("forward", "encode")) as p:
        assert first_values(p.method("forward").map(batches(3))) == [2, 4, 6]
        assert first_values(p.method("encode").map(batches(3))) == [10, 11, 12]
        assert p.method("encode").submit(torch.ones(2, 1), scale=3).result(PATIENCE_S).tolist() == [
            [13],
            [13],
        ]
        assert p.method("encode")(torch.ones(7, 1), scale=3).tolist() == [[13]] * 7
        assert p.stats().shards == (4, 3)  # a call is cut
    with parallel(model, TWO, methods=("encode",)) as p:
        assert first_values(
            [*p.map(batches(2)), p.submit(torch.zeros(2, 1)).result(PATIENCE_S)]
        ) == [10, 11, 10]


def test_progress_draws_a_bar(capfd):
    """A bar is drawn on stderr. Without `progress`, map prints nothing."""
    pytest.importorskip("tqdm")
    with parallel(lambda x: x, TWO) as p:
        for options, texts in (({}, ["3/3"]), ({"total": 9, "desc": "embed"}, ["embed:", "3/9"])):
            list(p.map(batches(6)))
            assert capfd.readouterr() == ("", "")
            list(p.map(batches(3), progress=True, **options))
            shown = capfd.readouterr().err
            assert all(text in shown for text in texts)


def test_submitted_calls_use_idle_lanes():
    """Submitted calls are not cut.

    While one lane is blocked, the others run all later calls. close() waits.
    """
    hold, started = threading.Event(), threading.Event()

    def target(x, *, names=None):
        if x[0].item() < 0:
            started.set()
            hold.wait(PATIENCE_S)
        return len(x), names

    with parallel(target, THREE) as p:
        futures = [p.submit(-torch.ones(1))]
        started.wait(PATIENCE_S)
        for future in [p.submit(torch.ones(2), names=["a", "b"]) for _ in range(12)]:
            assert isinstance(future, Future)
            assert future.result(PATIENCE_S) == (2, ["a", "b"])
        futures += [p.submit(-torch.ones(1)) for _ in range(5)]
        hold.set()
    assert all(future.done() for future in futures)


def test_cancelled_calls_never_run():
    """A call that has started cannot be cancelled.

    An exception that leaves the block cancels all others.
    """
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


def test_stats_count_calls_and_rows():
    """Counters can be read during and after the block.

    A call with a refused output does not count.
    """
    with parallel(lambda x: x.mean() if x.ndim == 2 else x, THREE) as p:
        for rows in (7, 0, 5):
            p(torch.zeros(rows))
        for x in (torch.zeros(5), torch.tensor(1.0)):
            p.submit(x).result(PATIENCE_S)
        with pytest.raises(GatherError):
            p(torch.zeros(7, 2))
    stats = p.stats()
    assert (stats.calls, stats.plain, stats.shards) == (5, 1, (3, 2))
    assert sum(lane.rows for lane in stats.lanes) == 17
    assert "5 calls (1 plain)" in str(stats)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["raises", "is refused"])
def test_stats_leave_out_failed_whole_calls(kind):
    class Fails(nn.Linear):
        def forward(self, x):
            if kind == "raises":
                raise ZeroDivisionError
            self.weight.add_(1)
            return super().forward(x)

    with parallel(Fails(1, 1), TWO) as p:
        future = p.submit(torch.ones(3, 1))
        with pytest.raises((ZeroDivisionError, ReplicaError)):
            future.result(PATIENCE_S)
    stats = p.stats()
    assert (stats.calls, [lane.rows for lane in stats.lanes]) == (0, [0, 0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["vector", "nested"])
def test_whole_calls_of_unusual_tensors(kind):
    """A whole call of listed layers takes a nested tensor, and one without the dim of rows."""
    if kind == "vector":
        dim, x, rows = 1, torch.ones(5), 0
    else:
        parts = [torch.ones(2, 3), torch.ones(4, 3)]
        dim, x, rows = 0, torch.nested.nested_tensor(parts, layout=torch.strided), 2
    with torch.no_grad(), parallel(torch.nn.ReLU(), TWO, dim=dim) as p:
        output = p.submit(x).result(PATIENCE_S)
    assert all(map(torch.equal, output.unbind(), x.unbind()))
    assert sum(lane.rows for lane in p.stats().lanes) == rows


def events_in(path):
    return json.loads(path.read_text())["traceEvents"]


def test_spans_name_their_work(tmp_path):
    """Cut calls have the rows of each shard, batches of a stream their number, and plain calls no
    lane.
    """
    with torch.no_grad(), parallel(nn.Linear(4, 2), TWO, out_dims=0) as p:
        with p.trace(tmp_path / "t.json") as trace:
            p(torch.zeros(7, 4))
            list(p.map([torch.zeros(rows, 4) for rows in (1, 5)], prepare=lambda batch: batch))
            p(torch.zeros(1, 4))
        p(torch.zeros(7, 4))
    found = {
        (span.track == -1, span.kind, span.details["batch"], span.details["rows"])
        for span in trace.spans
    }
    assert {each for each in found if each[1] != "prepare"} == {
        (False, "forward", None, 4),
        (False, "forward", None, 3),
        (False, "forward", 0, 1),
        (False, "forward", 1, 5),
        (True, "forward", None, None),
    }
    assert {span.name for span in trace.spans} >= {
        "forward, batch 0, 1 row",
        "forward, batch 1, 5 rows",
    }
    events = events_in(tmp_path / "t.json")
    assert [event["args"]["name"] for event in events if event["ph"] == "M"][:2] == [
        f"lane {i} on cpu" for i in range(2)
    ]
    tracks = [event["tid"] for event in events if event["ph"] == "X"]
    assert len(tracks) == len(trace.spans) == 7
    assert tracks.count(2) == 1, "the plain call has a track of its own"


def test_a_file_that_cannot_be_written(tmp_path):
    """`trace` raises before the block, and creates nothing."""
    with (
        parallel(torch.tanh, TWO) as p,
        pytest.raises(ShardError, match=r"No such file or directory\. Create its folder"),
    ):
        p.trace(tmp_path / "gone" / "t.html")
    assert list(tmp_path.iterdir()) == []


def test_a_trace_after_an_exception(tmp_path):
    """The file has the spans of the call that raised.

    If it cannot be written, that is a note, or an error of its own.
    """
    (folder := tmp_path / "folder").mkdir()

    def fail():
        folder.rmdir()
        raise ZeroDivisionError

    with parallel(torch.matmul, TWO) as p:
        with pytest.raises(RuntimeError), p.trace(tmp_path / "t.json") as trace:
            p(torch.zeros(7, 2), torch.zeros(7, 3))
        with pytest.raises(
            SessionError,
            match=r"t\.json' was already used. Call p\.trace\(\.\.\.\) for each `with`",
        ):
            trace.__enter__()
        with pytest.raises(ZeroDivisionError) as caught, p.trace(folder / "t.json"):
            fail()
        folder.mkdir()
        with pytest.raises(FileNotFoundError), p.trace(folder / "t.json"):
            folder.rmdir()
    assert "the trace could not be written" in caught.value.__notes__[-1]
    errors = [
        event["args"]["error"] for event in events_in(tmp_path / "t.json") if event["ph"] == "X"
    ]
    assert errors == ["RuntimeError"] * 2

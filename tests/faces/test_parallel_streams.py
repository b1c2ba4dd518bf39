"""map, submit, stats, trace and verify."""

from __future__ import annotations

import json
import threading
from collections import namedtuple
from concurrent.futures import CancelledError, Future
from queue import SimpleQueue

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import SessionError, ShardError, VerifyError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


# -- map -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 7, 20])
@pytest.mark.parametrize("buffersize", [None, 1, 2, 50])
def test_map_gives_every_result_in_order(count, buffersize):
    """Map yields one result per batch, in the order of the batches, for every buffersize."""
    with parallel(lambda x: x + 1, THREE) as p:
        results = list(p.map(batches(count), buffersize=buffersize))
    assert [result[0].item() for result in results] == [index + 1 for index in range(count)]


def test_map_keeps_the_order_when_lanes_do_not():
    """A batch that takes long does not let later ones pass."""
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
def test_map_takes_no_more_than_the_buffersize(buffersize):
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
    """The default buffersize is 2 per lane."""
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
    """A buffersize below 1 is refused at the call, not at the first result."""
    with parallel(lambda x: x, TWO) as p, pytest.raises(ShardError, match=f"buffersize={buffersize}"):
        p.map([], buffersize=buffersize)


def test_map_does_not_cut_and_uses_every_lane():
    """Batches go whole to lanes, and while one is at work the other takes the next."""
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
    """A tuple batch is model(*batch), a dict model(**batch)."""

    class Minus(nn.Module):
        def forward(self, x, y):
            return y - x

    with parallel(Minus(), TWO) as p:
        assert [out.tolist() for out in p.map([batch] * 3)] == [[2.0, 2.0]] * 3


def test_map_hands_over_a_list_as_it_is():
    """A list, a string or a number is model(batch)."""
    with parallel(lambda batch: batch, TWO) as p:
        assert list(p.map([[1, 2], "ab", 3, None])) == [[1, 2], "ab", 3, None]


def test_map_takes_a_data_loader():
    """The usual source of batches."""
    data = list(torch.arange(10.0)[:, None])
    with parallel(lambda x: x * 2, TWO) as p:
        results = list(p.map(torch.utils.data.DataLoader(data, batch_size=4)))
    assert torch.cat(results)[:, 0].tolist() == [2.0 * index for index in range(10)]


def test_map_raises_the_sources_error_in_its_place():
    """Every batch before the failing one is yielded; the error is the source's own."""

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
def test_map_raises_the_models_error_in_its_place(buffersize):
    """Results before the failing batch come first; then the user's exception with a note on its lane."""

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


def test_map_raises_the_cuts_error_in_its_place():
    """A batch whose rows cannot be counted fails at its place, not ahead of the results before it."""
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


def test_closing_map_drops_what_has_not_begun():
    """After close() of the generator no further batch is run, and the lanes are free."""
    hold = threading.Event()
    begun = []

    def target(x):
        begun.append(x[0].item())
        if x[0].item() > 0:
            hold.wait(20)
        return x

    with parallel(target, TWO) as p:
        stream = p.map(batches(20), buffersize=8)
        assert next(stream)[0].item() == 0
        stream.close()
        hold.set()
        assert p.submit(torch.full((1, 1), 99.0)).result(20).item() == 99
    assert len(begun) <= 5
    assert max(x for x in begun if x != 99) <= 3


def test_breaking_out_of_map_leaves_the_block_usable():
    """A break in the loop is a close."""
    with parallel(lambda x: x, TWO) as p:
        for _ in p.map(batches(50)):
            break
        assert len(list(p.map(batches(5)))) == 5


def test_map_shows_its_progress_on_stderr(capfd):
    """progress=True draws a bar with the rate of each lane on stderr, and nothing on stdout."""
    pytest.importorskip("tqdm")
    with parallel(lambda x: x, TWO) as p:
        assert len(list(p.map(batches(6), progress=True))) == 6
    out, err = capfd.readouterr()
    assert out == ""
    assert "6/6" in err
    assert "rows/s" in err


def test_map_without_progress_is_silent(capfd):
    """Nothing is printed unless it is asked for."""
    with parallel(lambda x: x, TWO) as p:
        list(p.map(batches(6)))
    assert capfd.readouterr() == ("", "")


def test_map_whose_block_has_ended_is_refused():
    """A stream that is read on after the block raises rather than silently running plainly."""
    with parallel(lambda x: x, TWO) as p:
        stream = p.map(batches(30), buffersize=2)
        next(stream)
    with pytest.raises(SessionError):
        list(stream)


def test_map_gives_the_gradients_of_plain_calls():
    """Outputs of map carry their graphs."""
    model = nn.Linear(1, 1)
    with parallel(model, TWO) as p:
        torch.cat(list(p.map(batches(5)))).sum().backward()
    grad = model.weight.grad.clone()
    model.zero_grad()
    torch.cat([model(x) for x in batches(5)]).sum().backward()
    assert_close(grad, model.weight.grad)


def test_hooks_of_the_root_run_once_a_batch_in_map():
    """In map a call is whole: the model's own hooks run with it."""
    model = nn.Linear(1, 1)
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append(len(out)))
    with parallel(model, TWO) as p:
        list(p.map(batches(6)))
    assert seen == [2] * 6


# -- submit --------------------------------------------------------------------------------------------------------------


def test_submit_gives_a_future_of_the_whole_call():
    """A concurrent.futures.Future; rows are not cut."""
    with parallel(lambda x, *, k: (len(x), x * k), THREE) as p:
        future = p.submit(torch.ones(7), k=3)
        assert isinstance(future, Future)
        rows, out = future.result(20)
    assert rows == 7
    assert out.tolist() == [3.0] * 7


def test_submit_takes_what_a_call_would_refuse():
    """Rows that disagree and lists do no harm where nothing is cut."""
    with parallel(lambda a, b, c: (a, b, c), TWO) as p:
        a, b, c = p.submit(torch.ones(3), torch.ones(2), ["x", "y", "z"]).result(20)
    assert (len(a), len(b), c) == (3, 2, ["x", "y", "z"])


def test_what_is_submitted_goes_to_a_lane_that_is_free():
    """While one lane is held, the others do all that comes after, and its rows are counted for them."""
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
    assert (lanes[held.lane].tasks, lanes[held.lane].rows) == (0, 1)
    assert sum(lane.tasks for lane in lanes) == 12
    assert sum(lane.rows for lane in lanes) == 25


def test_rows_that_are_counted_after_the_block_are_those_of_all_calls():
    """The counters include the calls that were still waiting when the block ended."""
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


def test_a_future_that_has_not_begun_can_be_cancelled():
    """It is never run; one that has begun cannot be cancelled."""
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


def test_a_callback_on_a_future_may_submit_again():
    """Chains of futures do not lock up."""
    done = threading.Event()
    with parallel(lambda x: x + 1, TWO) as p:
        p.submit(torch.zeros(1)).add_done_callback(
            lambda future: p.submit(future.result()).add_done_callback(lambda again: done.set())
        )
        assert done.wait(20)


# -- stats and trace -------------------------------------------------------------------------------------------------------


def test_stats_count_what_was_done():
    """The counters have calls, plain calls, the last shards, and each lane's tasks and rows."""
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


def test_stats_are_there_after_the_block():
    """The last counters can be read after the end."""
    with parallel(lambda x: x, TWO) as p:
        p(torch.zeros(4))
    assert p.stats().calls == 1


def test_a_trace_is_written_at_the_end_of_its_block(tmp_path):
    """The file has one complete event per task, and a name for each lane."""
    path = tmp_path / "deep" / "lanes.json"
    with parallel(lambda x: x, THREE) as p:
        p(torch.zeros(6))
        with p.trace(path) as trace:
            for _ in range(4):
                p(torch.zeros(6))
            p.submit(torch.zeros(2)).result(20)
        p(torch.zeros(6))
    events = json.loads(path.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == len(trace.spans) == 13
    assert {event["tid"] for event in work} == {0, 1, 2}
    assert all(event["dur"] >= 0 for event in work)
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [f"lane {i} on cpu" for i in range(3)]


def test_a_trace_is_written_after_an_exception(tmp_path):
    """What was recorded until the exception is kept."""

    def fail(x):
        raise ZeroDivisionError

    with parallel(fail, TWO) as p, pytest.raises(ZeroDivisionError), p.trace(tmp_path / "t.json"):
        p(torch.zeros(6))
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


# -- verify ----------------------------------------------------------------------------------------------------------------


def test_verify_passes_a_model_that_treats_rows_independently():
    """The output is that of the lanes; nothing is raised."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    x = torch.randn(7, 4)
    with parallel(model, THREE, verify=True) as p:
        for _ in range(2):
            assert_close(model(x), model[1](model[0](x)))
        assert p.stats().shards == (3, 2, 2)


def test_verify_finds_batch_norm_in_training():
    """The VerifyError has the address, the differences, and the usual cause."""
    model = nn.BatchNorm1d(4)
    with (
        parallel(model, THREE, verify=True),
        pytest.raises(VerifyError, match=r"output.*max abs .*max rel .*BatchNorm in train mode"),
    ):
        model(torch.randn(8, 4))


def test_verify_names_the_leaf():
    """Only the leaf that differs is named."""
    with (
        parallel(lambda x: {"good": x, "bad": [x - x.mean()]}, TWO, verify=True) as p,
        pytest.raises(VerifyError, match=r'output\["bad"\]\[0\]'),
    ):
        p(torch.randn(8, 4))


def test_verify_finds_a_reduction_that_does_not_fit():
    """A sum over rows that is joined with reduce="mean" differs from the plain call."""
    with (
        parallel(lambda x: (x, x.sum()), TWO, verify=True, reduce="mean") as p,
        pytest.raises(VerifyError, match=r"output\[1\]"),
    ):
        p(torch.ones(8, 4))


def test_verify_finds_outputs_of_another_shape():
    """An output whose columns depend on the number of rows has another shape than the plain call's."""

    def target(x):
        return x[:, : 4 if len(x) > 6 else 3]

    with parallel(target, TWO, verify=True) as p, pytest.raises(VerifyError, match="shape"):
        p(torch.randn(8, 4))


def test_verify_compares_the_first_call_of_each_kind():
    """The first call of a kind also runs plainly; later calls do not, unless their kind is another one."""
    rows = []

    def target(x):
        rows.append(len(x))
        return x

    with parallel(target, TWO, verify=True) as p:
        p(torch.zeros(8))
        assert sorted(rows) == [2, 2, 4, 8]
        rows.clear()
        p(torch.zeros(8))
        p(torch.zeros(6))
        assert sorted(rows) == [3, 3, 4, 4]
        rows.clear()
        with torch.no_grad():
            p(torch.zeros(8))
        assert sorted(rows) == [2, 2, 4, 8]


def test_verify_leaves_no_trace_in_the_model():
    """Buffers are those of one parallel call, gradients are none, and hooks of the root ran once."""
    seen = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            self.calls += 1
            return self.linear(x)

    model = Counts()
    model.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(8, 4, requires_grad=True)
    with parallel(model, TWO, verify=True):
        model(x).sum().backward()
    assert model.calls.item() == 1
    assert len(seen) == 1
    assert_close(x.grad, model.linear.weight.sum(0).expand(8, 4))
    assert_close(model.linear.bias.grad, torch.full((4,), 8.0))


def test_verify_does_not_draw_random_numbers_of_the_callers():
    """The numbers drawn after the call are those drawn without verify."""

    class Noisy(nn.Module):
        def forward(self, x):
            return x + 0 * torch.rand(()).item()

    drawn = []
    for verify in (False, True):
        model = Noisy()
        torch.manual_seed(7)
        with parallel(model, TWO, verify=verify):
            model(torch.zeros(8, 2))
        drawn.append(torch.rand(()).item())
    assert drawn[0] == drawn[1]


def test_verify_does_not_change_the_input():
    """A model that writes into its input writes once."""
    x = torch.ones(8)
    with parallel(lambda x: x.mul_(2), TWO, verify=True) as p:
        p(x)
    assert x.tolist() == [2.0] * 8


def test_leaving_by_an_exception_drops_what_was_submitted_and_has_not_begun():
    """A backlog does not keep an interrupted program alive."""
    begun, release, ran = threading.Event(), SimpleQueue(), []

    def target(x):
        begun.set()
        release.get(timeout=5)  # a second one may begin before it is cancelled
        ran.append(x)
        return x

    def interrupted(p, futures):
        with p:
            futures += [p.submit(torch.zeros(1)) for _ in range(50)]
            begun.wait(20)
            release.put(None)
            raise KeyboardInterrupt

    futures = []
    with pytest.raises(KeyboardInterrupt):
        interrupted(parallel(target, ["cpu"]), futures)
    assert sum(future.cancelled() for future in futures) >= 48
    assert len(ran) <= 2


def test_a_list_batch_that_does_not_fit_says_how_batches_are_given():
    """DataLoader's default collate gives lists: the model's error tells that a tuple would be spread."""
    with parallel(nn.Linear(3, 1), TWO) as p, pytest.raises(TypeError) as caught:
        list(p.map([[torch.zeros(2, 3), torch.zeros(2)]]))
    assert any("tuple is spread" in note for note in caught.value.__notes__)

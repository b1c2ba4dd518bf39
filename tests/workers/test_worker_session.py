"""Calls, whole calls, and streams over worker processes give what the plain calls give."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry, Session, StreamOptions, stream
from parawrap.errors import SessionError, UnsendableError
from parawrap.shards import Cutter, JoinRules, uneven
from parawrap.workers import build
from parawrap.workers._worker_lane import WorkerLane

CPU = torch.device("cpu")


class Reporting(nn.Module):
    """Returns its input and facts about the process and the modes that it runs in."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + 1, {"pid": os.getpid(), "calls": self.calls}

    def modes(self, x):
        return x, (torch.is_inference_mode_enabled(), torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu"))


class Failing(nn.Module):
    def forward(self, x):
        if bool((x < 0).any()):
            msg = "negative"
            raise ValueError(msg)
        return x


class Keeping(nn.Module):
    """Keeps the inputs of all calls in a list that outlives them."""

    kept: list[torch.Tensor] = []  # noqa: RUF012

    def forward(self, x):
        self.kept.append(x)
        return torch.stack([each.sum() for each in self.kept]).sum()[None]


class Dropping(nn.Module):
    def forward(self, x):
        return x + torch.rand(x.shape)


class Counting(nn.Module):
    """Adds the number of calls so far, which it keeps in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        self.count += 1
        return x + self.count


class Showing(nn.Module):
    """Returns the running mean that the worker has."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return x + self.norm.running_mean


def load_linear(rows, *, bias):
    torch.manual_seed(3)
    return nn.Linear(rows, 2, bias=bias)


def warn_about_ones(x):
    if (x == 1).any():
        warnings.warn("ones", stacklevel=1)
    return x


def double(batch):
    return batch * 2


def test_cut_call_equals_plain_call(opened):
    """A call that is cut over two workers gives the plain output, at each number of rows."""
    model = nn.Linear(4, 3)
    session = opened(model)
    for rows in (9, 9, 5, 3, 1, 0):
        x = torch.randn(rows, 4)
        assert_close(session.call(Entry(model), (x,), {}), model(x))


@pytest.mark.filterwarnings("ignore:the model wrote 'calls':UserWarning")
def test_calls_run_in_other_processes(opened):
    """Whole calls run in the worker processes, never here."""
    session = opened(model := Reporting())
    futures = [session.submit(Entry(model), (torch.zeros(2),), {}) for _ in range(8)]
    facts = [future.result()[1] for future in futures]
    assert os.getpid() not in {fact["pid"] for fact in facts}
    assert {fact["calls"] for fact in facts} == {1}, "an attribute that a call sets is dropped before the next call"


def test_modes_travel_with_a_call(opened):
    """Inference mode and autocast of the caller hold in the worker."""
    session = opened(model := Reporting(), methods=(None, "modes"))
    entry = Entry(model.modes, "modes")
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert session.submit(entry, (torch.zeros(2),), {}).result()[1] == (True, torch.bfloat16, True)
    assert session.submit(entry, (torch.zeros(2),), {}).result()[1][::2] == (False, False)


def test_changed_tensors_reach_the_workers(opened):
    """An in-place write, a new parameter, and a new layer are seen by the next call."""
    model = nn.Sequential(nn.Linear(4, 3))
    session, x = opened(model), torch.randn(7, 4)
    assert_close(session.call(Entry(model), (x,), {}), model(x))
    model[0].weight.mul_(2)
    assert_close(session.call(Entry(model), (x,), {}), model(x))
    assert session.stats().copied_bytes == model[0].weight.nbytes, "the changed tensor alone is sent"
    model[0].bias = nn.Parameter(torch.ones(3))
    assert_close(session.call(Entry(model), (x,), {}), model(x))
    model.append(nn.Tanh())
    assert_close(session.call(Entry(model), (x,), {}), model(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_buffers_of_lane_0_return_to_the_model(opened, mode):
    """Cut calls in train mode leave the buffers that lanes in threads leave, and the next call starts from them."""
    ours, theirs = (nn.Sequential(nn.BatchNorm1d(3), Counting()) for _ in range(2))
    in_workers = opened(ours)
    in_threads = Session(theirs, [CPU, CPU], cutters={None: Cutter(sizes=uneven)}, rules=JoinRules())
    with mode():
        for _ in range(4):
            x = torch.randn(13, 3)
            assert_close(in_workers.call(Entry(ours), (x,), {}), in_threads.call(Entry(theirs), (x,), {}))
            assert_close(ours.state_dict(), theirs.state_dict())
    in_threads.close()
    assert ours[1].count > 0


def test_buffers_that_whole_calls_write_are_dropped(opened):
    """Each whole call starts from the model's buffers."""
    session = opened(model := Counting(), 1)
    counts = [float(session.submit(Entry(model), (torch.zeros(1),), {}).result()) for _ in range(3)]
    assert counts == [1] * 3
    assert model.count == 0


def test_model_of_inference_mode_is_sent_once_and_again_when_it_changed(opened):
    """Tensors that were made in inference mode have no version, so their values are compared."""
    with torch.inference_mode():
        session = opened(model := nn.Linear(2, 2))
        x = torch.randn(5, 2)
        for _ in range(3):
            assert_close(session.call(Entry(model), (x,), {}), model(x))
        assert session.stats().refreshes == 0
        model.weight.mul_(2)
        assert_close(session.call(Entry(model), (x,), {}), model(x))
    assert session.stats().refreshes == 1


def test_writes_into_statistics_without_a_version_reach_the_workers(opened):
    """Batch norm writes its statistics unseen; a plain call's writes are in the next call of the workers."""
    model = Showing(nn.BatchNorm1d(3))
    session = opened(model, 1)
    for rows in (4, 8):
        model.norm(torch.randn(rows, 3))
        assert_close(session.submit(Entry(model), (torch.zeros(1, 3),), {}).result()[0], model.norm.running_mean)


def test_seed_gives_the_numbers_of_lanes_in_turns(opened):
    """Under deterministic algorithms, a seed fixes the random numbers of calls that are cut."""
    session, x = opened(model := Dropping(), out_dims=0), torch.zeros(6, 2)
    outputs = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            torch.manual_seed(5)
            outputs.append(session.call(Entry(model), (x,), {}))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.manual_seed(5)
    assert_close(outputs, [torch.cat([model(x[:3]), model(x[3:])])] * 3)


def test_workers_draw_from_their_own_generators(opened):
    """Without deterministic algorithms, workers draw at the same time, and the caller's generator stays as it is."""
    session, x, before = opened(model := Dropping()), torch.zeros(7, 2), torch.get_rng_state()
    outputs = [session.call(Entry(model), (x,), {}) for _ in range(3)]
    assert len(torch.cat(outputs).flatten().unique()) == 3 * x.numel()
    assert torch.equal(torch.get_rng_state(), before)


def test_workers_draw_different_numbers_in_whole_calls(opened):
    """Whole calls draw from the stream of their worker, and never repeat a number."""
    session = opened(model := Dropping())
    futures = [session.submit(Entry(model), (torch.zeros(4),), {}) for _ in range(20)]
    assert len({tuple(future.result().tolist()) for future in futures}) == 20


def test_error_of_the_model_keeps_its_type_and_names_the_worker(opened):
    """The model's exception arrives with its type, and notes with the worker and the traceback there."""
    session = opened(model := Failing(), retries=5)
    with pytest.raises(ValueError, match="negative") as caught:
        session.call(Entry(model), (torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1, -1]),), {})
    notes = "\n".join(caught.value.__notes__)
    assert "worker 1" in notes
    assert "raise ValueError(msg)" in notes
    assert_close(session.call(Entry(model), (torch.ones(5),), {}), torch.ones(5))


@pytest.mark.parametrize("what", ["argument", "parameter"])
def test_gradients_are_refused(opened, what):
    """A call that would need gradients names the ways out."""
    model = nn.Linear(2, 2).requires_grad_(what == "parameter")
    session = opened(model)
    x = torch.ones(5, 2, requires_grad=what == "argument")
    with torch.enable_grad(), pytest.raises(SessionError, match=rf"{what} .*torch\.no_grad"):
        session.call(Entry(model), (x,), {})
    with torch.enable_grad(), pytest.raises(SessionError, match="DistributedDataParallel"):
        session.submit(Entry(model), (x,), {})


@pytest.mark.filterwarnings("ignore:the model wrote 'calls':UserWarning")
def test_unsendable_values_are_named(opened):
    """An argument that cannot be pickled is named by its address, and the worker lives on."""
    session = opened(model := Reporting())
    with pytest.raises(UnsendableError, match=r"args"):
        session.submit(Entry(model), (torch.ones(2), (each for each in ())), {}).result()
    assert_close(session.submit(Entry(model), (torch.ones(2),), {}).result()[0], torch.full((2,), 2.0))


def test_warning_that_is_an_error_names_its_lane(opened):
    """A warning of a worker is raised here under the filters of this process, as an error of its lane."""
    session = opened(warn_about_ones)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="ones") as caught:
            session.call(Entry(warn_about_ones), (torch.ones(9, 2),), {})
    assert [note for note in caught.value.__notes__ if note.startswith("in lane 0 on cpu")]
    assert_close(session.call(Entry(warn_about_ones), (torch.zeros(9, 2),), {}), torch.zeros(9, 2))


def test_stream_is_in_order(opened):
    """A stream yields the outputs of large and small batches in order."""
    session = opened(model := nn.Identity())
    batches = [torch.full((1 + number % 3 * 200_000,), float(number)) for number in range(30)]
    for output, batch in zip(stream(session, Entry(model), batches, StreamOptions(4)), batches, strict=True):
        assert_close(output, batch)


def test_prepare_runs_in_the_worker(opened):
    """`prepare` runs next to the model."""
    session = opened(model := nn.Identity())
    options = StreamOptions(4, prepare=lambda batch: (batch * 2 + os.getpid(),))
    first, second = stream(session, Entry(model), [torch.zeros(1, dtype=torch.int64)] * 2, options)
    assert os.getpid() not in (int(first), int(second))


def test_inputs_that_the_model_keeps_are_not_overwritten(opened):
    """A slab of shared memory is not reused while a tensor in the worker lies on it."""
    session = opened(model := Keeping(), 1)
    entry, sums = Entry(model), []
    for number in range(1, 6):
        sums.append(float(session.submit(entry, (torch.full((50_000,), float(number)),), {}).result()))
    assert sums == [50_000 * number * (number + 1) / 2 for number in range(1, 6)]


def test_outputs_that_the_caller_keeps_are_not_overwritten(opened):
    """Outputs keep their values, however many the caller keeps."""
    session = opened(model := nn.Identity(), 1)
    batches = [torch.full((400_000,), float(number)) for number in range(12)]
    outputs = list(stream(session, Entry(model), batches, StreamOptions(2)))
    for output, batch in zip(outputs, batches, strict=True):
        assert_close(output, batch)


def test_each_worker_builds_its_own_model(opened):
    """`build` calls the function in the workers; cut, small, and whole calls use the result."""
    target = build(load_linear, 4, bias=False)
    session, x = opened(target), torch.randn(7, 4)
    state = torch.get_rng_state()
    expected = load_linear(4, bias=False)(x)
    torch.set_rng_state(state)
    assert_close(session.call(Entry(target), (x,), {}), expected)
    assert_close(session.call(Entry(target), (x[:1],), {}), expected[:1])
    assert_close(session.submit(Entry(target), (x,), {}).result(), expected)


def test_workers_build_equal_models_and_draw_different_numbers(opened):
    """Equal rows have equal outputs, also in a worker that takes the place of another one."""
    target = build(nn.Linear, 4, 2)
    session, x = opened(target), torch.ones(9, 4)
    first = session.call(Entry(target), (x,), {})
    assert first.unique().numel() == 2
    os.kill(session.pool.lanes[1].pid, signal.SIGKILL)
    torch.manual_seed(5)
    assert_close(session.call(Entry(target), (x,), {}), first)
    target = build(Dropping)
    session = opened(target)
    drawn = session.call(Entry(target), (torch.zeros(9, 1),), {})
    assert drawn.unique().numel() == 9


def test_change_of_the_shape_of_an_argument_returns_or_is_refused(opened):
    """A tensor with memory of its own gets the shape. For others, the message says what to do."""
    session = opened(target := lambda x: x.unsqueeze_(0).add_(1).sum())
    x = torch.zeros(3)
    session.submit(Entry(target), (x,), {}).result()
    assert_close(x, torch.ones(1, 3))
    with pytest.raises(SessionError, match=r"shape of an argument in place, from \(3,\) to \(1, 3\)"):
        session.submit(Entry(target), (torch.zeros(6)[::2],), {}).result()


class Factor(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def test_worker_that_takes_anothers_place_builds_the_same(opened):
    """The arguments of `load_model` are those of the first start, until `refresh`."""
    factors = [2]
    target = build(lambda factors: Factor(factors[0]), factors)
    session, x = opened(target), torch.ones(9, 1)
    assert_close(session.call(Entry(target), (x,), {}), x * 2)
    factors[0] = 5
    os.kill(session.pool.lanes[1].pid, signal.SIGKILL)
    assert_close(session.call(Entry(target), (x,), {}), x * 2)
    session.refresh()
    assert_close(session.call(Entry(target), (x,), {}), x * 5)


def test_changes_of_functions_and_classes_of_the_script_reach_the_workers(opened):
    """Defaults, code, and methods of what travels with the model."""

    class Scaled(nn.Module):
        def forward(self, x, by=1):
            return x * by

    session, x = opened(model := Scaled()), torch.ones(9, 1)
    assert_close(session.call(Entry(model), (x,), {}), x)
    Scaled.forward.__defaults__ = (2,)
    assert_close(session.call(Entry(model), (x,), {}), x * 2)
    Scaled.forward = lambda self, x: x * 3
    assert_close(session.call(Entry(model), (x,), {}), x * 3)


def test_chunks_leave_nothing_for_the_collector(opened):
    """Requests, futures, and outputs are freed with their last reference, also if a batch cannot be sent."""
    session = opened(model := nn.Identity())
    batches = [torch.zeros(2), (each for each in ()), torch.zeros(2)]
    options = StreamOptions(6, 3, return_exceptions=True)
    list(stream(session, Entry(model), [torch.zeros(2)] * 6, options))
    gc.collect()
    gc.disable()
    try:
        made = []
        for output in stream(session, Entry(model), batches * 2, options):
            made.append(weakref.ref(output))
            del output
        assert [each() for each in made] == [None] * 6
    finally:
        gc.enable()


class Slow(nn.Linear):
    """Waits half a second for rows of sevens."""

    def forward(self, x):
        if bool((x == 7).any()):
            time.sleep(0.5)
        return super().forward(x)


@pytest.mark.parametrize("changes", [0, 1, 2])
def test_call_that_runs_again_has_the_model_of_its_submission(opened, changes):
    """A worker that takes another's place gets what the others have, whatever was written meanwhile."""
    session, x = opened(model := Slow(3, 2).eval()), torch.full((6, 3), 7.0)
    for _ in range(changes):
        session.call(Entry(model), (torch.ones(9, 3),), {})
        model.weight.mul_(2)
    session.call(Entry(model), (torch.ones(9, 3),), {})
    expected = nn.functional.linear(x, model.weight, model.bias)
    futures = [session.submit(Entry(model), (x,), {}) for _ in range(2)]
    time.sleep(0.2)
    model.weight.mul_(100)
    os.kill(session.pool.lanes[0].pid, signal.SIGKILL)
    for future in futures:
        assert_close(future.result(20), expected)
    assert_close(
        session.call(Entry(model), (torch.ones(9, 3),), {}),
        nn.functional.linear(torch.ones(9, 3), model.weight, model.bias),
    )


@pytest.mark.parametrize("what", ["refresh", "close"])
def test_callback_waits_for_no_thread_that_waits_for_its_lane(opened, what):
    """A callback of a whole call may refresh or close while another thread sends a change of the model."""
    session = opened(model := Slow(3, 2).eval())
    session.call(Entry(model), (torch.ones(9, 3),), {})
    called = threading.Event()

    def callback(_):
        time.sleep(0.5)
        getattr(session, what)()
        called.set()

    futures = [session.submit(Entry(model), (torch.full((6, 3), 7.0),), {}) for _ in range(4)]
    futures[0].add_done_callback(callback)
    time.sleep(0.7)
    model.weight.mul_(2)
    with contextlib.suppress(SessionError):  # the block may be closed
        session.call(Entry(model), (torch.ones(9, 3),), {})
    assert called.wait(20)


def test_parts_of_one_call_have_the_same_model(opened, monkeypatch):
    """Another thread changes the model, and calls it, while the parts of a call are sent."""
    session, x = opened(model := nn.Linear(1, 1, bias=False)), torch.ones(9, 1)
    call, post, others = session.call, WorkerLane.post, []
    model.weight.data.fill_(1)
    call(Entry(model), (x,), {})

    def change():
        model.weight.fill_(2)
        call(Entry(model), (x,), {})

    def post_slowly(lane, request):
        post(lane, request)
        if not others:
            others.append(threading.Thread(target=torch.no_grad()(change)))
            others[0].start()
            others[0].join(0.5)

    monkeypatch.setattr(WorkerLane, "post", post_slowly)
    output = call(Entry(model), (x,), {})
    others[0].join()
    assert output.unique().numel() == 1


def test_function_is_a_target(opened):
    """A function runs in the workers like a model."""
    session, x = opened(double), torch.arange(7.0)
    assert_close(session.call(Entry(double), (x,), {}), x * 2)

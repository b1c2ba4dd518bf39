"""Exceptions in lanes keep their type and traceback, gain a note with the lane, and leave the block usable."""

from __future__ import annotations

import contextlib
import re
import threading
import traceback
import weakref

import pytest
import torch
from torch import nn

from parawrap import GatherError, ShardError, parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class MyError(Exception):
    """A user-defined exception with attributes."""

    def __init__(self, code, *, detail):
        super().__init__(code)
        self.code, self.detail = code, detail


class Fails(nn.Module):
    """Raises for shards that hold one of the values in `on`."""

    def __init__(self, make=lambda value: ValueError(f"row {value}")) -> None:
        super().__init__()
        self.make = make
        type(self).on = set()
        type(self).ran = []  # on the class, because a replica has its own attributes
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        for value in x.flatten().int().tolist():
            self.ran.append(value)
            if value in self.on:
                raise self.make(value)  # the user's line
        return self.linear(x)


def rows(count):
    return torch.arange(float(count))[:, None]


def failing(values, make=lambda value: ValueError(f"row {value}")):
    """Return a model that fails on these rows."""
    model = Fails(make)
    model.on.update(values)
    return model


@pytest.fixture(params=[True, False], ids=["in turns", "at the same time"])
def _in_turns(request):
    """Enable or disable gradients: with gradients, the lanes of a model that learns run one after another."""
    with torch.set_grad_enabled(request.param):
        yield


IN_TURNS_OR_NOT = pytest.mark.usefixtures("_in_turns")


@IN_TURNS_OR_NOT
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_exception_keeps_its_type_and_gains_a_note(bad):
    """Type and message are the original ones. A note names lane, device, and shard."""
    model = failing({bad})
    with parallel(model, THREE, out_dims=0), pytest.raises(ValueError) as caught:
        model(rows(3))
    assert str(caught.value) == f"row {bad}"
    assert caught.value.__notes__ == [f"in lane {bad} on cpu, shard {bad} of 3: 1 of 3 rows"]


@IN_TURNS_OR_NOT
@pytest.mark.parametrize("bad", [0, 2])
def test_the_traceback_reaches_the_users_line(bad):
    """The last frame of the traceback is the line that raised, in any lane."""
    model = failing({bad})
    with parallel(model, THREE, out_dims=0), pytest.raises(ValueError) as caught:
        model(rows(3))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert last.line is not None
    assert "the user's line" in last.line


@IN_TURNS_OR_NOT
def test_an_exception_keeps_its_own_attributes_and_cause():
    """The caller gets the same exception object, with its attributes and cause."""
    cause = KeyError("why")

    def make(value):
        error = MyError(value, detail="more")
        error.__cause__ = cause
        return error

    model = failing({1}, make)
    with parallel(model, TWO, out_dims=0), pytest.raises(MyError) as caught:
        model(rows(2))
    assert (caught.value.code, caught.value.detail) == (1, "more")
    assert caught.value.__cause__ is cause


def test_the_first_lanes_exception_is_raised_and_notes_name_the_others():
    """If several lanes fail at the same time, the first lane's exception is raised, with one note per other failure."""
    model = failing({1, 2})
    with torch.no_grad(), parallel(model, THREE, out_dims=0), pytest.raises(ValueError, match="row 1") as caught:
        model(rows(3))
    assert caught.value.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3: 1 of 3 rows",
        "also in lane 2 on cpu, shard 2 of 3: ValueError: row 2",
    ]


def test_the_other_lanes_finish():
    """If one of the lanes that run at the same time fails, the other lanes still run their shards."""
    model = failing({0})
    with torch.no_grad(), parallel(model, THREE, out_dims=0), pytest.raises(ValueError, match="row 0"):
        model(rows(3))
    assert sorted(model.ran) == [0, 1, 2]


def test_the_first_failure_ends_lanes_that_run_in_turns():
    """If lanes run one after another, those after the lane that fails do not run."""
    model = failing({1})
    with parallel(model, THREE, out_dims=0), pytest.raises(ValueError, match="row 1"):
        model(rows(3))
    assert model.ran == [0, 1]


@IN_TURNS_OR_NOT
def test_the_block_is_usable_after_an_error():
    """After an error, the next call runs in the same lanes."""
    model = Fails()
    x = rows(3)
    with parallel(model, THREE, out_dims=0) as p:
        for _ in range(20):
            model.on.add(2)
            with pytest.raises(ValueError, match="row 2"):
                model(x)
            model.on.clear()
            assert torch.allclose(model(x), model.linear(x), atol=1e-6)
        assert p.stats().shards == (1, 1, 1)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, MemoryError, AssertionError])
@pytest.mark.parametrize("bad", [0, 1])
@IN_TURNS_OR_NOT
def test_exceptions_of_every_type_reach_the_caller(kind, bad):
    """StopIteration and exceptions such as SystemExit reach the caller from any lane, and the block stays usable."""
    model = failing({bad}, kind)
    with parallel(model, TWO, out_dims=0):
        with pytest.raises(kind):
            model(rows(2))
        model.on.clear()
        assert model(rows(2)).shape == (2, 1)


@IN_TURNS_OR_NOT
def test_an_exception_with_a_failing_str_reaches_the_caller():
    """If `__str__` of an exception raises, the caller still gets the original exception."""

    class Unprintable(Exception):
        def __str__(self):
            raise AttributeError("no text")

    model = failing({0, 1}, lambda value: Unprintable())
    with parallel(model, TWO, out_dims=0), pytest.raises(Unprintable):
        model(rows(2))


def test_one_exception_object_raised_by_all_lanes():
    """If all lanes raise the same exception object, it has one note."""
    error = ValueError("shared")
    model = failing({0, 1, 2}, lambda value: error)
    with torch.no_grad(), parallel(model, THREE, out_dims=0), pytest.raises(ValueError, match="shared") as caught:
        model(rows(3))
    assert caught.value is error
    assert error.__notes__ == ["in lane 0 on cpu, shard 0 of 3: 1 of 3 rows"]


def test_an_error_of_a_plain_call_has_no_note():
    """A call that runs plainly has no lane to name."""
    model = failing({0})
    with parallel(model, THREE), pytest.raises(ValueError) as caught:
        model(rows(1))
    assert not getattr(caught.value, "__notes__", [])


@IN_TURNS_OR_NOT
def test_an_error_leaves_no_reference_cycle():
    """When the exception is freed, the call's tensors are freed without garbage collection."""
    import gc

    model = failing({1})
    with parallel(model, TWO, out_dims=0):
        x = rows(2)
        alive = weakref.ref(x)
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(ValueError):
                model(x)
            del x
            assert alive() is None
        finally:
            gc.enable()


def test_the_future_raises_the_error_of_a_submitted_call():
    """The exception from the future has a note that names the lane."""
    model = Fails()
    model.on = {1}
    with parallel(model, TWO) as p:
        future = p.submit(rows(2))
        with pytest.raises(ValueError, match="row 1") as caught:
            future.result(20)
        assert "lane 0 on cpu" in caught.value.__notes__[0]
        model.on = set()
        assert p.submit(rows(2)).result(20).shape == (2, 1)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration])
def test_an_exit_in_a_submitted_call_does_not_end_the_lane(kind):
    """The future raises SystemExit, KeyboardInterrupt, or StopIteration, and the lane runs later calls."""
    model = Fails(kind)
    model.on = {0}
    with parallel(model, TWO) as p:
        for _ in range(4):
            with pytest.raises(kind):
                p.submit(rows(2)).result(20)
        model.on = set()
        assert p.submit(rows(2)).result(20).shape == (2, 1)
        assert model(rows(3)).shape == (3, 1)


def test_a_warning_that_is_an_error_reaches_the_caller():
    """If a filter turns a warning in a lane into an error, the caller gets the warning's class."""
    import warnings

    def target(x):
        warnings.warn("careful", DeprecationWarning, stacklevel=1)
        return x

    with parallel(target, TWO) as p, pytest.raises(DeprecationWarning, match="careful") as caught:
        p(torch.zeros(5))
    assert "in lane 0 on cpu" in caught.value.__notes__[0]


def test_an_error_in_backward_reaches_the_caller():
    """backward() through a parallel call raises the exception of a user-defined backward function."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.clone()

        @staticmethod
        def backward(_ctx, _grad):
            raise MyError(3, detail="backward")

    with parallel(Broken.apply, TWO) as p:
        for _ in range(2):
            y = p(torch.randn(5, 2, requires_grad=True))
            with pytest.raises(MyError):
                y.sum().backward()
        assert p(torch.zeros(5, 2)).shape == (5, 2)


def test_an_interrupt_leaves_the_block_usable():
    """If the caller is interrupted in its own lane while another lane is busy, the next call works."""
    armed, entered, release = threading.Event(), threading.Event(), threading.Event()

    def target(x):
        if not armed.is_set() or release.is_set():
            return x
        if x[0].item() == 0:
            entered.wait(20)
            release.set()
            raise KeyboardInterrupt
        entered.set()
        return x

    with parallel(target, TWO, out_dims=0) as p:
        for _ in range(2):
            p(torch.arange(2.0))
        armed.set()
        with pytest.raises(KeyboardInterrupt):
            p(torch.arange(2.0))
        assert p(torch.arange(4.0)).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dim", ["0", True, 1.5, None])
def test_a_dim_that_is_not_an_integer_is_refused(dim):
    """The error names the value."""
    with pytest.raises(ShardError, match=re.escape(f"dim={dim!r}: give the dim that the rows lie on")):
        parallel(torch.nn.Linear(2, 2), ["cpu", "cpu"], dim=dim)


def test_an_output_of_map_that_holds_a_layer_is_refused():
    """A lane's copy of a layer ends with the block, so the error says to return its tensors."""

    class Returns(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            return self.layer(x), self.layer

    with (
        torch.no_grad(),
        parallel(Returns(), TWO) as p,
        pytest.raises(GatherError, match="holds a Linear, which is a lane's"),
    ):
        list(p.map([torch.ones(3, 2)]))


def internal_frames(error):
    """Return the frames of a traceback that are in parawrap or concurrent.futures, and the text of the last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if re.search(r"/parawrap/|concurrent/futures", frame.filename)], frames[-1].line


def refuse(batch):
    raise ValueError("refused")  # the user's line


def a_source_that_fails():
    yield torch.ones(2, 1)
    raise ValueError("disk")  # the user's line


@pytest.mark.parametrize(
    ("batches", "prepare"),
    [
        (lambda: [rows(1), rows(2)], None),
        (lambda: [rows(1)], refuse),
        (a_source_that_fails, None),
    ],
    ids=["model", "prepare", "source"],
)
@pytest.mark.parametrize("options", [{}, {"ordered": False}, {"return_exceptions": True}], ids=str)
def test_the_traceback_of_map_has_one_frame_of_parawrap(batches, prepare, options):
    """Between the user's call of `map` and the user's line that raised, the traceback has one line of parawrap."""
    with torch.no_grad(), parallel(failing({0, 1, 2}), TWO) as p:
        try:
            error = next(each for each in p.map(batches(), prepare=prepare, **options) if isinstance(each, ValueError))
        except ValueError as raised:
            error = raised
        internal, last = internal_frames(error)
    assert len(internal) <= 1
    assert "the user's line" in last


def test_a_submitted_call_has_no_frames_of_the_lane():
    """The traceback of a future has the frames of its `result`, and then those of the model."""
    with torch.no_grad(), parallel(failing({0}), TWO) as p:
        future = p.submit(rows(1))
        error = future.exception()
    internal, last = internal_frames(error)
    assert internal == []
    assert "the user's line" in last

"""Exceptions in lanes keep their type, gain a note, and leave the block usable.

Refusals name value, place, and cure.
"""

from __future__ import annotations

import re
import traceback

import pytest
import torch
from torch import nn

from parawrap import parallel

TWO = ["cpu"] * 2
THREE = ["cpu"] * 3


class Fails(nn.Module):
    """Raises for shards that hold one of the values."""

    def __init__(self, values, make=lambda value: ValueError(f"row {value}")):
        super().__init__()
        self.values, self.make = values, make
        type(self).ran = []  # on the class, because a replica has its own attributes
        self.linear = nn.Linear(1, 1)

    def forward(self, x):
        for value in x.flatten().int().tolist():
            self.ran.append(value)
            if value in self.values:
                raise self.make(value)  # the user's line
        return self.linear(x)


def rows(count):
    return torch.arange(float(count))[:, None]


@pytest.mark.parametrize("in_turns", [True, False], ids=["in turns", "at the same time"])
@pytest.mark.parametrize("bad", [0, 1])
def test_the_error_of_a_lane(bad, in_turns):
    """A note names the lane, and the traceback reaches the user's line.

    In turns, later lanes do not start.
    """
    error = ValueError("mine")
    error.__cause__ = cause = KeyError("why")
    model = Fails({bad}, lambda value: error)
    with (
        torch.set_grad_enabled(in_turns),
        parallel(model, THREE, out_dims=0) as p,
        pytest.raises(ValueError) as caught,
    ):
        p(rows(3))
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__notes__ == [f"in lane {bad} on cpu, shard {bad} of 3: 1 of 3 rows"]
    assert "the user's line" in traceback.extract_tb(error.__traceback__)[-1].line
    assert sorted(model.ran) == [*range(bad + 1 if in_turns else 3)]


def test_errors_of_several_lanes():
    """The first lane's exception is raised, and notes name the others."""
    model = Fails({1, 2})
    with (
        torch.no_grad(),
        parallel(model, THREE, out_dims=0),
        pytest.raises(ValueError, match="row 1") as caught,
    ):
        model(rows(3))
    assert caught.value.__notes__ == [
        "in lane 1 on cpu, shard 1 of 3: 1 of 3 rows",
        "also in lane 2 on cpu, shard 2 of 3: ValueError: row 2",
    ]


def source_that_fails():
    yield torch.ones(2, 1)
    raise ValueError("disk")  # the user's line


SOURCES = {
    "model": (
        lambda: [rows(1), rows(2)],
        ["in lane 0 on cpu", "in batch 0 of the stream, counted from 0"],
    ),
    "source": (source_that_fails, ["while batch 1 of the stream was read, counted from 0"]),
}


@pytest.mark.parametrize("options", [{}, {"ordered": False, "return_exceptions": True}], ids=str)
@pytest.mark.parametrize("name", SOURCES)
def test_errors_of_a_stream(name, options):
    """Notes name the lane and the batch.

    The traceback has at most one line of parawrap before the user's line.
    """
    source, notes = SOURCES[name]
    with torch.no_grad(), parallel(Fails({0} if name == "model" else set()), ["cpu"]) as p:
        try:
            error = next(
                each for each in p.map(source(), **options) if isinstance(each, ValueError)
            )
        except ValueError as raised:
            error = raised
    frames = traceback.extract_tb(error.__traceback__)
    assert (
        len(
            [
                frame
                for frame in frames
                if re.search(r"/parawrap/|concurrent/futures", frame.filename)
            ]
        )
        <= 1
    )
    assert "the user's line" in frames[-1].line
    assert [note.partition(":")[0] for note in error.__notes__] == notes


def test_stop_iteration_ends_no_stream():
    """A StopIteration that forward raises becomes a RuntimeError at its batch's position."""
    outputs = []
    with (
        parallel(lambda x: next(iter(())) if x[0] == 3 else x, TWO) as p,
        pytest.raises(RuntimeError, match="Stop"),
    ):
        outputs.extend(output.item() for output in p.map(torch.arange(6.0).split(1)))
    assert outputs == [0, 1, 2]


def test_type_errors_name_batch_forms():
    """A list is one argument, and a dict is keyword arguments."""
    batch = [torch.ones(2), torch.ones(2)]
    with parallel(lambda x, y: y + 1, TWO) as p:
        for wrong, cure in (
            (batch, "prepare=tuple"),
            ({"a": batch}, "prepare=lambda batch: (batch,)"),
        ):
            with pytest.raises(TypeError) as caught:
                list(p.map([wrong]))
            assert cure in caught.value.__notes__[-1]
        assert next(p.map([batch], prepare=tuple)).tolist() == [2, 2]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize(
    ("devices", "lanes"), [(["cpu:0", torch.device("cpu", 0)], 2), (3, 3), (None, 1), ("auto", 1)]
)
def test_devices_of_cpu_lanes(devices, lanes):
    """A number counts lanes. Without an accelerator, the default is one lane: the plain call."""
    block = parallel(nn.Linear(4, 3), devices)
    assert block.devices == (torch.device("cpu"),) * lanes

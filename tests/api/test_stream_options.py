"""The options of `map`, and streams of a method that `methods` names."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import ClassVar

import pytest
import torch
from torch import nn

from parawrap import SessionError, ShardError, parallel
from parawrap.lanes import here

TWO = ["cpu"] * 2


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


def first_values(outputs):
    return [output[0].item() for output in outputs]


class Coder(nn.Module):
    """A model with several methods, which add different numbers."""

    def forward(self, x):
        return x + 1

    def encode(self, x):
        return x + 10

    def decode(self, x, *, scale=1):
        return x * scale - 10


# -- methods


def test_map_submit_and_the_call_run_the_only_method_that_methods_names():
    """They do not run `forward`."""
    with parallel(Coder(), TWO, methods=("encode", "encode")) as p:  # a name that stands twice is one method
        assert first_values(p.map(batches(3))) == [10, 11, 12]
        assert p.submit(torch.zeros(2, 1)).result(20).tolist() == [[10], [10]]
        assert p(torch.zeros(3, 1)).tolist() == [[10]] * 3


@pytest.mark.parametrize("use", [lambda p: p.map([]), lambda p: p.submit(torch.zeros(2)), lambda p: p(torch.zeros(2))])
def test_several_methods_are_not_chosen_from_silently(use):
    """With several methods, `map`, `submit`, and the call raise an error that shows how to choose."""
    with (
        parallel(Coder(), TWO, methods=("encode", "decode")) as p,
        pytest.raises(ShardError, match=r"p\.method\('encode'\)"),
    ):
        use(p)


def test_each_of_several_methods_has_its_own_map_submit_and_call():
    """`p.method(name)` chooses."""
    with parallel(Coder(), TWO, methods=("forward", "encode", "decode")) as p:
        assert first_values(p.method("forward").map(batches(3))) == [1, 2, 3]
        assert first_values(p.method("encode").map(batches(3))) == [10, 11, 12]
        assert p.method("decode").submit(torch.ones(2, 1), scale=3).result(20).tolist() == [[-7], [-7]]
        assert p.method("decode")(torch.ones(9, 1), scale=3).tolist() == [[-7]] * 9
        assert p.stats().shards == (5, 4)  # a call is cut
        assert repr(p.method("decode")) == f"{p!r}.method('decode')"


def test_a_stream_of_forward_runs_hooks_as_a_call_of_the_module_does():
    """`forward` in a stream is the call of the module."""
    model = Coder()
    model.register_forward_hook(lambda module, args, output: output * 2)
    with parallel(model, TWO) as p:
        assert first_values(p.method("forward").map(batches(2))) == [2, 4]


def test_a_method_that_is_not_named_is_refused():
    """The error shows where to name it."""
    with parallel(Coder(), TWO) as p, pytest.raises(ShardError, match=r"methods=\(\.\.\., 'encode'\)"):
        p.method("encode")


def test_a_function_has_no_methods():
    """`methods` and `method` need a module."""
    with pytest.raises(ShardError, match="the target is a builtin_function_or_method"):
        parallel(torch.tanh, TWO, methods=("encode",))
    with parallel(torch.tanh, TWO) as p, pytest.raises(ShardError, match="not a module"):
        p.method("forward")


# -- prepare


def test_prepare_runs_in_the_lane_and_returns_the_arguments():
    """A list batch becomes the arguments of the model, and the lanes compute them."""
    lanes = set()

    def tokenized(batch):
        lanes.add(here.lane.index)
        both.wait(20)
        return {"x": torch.tensor(batch), "scale": 2}

    both = threading.Barrier(2)
    with parallel(Coder(), TWO, methods=("decode",)) as p:
        outputs = list(p.map([[1.0, 2.0], [3.0], [4.0], [5.0]], prepare=tokenized))
        assert sum(lane.rows for lane in p.stats().lanes) == 5
    assert [output.tolist() for output in outputs] == [[-8, -6], [-4], [-2], [0]]
    assert lanes == {0, 1}


def test_prepare_tuple_spreads_the_lists_of_a_data_loader():
    """`prepare=tuple` is the cure that the error for list batches names."""
    loader = torch.utils.data.DataLoader([(torch.ones(3), torch.tensor(2.0))] * 4, batch_size=2)
    with parallel(lambda x, y: x * y[:, None], TWO) as p:
        assert [output.tolist() for output in p.map(loader, prepare=tuple)] == [[[2.0] * 3] * 2] * 2
        with pytest.raises(TypeError) as caught:
            list(p.map(loader))
    assert any("prepare=tuple" in each and "list of 2 items" in each for each in caught.value.__notes__)


def test_prepare_may_use_other_batches_than_values_of_tensors():
    """A batch may be any object: only the prepared arguments are cut rules' business."""

    class Sample:
        def __init__(self, value):
            self.tensors = [torch.full((2, 1), value)]

    with parallel(Coder(), TWO) as p:
        assert first_values(p.map(map(Sample, (1.0, 2.0)), prepare=lambda sample: sample.tensors[0])) == [2, 3]


def test_prepare_runs_in_plain_calls_too():
    """A stream that a lane reads runs in that lane, with the same outputs."""

    def in_a_lane(x):
        return torch.cat(list(inner.map([x, x], prepare=lambda batch: batch + 1)))

    inner = parallel(lambda x: x + 1, TWO)
    with inner, parallel(in_a_lane, TWO) as p, torch.no_grad():
        assert p.submit(torch.zeros(1, 1)).result(20).tolist() == [[2], [2]]


def test_an_error_in_prepare_names_the_lane_and_the_batch():
    """`prepare` fails like the model does."""
    with parallel(Coder(), TWO) as p, pytest.raises(KeyError) as caught:
        list(p.map([{"a": 1}], prepare=lambda batch: batch["x"]))
    assert caught.value.__notes__ == ["in lane 0 on cpu", "in batch 0 of the stream, counted from 0"]


def test_prepare_must_be_callable():
    """The error comes at the call of `map`."""
    with parallel(Coder(), TWO) as p, pytest.raises(ShardError, match="prepare='tuple' is not callable"):
        p.map([], prepare="tuple")


# -- with_inputs


def test_with_inputs_yields_each_batch_with_its_output():
    """The batch is the object that the source gave, before `prepare`."""
    source = [[1.0], [2.0], [3.0]]
    with parallel(Coder(), TWO) as p:
        pairs = list(p.map(source, prepare=torch.tensor, with_inputs=True))
    assert [output.item() for _, output in pairs] == [2, 3, 4]
    assert all(batch is given for (batch, _), given in zip(pairs, source, strict=True))


def test_a_shuffled_loader_gives_pairs_that_belong_together():
    """A second iteration of the loader would have another order."""
    loader = torch.utils.data.DataLoader(torch.arange(32.0)[:, None], batch_size=4, shuffle=True)
    with parallel(Coder(), TWO) as p:
        for batch, output in p.map(loader, with_inputs=True):
            assert torch.equal(output, batch + 1)


def test_without_with_inputs_a_batch_is_freed_once_its_output_is_yielded():
    """A stream of large batches keeps no batch that is done."""
    alive = []

    def made(value):
        batch = torch.full((2, 1), value)
        alive.append(weakref.ref(batch))
        return batch

    with parallel(Coder(), ["cpu"]) as p:
        for index, _ in enumerate(p.map(map(made, range(6)), buffersize=1)):
            gc.collect()
            assert [ref() for ref in alive[: index + 1]] == [None] * (index + 1)


# -- return_exceptions and the number of a batch


class RefusedError(ValueError):
    """An exception that a weak reference may point to."""


def fails_for(*values):
    def target(x):
        if x[0].item() in values:
            raise RefusedError
        return x

    return target


@pytest.mark.parametrize("ordered", [True, False])
def test_return_exceptions_yields_an_exception_in_place_of_its_batch(ordered):
    """The stream goes on behind it, and each exception has the number of its batch."""
    with parallel(fails_for(1, 4), TWO) as p:
        pairs = list(p.map(batches(6), return_exceptions=True, with_inputs=True, ordered=ordered))
    by_batch = {batch[0].item(): output for batch, output in pairs}
    assert len(pairs) == 6
    for value in (1, 4):
        assert isinstance(by_batch[value], ValueError)
        assert by_batch[value].__notes__[-1] == f"in batch {value} of the stream, counted from 0"
    for value in (0, 2, 3, 5):
        assert by_batch[value][0].item() == value


def test_return_exceptions_covers_batches_that_the_model_cannot_take():
    """A batch that cannot be given to the model is one failed batch, wherever that shows."""

    class Unknown:
        def __init__(self):
            self.held = torch.ones(2)

    with parallel(Coder(), TWO) as p:
        good, bad, last = p.map([torch.zeros(1, 1), {"y": 1}, torch.zeros(1, 1)], return_exceptions=True)
    assert isinstance(bad, TypeError)
    assert good.item() == last.item() == 1


def test_an_exception_that_is_yielded_keeps_no_output_alive():
    """Neither the stream nor its frames refer to an exception that the user dropped."""
    with parallel(fails_for(0), TWO) as p:
        gc.collect()
        gc.disable()
        try:
            refs = [weakref.ref(each) for each in p.map(batches(1), return_exceptions=True)]
            assert refs[0]() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("return_exceptions", [True, False])
def test_an_error_of_the_source_ends_the_stream_and_names_the_batch(return_exceptions):
    """All earlier outputs come first. A source that raised cannot give further batches."""

    def source():
        yield from batches(3)
        raise OSError("disk")

    outputs = []
    with parallel(Coder(), TWO) as p, pytest.raises(OSError, match="disk") as caught:
        outputs.extend(p.map(source(), return_exceptions=return_exceptions))
    assert first_values(outputs) == [1, 2, 3]
    assert caught.value.__notes__ == ["while batch 3 of the stream was read, counted from 0"]


def test_return_exceptions_does_not_hide_the_end_of_the_block():
    """A closed block fails every further batch, so the stream raises."""
    with parallel(Coder(), TWO) as p:
        stream = p.map(batches(50), return_exceptions=True)
        next(stream)
    with pytest.raises(SessionError):
        list(stream)


# -- ordered


def test_unordered_outputs_come_as_they_finish():
    """A slow batch does not hold back later ones, and each output comes once."""
    release = threading.Event()

    def target(x):
        if x[0].item() == 0:
            release.wait(20)
        return x

    seen = []
    with parallel(target, TWO) as p:
        for output in p.map(batches(8), ordered=False):
            seen.append(output[0].item())
            if len(seen) == 7:
                release.set()
    assert seen[-1] == 0
    assert sorted(seen) == list(range(8))


def test_closing_an_unordered_stream_drops_what_has_not_started():
    """As with an ordered stream: the batches that run finish, and the others never start."""
    ran, release = [], threading.Event()

    def target(x):
        ran.append(x[0].item())
        if x[0].item() > 0:
            release.wait(20)
        return x

    with parallel(target, ["cpu", "cpu"]) as p:
        stream = p.map(batches(30), ordered=False, buffersize=20)
        assert next(stream)[0].item() == 0
        stream.close()
        release.set()
    assert len(ran) <= 3


# -- reading ahead


@pytest.mark.parametrize("ordered", [True, False])
def test_the_source_is_read_while_lanes_compute(ordered):
    """The next batch is read while the last one runs: here, a batch ends only when the next one was read."""
    read = [threading.Event() for _ in range(6)]

    def target(x):
        following = int(x[0].item()) + 1
        assert following == len(read) or read[following].wait(20)
        return x

    def source():
        for index, batch in enumerate(batches(6)):
            read[index].set()
            yield batch

    with parallel(target, TWO) as p:
        assert sorted(first_values(p.map(source(), ordered=ordered, buffersize=2))) == list(range(6))


# -- total and desc


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
        (iter(batches(3)), {"total": 3, "desc": "embed"}, 3, "embed"),
    ],
    ids=["sized", "unknown", "given"],
)
def test_the_bar_has_the_given_total_and_text(monkeypatch, source, options, total, desc):
    """`len(batches)` is the total by default."""
    tqdm = pytest.importorskip("tqdm.auto")
    monkeypatch.setattr(tqdm, "tqdm", Bar)
    Bar.made.clear()
    with parallel(Coder(), TWO) as p:
        assert first_values(p.map(source, progress=True, **options)) == [1, 2, 3]
    (bar,) = Bar.made
    assert (bar.total, bar.desc, bar.unit, bar.count, bar.closed) == (total, desc, "batch", 3, True)
    assert bar.speeds


def test_errors_of_a_stream_inside_a_lane_are_freed_without_the_collector():
    """The future of a plain run, its error, and the frames of the traceback are not a cycle."""
    inputs, alive = [], []

    def source():
        for batch in batches(10):
            inputs.append(weakref.ref(batch))
            yield batch
            del batch

    def fail(x):
        if len(x) != 3:
            raise ValueError
        return x

    with torch.no_grad(), parallel(fail, TWO) as p:

        def nested(batch):
            for error in p.map(source(), return_exceptions=True):
                assert isinstance(error, ValueError)
                del error
            alive.append(sum(made() is not None for made in inputs))
            return batch

        gc.collect()
        gc.disable()
        try:
            list(p.map(batches(1, rows=3), prepare=nested))
        finally:
            gc.enable()
    assert alive == [0]

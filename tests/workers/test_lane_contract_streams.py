"""The contract of lanes, over each kind of lanes: whole calls of `map` and `submit`, and the values that they take."""

from __future__ import annotations

import datetime as dt
import enum
import os
from collections import Counter, deque, namedtuple
from concurrent.futures import CancelledError
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import rnn
from torch.testing import assert_close

from parawrap import ResumeError, SessionError, ShardError, UnsendableError
from tests.workers.lanes_of_every_kind import assert_same, every_kind, in_threads_alone  # noqa: F401

Point = namedtuple("Point", ["x", "y"])


class Color(enum.Enum):
    RED = 1


class Gate:
    """Blocks calls of `wait_at` in any process, until the test opens it. Leaving the ``with`` block opens it for all."""

    def __init__(self, folder):
        self.paths = folder / "started", folder / "opened"
        self._files = []

    def __enter__(self):
        for path in self.paths:
            os.mkfifo(path)
            self._files.append(os.open(path, os.O_RDWR))
        return self

    def __exit__(self, *error):
        self.open(100)

    def close(self):
        for file in self._files:
            os.close(file)

    def wait_for(self, calls):
        """Wait until so many calls have started."""
        while calls > 0:
            calls -= len(os.read(self._files[0], calls))

    def open(self, calls):
        """Let so many calls go on."""
        os.write(self._files[1], b"x" * calls)


def wait_at(paths):
    started, opened = paths
    with started.open("wb", buffering=0) as file:
        file.write(b"x")
    with opened.open("rb", buffering=0) as file:
        file.read(1)


@pytest.fixture
def gate(tmp_path):
    """A closed gate."""
    gate = Gate(tmp_path)
    yield gate
    gate.close()


class Gated(nn.Module):
    """Waits at a gate before it returns its input."""

    def __init__(self, paths):
        super().__init__()
        self.paths = paths

    def forward(self, x):
        wait_at(self.paths)
        return x


class Recording(nn.Module):
    """Doubles its input, and writes each number that it gets to a file. Fails once on a number."""

    def __init__(self, folder, failing=None):
        super().__init__()
        self.folder = folder
        self.failing = failing

    def forward(self, x):
        with (self.folder / "computed").open("a") as file:
            file.write(f"{int(x[0])}\n")
        if self.failing is not None and int(x[0]) == self.failing:
            raise LookupError(f"batch of {self.failing}")
        return x * 2


def computed(folder):
    """How often each number was computed."""
    return Counter(map(int, (folder / "computed").read_text().split()))


def numbers(count, rows=2):
    return [torch.full((rows, 1), float(number)) for number in range(count)]


def firsts(outputs):
    return [int(output[0]) for output in outputs]


class OnlyIn:
    """An object that can be unpickled only in the process that made it."""

    def __init__(self):
        self.home = os.getpid()

    def __reduce__(self):
        return _only_in, (self.home,)


def _only_in(home):
    if os.getpid() != home:
        raise LookupError("not at home")
    return OnlyIn()


def echo(*args, **kwargs):
    return args, kwargs


def double(x):
    return x * 2


def fail_on_three(x):
    if int(x[0]) == 3:
        raise LookupError("three")
    return x


in_chunks = pytest.mark.parametrize("chunksize", [1, 4])


# -- order and batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("buffersize", "chunksize"), [(1, 1), (2, 1), (50, 1), (4, 4), (9, 4), (None, 7)])
def test_outputs_are_in_order(lanes, buffersize, chunksize):
    """`map` yields one output per batch in the order of the batches, also a short last one."""
    model, batches = nn.Linear(4, 3), torch.randn(61, 4).split(4)
    expected = [model(batch) for batch in batches]
    with lanes(model) as p:
        assert_same(list(p.map(batches, buffersize=buffersize, chunksize=chunksize)), expected)
        assert_same(list(p.map(iter(batches), buffersize=buffersize, chunksize=chunksize)), expected)
        assert list(p.map([])) == []


@in_chunks
def test_unordered_outputs_come_once(lanes, chunksize):
    """With ``ordered=False`` each output is yielded once, with its own input."""
    batches = numbers(30)
    with lanes(double) as p:
        pairs = list(p.map(batches, ordered=False, with_inputs=True, chunksize=chunksize))
    assert sorted(firsts(batch for batch, _ in pairs)) == list(range(30))
    assert all(torch.equal(output, batch * 2) for batch, output in pairs)


def test_unordered_output_does_not_wait_for_a_slow_batch(lanes, gate):
    """A blocked batch does not hold back the others."""

    def run(x, *, paths=gate.paths):
        if int(x[0]) == 0:
            wait_at(paths)
        return x

    with lanes(run) as p, gate:
        stream = p.map(numbers(4), ordered=False, buffersize=2)
        assert firsts([next(stream), next(stream), next(stream)]) == [1, 2, 3]
        gate.open(1)
        assert firsts(stream) == [0]


def test_source_is_read_at_most_buffersize_ahead(lanes):
    """`map` reads nothing before the first `next`, and then at most `buffersize` batches ahead."""
    read = []

    def source():
        for number in range(9):
            read.append(number)
            yield torch.full((2, 1), float(number))

    for buffersize, chunksize in ((1, 1), (3, 1), (3, 2), (3, 3)):
        read.clear()
        with lanes(double) as p:
            stream = p.map(source(), buffersize=buffersize, chunksize=chunksize)
            assert read == []
            for done, _ in enumerate(stream):
                assert len(read) <= done + 1 + buffersize


def test_forms_of_batches(lanes):
    """A tuple is spread, a dict becomes keywords, anything else is one argument."""
    x, y = torch.randn(3, 2), torch.randn(3, 2)
    packed = rnn.pack_sequence([torch.randn(3, 3), torch.randn(2, 3)])
    batches = [(x, y), {"x": x, "y": y}, x, [x, y], "text", None, 3, {1: x}, Point(x, y), (), packed]
    expected = [
        ((x, y), {}),
        ((), {"x": x, "y": y}),
        *(((batch,), {}) for batch in batches[2:8]),
        ((x, y), {}),
        ((), {}),
        ((packed,), {}),
    ]
    with lanes(echo) as p:
        assert_same(list(p.map(batches)), expected)


@in_chunks
def test_prepare_computes_the_arguments_in_the_lane(lanes, chunksize):
    """`prepare` returns a tuple, a dict, or one argument, and may be any function."""
    offset = torch.tensor(5.0)
    with lanes(echo) as p:
        for prepare, expected in (
            (lambda batch: (batch["x"] + offset, 1), ((torch.tensor([6.0]), 1), {})),
            (lambda batch: {"y": batch["x"] * 2}, ((), {"y": torch.tensor([2.0])})),
            (lambda batch: batch["x"], ((torch.tensor([1.0]),), {})),
        ):
            assert_same(list(p.map([{"x": torch.ones(1)}] * 5, prepare=prepare, chunksize=chunksize)), [expected] * 5)


@in_chunks
def test_prepare_reads_what_the_caller_changed(lanes, chunksize):
    """A later stream has the function's values of that moment, also those of the same function object."""
    table = {"offset": 1.0}

    def prepare(batch):
        return batch + table["offset"]

    with lanes(double) as p:
        assert firsts(p.map(numbers(3), prepare=prepare, chunksize=chunksize)) == [2, 4, 6]
        table["offset"] = 10.0
        assert firsts(p.map(numbers(3), prepare=prepare, chunksize=chunksize)) == [20, 22, 24]


def test_with_inputs_yields_the_batch_of_the_source(lanes):
    """The batch is the object that the source gave, before `prepare`."""
    batches = numbers(6)
    with lanes(double) as p:
        for batch, (given, output) in zip(batches, p.map(batches, with_inputs=True, prepare=lambda x: x + 1), strict=True):
            assert given is batch
            assert_close(output, (batch + 1) * 2)


def test_stream_of_a_bound_method_and_of_keywords(lanes):
    """Streams run bound methods, and `submit` takes keywords."""
    linear, x = nn.Linear(4, 2), torch.randn(5, 4)
    with lanes(linear.forward) as p:
        assert_close(p.submit(input=x).result(), linear(x))
        assert_same(list(p.map([{"input": x}, x])), [linear(x)] * 2)


def test_streams_at_once(lanes):
    """Two streams of one block, and calls between their outputs, do not mix."""
    with lanes(double) as p:
        for one, other in zip(p.map(numbers(20)), p.map(numbers(20, rows=3)), strict=True):
            assert one.shape == (2, 1)
            assert other.shape == (3, 1)
            assert int(one[0]) == int(other[0])
            assert firsts([p(torch.full((5, 1), 3.0))]) == [6]


# -- errors ----------------------------------------------------------------------------------------------------------------


@in_chunks
def test_error_of_the_source_is_raised_after_earlier_outputs(lanes, chunksize):
    """The outputs of the batches before the error are yielded first."""

    def source():
        yield from numbers(5)
        raise LookupError("no more")

    outputs = []
    with lanes(double) as p:
        for options in ({}, {"return_exceptions": True}):
            outputs.clear()
            with pytest.raises(LookupError, match="no more"):
                outputs.extend(p.map(source(), **options, chunksize=chunksize))
            assert firsts(outputs) == [0, 2, 4, 6, 8]


@pytest.mark.parametrize(("buffersize", "chunksize"), [(1, 1), (20, 1), (20, 5)])
def test_error_of_the_model_names_the_batch(lanes, buffersize, chunksize):
    """The error is raised in the batch's place, with its number and its lane in notes. The block stays usable."""
    outputs = []
    with lanes(fail_on_three) as p:
        with pytest.raises(LookupError, match="three") as caught:
            outputs.extend(p.map(numbers(9), buffersize=buffersize, chunksize=chunksize))
        notes = "\n".join(caught.value.__notes__)
        assert "batch 3" in notes
        assert "lane" in notes
        assert "on cpu" in notes
        assert firsts(outputs) == [0, 1, 2]
        assert firsts(p.map(numbers(3))) == [0, 1, 2]


@in_chunks
def test_return_exceptions_goes_on(lanes, chunksize):
    """The exception takes the place of the output, with the number of its batch, also one from `prepare`."""

    def prepare(x):
        if int(x[0]) == 6:
            raise KeyError("six")
        return x

    with lanes(fail_on_three) as p:
        outputs = list(p.map(numbers(9), return_exceptions=True, prepare=prepare, chunksize=chunksize))
    kinds = [type(output) for output in outputs]
    expected = [torch.Tensor] * 9
    expected[3], expected[6] = LookupError, KeyError
    assert kinds == expected
    assert [any(f"batch {number}" in note for note in outputs[number].__notes__) for number in (3, 6)] == [True] * 2
    assert firsts(outputs[4:6] + outputs[7:]) == [4, 5, 7, 8]


def test_stop_iteration_does_not_end_the_stream(lanes):
    """StopIteration of the model is an error, never a short stream."""

    def stop(x):
        if int(x[0]) == 2:
            raise StopIteration("two")
        return x

    with lanes(stop) as p, pytest.raises(RuntimeError, match="StopIteration"):
        list(p.map(numbers(5)))


@in_chunks
def test_value_that_cannot_be_sent_fails_one_batch(lanes, chunksize):
    """A generator as a batch or as an output is one error with its address, where it has to leave the process."""

    def run(x, *, extra=None):
        return (x, (each for each in ())) if int(x[0]) == 1 else x

    batches = numbers(4)
    batches[2] = {"x": batches[2], "extra": (each for each in ())}
    with lanes(run) as p:
        outputs = list(p.map(batches, return_exceptions=True, chunksize=chunksize))
        assert firsts([outputs[0], outputs[3]]) == [0, 3]
        if lanes.name == "thread":
            assert int(outputs[2][0]) == 2
            return
        for output, address in ((outputs[1], "output"), (outputs[2], "extra")):
            assert isinstance(output, UnsendableError)
            assert address in str(output)
        assert firsts(p.map(numbers(2, rows=3)[:1])) == [0]


def test_argument_that_cannot_be_unpickled_fails_one_call(lanes):
    """An error of the user's class while an argument is unpickled is the error of that call. Workers go on."""
    x, pids = torch.ones(2), set()
    with lanes(lambda x, extra=None: (x, os.getpid())) as p:
        for number in range(24):
            if number % 4 == 2:
                error = p.submit(x, OnlyIn()).exception(20)
                assert lanes.name == "thread" or isinstance(error, LookupError)
            else:
                pids.add(p.submit(x).result(20)[1])
    assert len(pids) <= 2


def test_output_that_cannot_be_unpickled_fails_one_call(lanes):
    """An error of the user's class while an output is unpickled is the error of that call. Workers go on."""
    x, pids = torch.ones(2), set()
    with lanes(lambda x, fail=False: OnlyIn() if fail else (x, os.getpid())) as p:
        for number in range(24):
            if number % 4 == 2:
                error = p.submit(x, fail=True).exception(20)
                assert lanes.name == "thread" or isinstance(error, LookupError)
            else:
                pids.add(p.submit(x).result(20)[1])
    assert len(pids) <= 2


def test_batch_or_output_that_cannot_be_unpickled_fails_alone_in_its_chunk(lanes):
    """The other batches of the chunk have their outputs."""
    batches = [(x, OnlyIn()) if index == 1 else x for index, x in enumerate(numbers(8))]
    with lanes(lambda x, extra=None: OnlyIn() if int(x[0]) == 6 else x) as p:
        outputs = list(p.map(batches, chunksize=4, return_exceptions=True))
    whole = [0, *range(2, 6), 7]
    assert firsts(outputs[number] for number in whole) == whole
    if lanes.name != "thread":
        assert [type(outputs[number]) for number in (1, 6)] == [LookupError] * 2


def test_output_of_a_chunk_is_that_of_its_moment(lanes):
    """A model may write every output into the same memory, as long as the caller reads one before the next is computed."""

    class Reusing(nn.Module):
        def forward(self, x):
            memory.copy_(x)
            return memory

    memory = torch.zeros(2, 1)
    with lanes(Reusing()) as p:
        for number, output in enumerate(p.map(numbers(9), chunksize=3, buffersize=3)):
            assert lanes.name == "thread" or int(output[0]) == number


def test_wrong_options_are_refused_at_the_call(lanes):
    """`map` raises at the call, not at the first output."""
    with lanes(double) as p:
        with pytest.raises(ShardError, match="buffersize=0"):
            p.map([], buffersize=0)
        with pytest.raises(ShardError, match="chunksize=0"):
            p.map([], chunksize=0)
        with pytest.raises(ShardError, match="buffersize=3 has no room for chunksize=4"):
            p.map([], buffersize=3, chunksize=4)
        with pytest.raises(ShardError, match="prepare=3"):
            p.map([], prepare=3)


# -- ends ------------------------------------------------------------------------------------------------------------------


def test_closed_stream_drops_batches_that_have_not_started(lanes, tmp_path, gate):
    """After close() of the generator, batches that wait for a lane never run."""

    def run(x, *, paths=gate.paths, folder=tmp_path):
        with (folder / "computed").open("a") as file:
            file.write(f"{int(x[0])}\n")
        if 0 < int(x[0]) < 50:
            wait_at(paths)
        return x

    with lanes(run) as p, gate:
        stream = p.map(numbers(40), buffersize=20)
        assert firsts([next(stream)]) == [0]
        gate.wait_for(2)  # both lanes are blocked
        stream.close()
        gate.open(30)
        assert firsts([p.submit(torch.full((1, 1), 99.0)).result()]) == [99]
    assert len(computed(tmp_path)) < 10


def test_block_is_usable_after_a_break(lanes):
    """A `break` in the loop closes the generator."""
    with lanes(double) as p:
        for _ in p.map(numbers(50)):
            break
        assert firsts(p.map(numbers(5))) == [0, 2, 4, 6, 8]
        assert_close(p(torch.ones(9, 1)), torch.full((9, 1), 2.0))


def test_stream_ends_with_its_block(lanes):
    """Reading a stream after its block raises SessionError."""
    with lanes(double) as p:
        stream = p.map(numbers(30), buffersize=2)
        next(stream)
    with pytest.raises(SessionError):
        list(stream)


def test_queued_call_is_cancelled(lanes, gate):
    """A cancelled call that waits for a lane never runs, and the others do."""
    with lanes(Gated(gate.paths)) as p, gate:
        futures = [p.submit(batch) for batch in numbers(8)]
        gate.wait_for(2)
        assert futures[-1].cancel()
        assert not futures[0].cancel()
        gate.open(8)
        assert firsts(future.result() for future in futures[:-1]) == list(range(7))
        with pytest.raises(CancelledError):
            futures[-1].result()


@in_threads_alone("a call that was sent cannot be taken back")
def test_call_behind_a_running_one_is_cancelled(lanes, gate):
    """A call that has not started can be cancelled, also the next one of a lane."""
    with lanes(Gated(gate.paths)) as p, gate:
        futures = [p.submit(batch) for batch in numbers(3)]
        gate.wait_for(2)
        assert futures[2].cancel()


def test_exception_in_the_block_cancels_queued_calls(lanes, gate):
    """Calls that have not started never run. The exception leaves the block."""
    with pytest.raises(KeyError), lanes(Gated(gate.paths)) as p, gate:  # noqa: PT012
        futures = [p.submit(batch) for batch in numbers(12)]
        gate.wait_for(2)
        for future in futures[4:]:
            future.cancel()
        raise KeyError
    with pytest.raises((CancelledError, SessionError)):
        futures[-1].result()


def test_block_waits_for_its_calls(lanes):
    """The end of a block runs what was submitted before."""
    with lanes(double) as p:
        futures = [p.submit(batch) for batch in numbers(20)]
    assert firsts(future.result() for future in futures) == list(range(0, 40, 2))


def test_callback_submits_further_calls(lanes):
    """A callback of a future that submits another call does not deadlock."""
    further = SimpleQueue()
    with lanes(double) as p:
        for batch in numbers(6):
            p.submit(batch).add_done_callback(lambda done: further.put(p.submit(done.result())))
        assert sorted(firsts(further.get().result() for _ in range(6))) == [0, 4, 8, 12, 16, 20]


# -- resume ----------------------------------------------------------------------------------------------------------------


def test_interrupted_stream_goes_on(lanes, tmp_path):
    """Outputs that were read are not computed again; the second run yields all outputs in order."""
    folder = tmp_path / "outputs"
    with lanes(Recording(tmp_path)) as p:
        stream = p.map(numbers(9), resume=folder, buffersize=1)
        assert firsts(next(stream) for _ in range(4)) == [0, 2, 4, 6]
        stream.close()
    with lanes(Recording(tmp_path)) as p:
        assert firsts(p.map(numbers(9), resume=folder)) == list(range(0, 18, 2))
        counts = computed(tmp_path)
        assert [counts[number] for number in range(4)] == [1] * 4
        assert firsts(p.map(numbers(9), resume=folder, ordered=False)) == list(range(0, 18, 2))
    assert computed(tmp_path) == counts


def test_failed_batch_is_computed_by_the_next_run(lanes, tmp_path):
    """A run that failed goes on after the fault is mended, in another block."""
    folder = tmp_path / "outputs"
    with lanes(Recording(tmp_path, failing=3)) as p, pytest.raises(LookupError, match="batch of 3"):
        list(p.map(numbers(6), resume=folder, buffersize=1))
    with lanes(Recording(tmp_path)) as p:
        assert firsts(p.map(numbers(6), resume=folder)) == list(range(0, 12, 2))
    assert computed(tmp_path) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 1}


def test_changed_source_is_refused(lanes, tmp_path):
    """Another order of the batches is another source."""
    with lanes(double) as p:
        list(p.map(numbers(4), resume=tmp_path / "outputs"))
        with pytest.raises(ResumeError, match="batch 0"):
            list(p.map(numbers(4)[::-1], resume=tmp_path / "outputs"))


@pytest.mark.parametrize(
    "options", [{"chunksize": 2}, {"ordered": False}, {"with_inputs": True}, {"return_exceptions": True}]
)
def test_key_names_batches(lanes, tmp_path, options):
    """The key is compared in place of the batch. Saved outputs are not computed again, with any options."""
    with lanes(Recording(tmp_path)) as p:
        for _ in range(2):
            outputs = p.map(
                numbers(5), resume=tmp_path / "outputs", key=lambda batch: f"batch {batch[0].item()}", **options
            )
            if "with_inputs" in options:
                outputs = (output for _, output in outputs)
            assert sorted(firsts(outputs)) == [0, 2, 4, 6, 8]
        with pytest.raises(ResumeError, match="batch 0 is not the batch that"):
            list(p.map(numbers(5), resume=tmp_path / "outputs", key=lambda _: "another batch"))
    assert computed(tmp_path) == dict.fromkeys(range(5), 1)


# -- values ----------------------------------------------------------------------------------------------------------------


def expanded():
    return torch.randn(1, 3).expand(5, 3)


def inference():
    with torch.inference_mode():
        return torch.ones(5, 3)


def with_attribute():
    tensor = torch.randn(5, 3)
    tensor.note = "kept"
    return tensor


TENSORS = {
    "plain": lambda: torch.randn(5, 3),
    "large": lambda: torch.randn(5, 300_000),
    "step": lambda: torch.arange(100.0).view(10, 10)[::2, 3:5],
    "transposed": lambda: torch.randn(3, 5).T,
    "expanded": expanded,
    "channels last": lambda: torch.randn(5, 3, 4, 4).to(memory_format=torch.channels_last),
    "bfloat16": lambda: torch.randn(5, 3).bfloat16(),
    "float16": lambda: torch.randn(5, 3).half(),
    "complex": lambda: torch.randn(5, 3, dtype=torch.complex64),
    "bool": lambda: torch.randn(5, 3) > 0,
    "uint8": lambda: torch.arange(15, dtype=torch.uint8).view(5, 3),
    "0-d": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(5, 0),
    "no rows": lambda: torch.empty(0, 3, dtype=torch.int64),
    "nan": lambda: torch.full((5, 3), float("-inf")),
    "inference": inference,
}
ONLY_WHOLE = {
    "conjugate": lambda: torch.randn(5, 3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(5, 3, dtype=torch.complex64).conj().imag,
    "uint16": lambda: torch.arange(15).to(torch.uint16).view(5, 3),
    "float8": lambda: torch.randn(5, 3).to(torch.float8_e4m3fn),
    "sparse": lambda: torch.eye(5).to_sparse(),
    "sparse rows": lambda: torch.eye(5).to_sparse_csr(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(5, 3), 0.1, 0, torch.quint8),
    "parameter": lambda: nn.Parameter(torch.randn(5, 3)),
    "attribute": with_attribute,
}
OTHERS = {
    "numpy": lambda: np.arange(6).reshape(2, 3),
    "numpy strings": lambda: np.array(["a", "bc"]),
    "numpy scalar": lambda: np.float32(1.5),
    "containers": lambda: [(), {}, [], {"a": ({1: None},)}, {1, 2}, frozenset({3}), deque([1])],
    "numbers": lambda: (1, 2.5, True, 3 + 4j, 10**30, float("inf")),
    "bytes": lambda: (b"\\x00\\xff", bytearray(b"ab"), "text\\0é"),
    "enum": lambda: Color.RED,
    "time": lambda: dt.datetime(2020, 1, 2, tzinfo=dt.UTC),
    "torch": lambda: (torch.Size([2, 3]), torch.float16, torch.device("cpu"), torch.strided),
    "range": lambda: (range(3), slice(1, None, 2), ...),
    "path": lambda: Path("a") / "b",
    "function": lambda: (len, os.path.join, torch.relu),
    "class": lambda: (Point, Color, torch.nn.Linear),
}


def facts(tensor):
    """All that describes a tensor except its values."""
    strided = tensor.layout is torch.strided
    return (
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tuple(tensor.shape),
        tensor.stride() if strided and tensor.numel() > 0 else None,
        tensor.requires_grad,
        tensor.is_conj(),
        tensor.is_neg(),
        dict(tensor.__dict__),
    )


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_tensors_of_every_kind_are_arguments_and_outputs(lanes):
    """A whole call gets each tensor as it is, and returns it so: values, dtype, layout, strides, and bits."""
    cases = {name: make() for name, make in (TENSORS | ONLY_WHOLE).items()}
    expected = {name: (facts(tensor), facts(tensor)) for name, tensor in cases.items()}
    found = {}
    with lanes(lambda x: (x, facts(x))) as p:
        for name, tensor in cases.items():
            output, seen = p.submit(tensor).result()
            found[name] = seen, facts(output)
            assert_close(output, tensor, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    assert found == expected


def test_tensors_of_every_kind_are_cut(lanes):
    """A cut call gives the plain output for tensors of each dtype and memory format."""
    cases = {name: make() for name, make in TENSORS.items() if name not in ("large", "0-d")}
    with lanes(lambda x: (x == x, x), out_dims=0) as p:
        for tensor in cases.values():
            assert_same(p(tensor), (tensor == tensor, tensor))


def test_sparse_tensor_is_an_argument_of_a_cut_call(lanes):
    """With None in `in_dims`, each lane gets a sparse tensor whole."""
    x, sparse = torch.randn(9, 5), torch.randn(5, 5).relu().to_sparse()
    with lanes(lambda x, sparse: (sparse @ x.T).T, in_dims={"sparse": None}) as p:
        for _ in range(2):
            assert_close(p(x, sparse), (sparse @ x.T).T)


def test_other_values_are_arguments_and_outputs(lanes):
    """Values without tensors arrive as they are."""
    with lanes(echo) as p:
        for name, make in OTHERS.items():
            ((value,), _) = p.submit(make()).result()
            assert type(value) is type(make()), name
            assert np.array_equal(value, make()) if name.startswith("numpy") else value == make(), name


def test_identity_and_shared_memory_hold_inside_a_call(lanes):
    """A tensor that is given twice is one tensor; two views of one memory share it."""

    def look(one, other, row):
        return one is other, row.data_ptr() == one[1].data_ptr()

    x = torch.randn(5, 3)
    with lanes(look) as p:
        assert p.submit(x, x, x[1]).result() == (True, True)
        assert p.submit(x.clone(), x.clone(), x[1]).result() == (False, False)


def test_identity_and_shared_memory_hold_in_an_output(lanes):
    """As in the plain call."""

    def several(x):
        y = x + 1
        return y, y, y[1]

    with lanes(several) as p:
        one, other, row = p.submit(torch.randn(5, 3)).result()
    assert one is other
    assert row.data_ptr() == one[1].data_ptr()


def test_outputs_are_writable_and_apart(lanes):
    """The caller may write an output; this changes no other output and no later call."""
    with lanes(nn.Linear(4, 4)) as p:
        x = torch.randn(6, 4)
        outputs = [p.submit(x).result() for _ in range(4)]
        expected = outputs[0].clone()
        for output in outputs:
            assert_close(output, expected)
            output.zero_()
        assert_close(p.submit(x).result(), expected)


def test_source_may_overwrite_a_batch_that_is_done(lanes):
    """A source may reuse its buffer once a batch's output was yielded."""
    buffer = torch.zeros(40_000)

    def source():
        for number in range(8):
            buffer.fill_(number)
            yield buffer

    with lanes(double) as p:
        assert firsts(p.map(source(), buffersize=1)) == list(range(0, 16, 2))

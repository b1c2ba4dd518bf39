"""The contract of pools: threads, processes, and Ray actors give the same answers, modes, errors,
and random numbers.

Each pool opens once: the target of `block` calls its first argument, so that each test brings its
own function.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections import namedtuple
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch import nn

from parawrap import SessionError, UnsendableError
from tests.helpers.pools import OnlyHere, over
from tests.helpers.same import assert_same
from tests.helpers.waiting import PATIENCE_S

Pair = namedtuple("Pair", ["left", "right"])


class CustomError(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


def structured(x):
    return {
        "y": x * 2,
        "pair": Pair(x, (None, [x[:, 0]])),
        "items": [f"row {float(row[0]):.3f}" for row in x],
    }


def double(x):
    return x * 2


def noisy(x):
    return x + torch.rand(x.shape)


def refuse_negative(x):
    if bool((x < 0).any()):
        raise ValueError(f"negative row {float(x.min()):.0f}")
    return x


def runs(block, function, x):
    """Return the outputs of a cut call, a submitted call, and a stream."""
    return [block(function, x), block.submit(function, x).result(), *block.map([(function, x)])]


def numbers(count):
    return [torch.full((2, 1), float(number)) for number in range(count)]


def stream(block, function, batches, **options):
    return block.map([(function, batch) for batch in batches], **options)


def firsts(outputs):
    return [int(output[0]) for output in outputs]


@pytest.mark.parametrize("rows", [9, 0, 1])
def test_answers_are_plain(block, rows):
    x = torch.randn(rows, 4)
    assert_same(runs(block, structured, x), [structured(x)] * 3)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of os.fork in a process with threads
def test_forked_child_runs_plainly(block):
    """A forked child runs plainly, also while a thread of the parent is in a plain call. Its end,
    and the end of its block, leave the lanes of the parent alone.
    """
    begun, goes_on = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return x

    x = torch.randn(9, 4)
    pid = block.submit(os.getpid).result()
    another = threading.Thread(target=torch.no_grad()(block), args=(wait, x[:1]))
    another.start()
    assert begun.wait(PATIENCE_S)
    child = os.fork()
    if child == 0:  # os._exit: a child must not run pytest's end
        try:
            signal.alarm(int(PATIENCE_S))  # ends a child that waits
            outputs = [
                block(double, x),
                block.submit(double, x).result(),
                *block.map([(double, x)] * 3),
            ]
            is_plain = all(torch.equal(output, x * 2) for output in outputs)
            block.close()
            os._exit(0 if is_plain else 3)
        finally:
            os._exit(4)
    assert os.waitpid(child, 0)[1] == 0
    goes_on.set()
    another.join()
    assert block.submit(os.getpid).result() == pid
    assert_same(runs(block, double, x), [x * 2] * 3)


@pytest.mark.parametrize("kind", ["process"], indirect=True, scope="module")
@pytest.mark.parametrize("chunksize", [1, 4])
def test_forked_child_reads_no_stream(block, monkeypatch, chunksize):
    """The answers to what was sent before the fork belong to its parent."""
    outputs = stream(block, double, numbers(9), buffersize=8, chunksize=chunksize)
    next(outputs)
    lanes = block._session.lanes
    lanes.wait(lanes.is_idle)
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_process", -1)
        with pytest.raises(SessionError, match="forked child"):
            list(outputs)


@contextmanager
def setting(change, value, before):
    change(value)
    try:
        yield
    finally:
        change(before)


def deterministic():
    return setting(torch.use_deterministic_algorithms, True, False)


MODES = {
    "inference": torch.inference_mode,
    "bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "float16": lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
    "dtype": lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": deterministic,
    "precision": lambda: setting(torch.set_float32_matmul_precision, "medium", "highest"),
    "grad": torch.enable_grad,
}


def seen(x):
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )
    return x, [str(modes)] * len(x)


def test_modes_hold_in_the_lanes(block):
    """Later calls run without them."""
    x = torch.zeros(9, 2)
    for name, mode in MODES.items():
        for around in (mode, nullcontext, mode):
            with around():
                expected, found = seen(x)[1], runs(block, seen, x)
            assert [modes for _, modes in found] == [expected] * 3, name


def test_gradients_or_a_refusal(block, kind):
    """Workers name both ways out."""
    model, x = nn.Linear(2, 2), torch.ones(9, 2)
    said = r"torch\.no_grad.*@wrapper with DistributedDataParallel"
    for call in block, lambda *args: block.submit(*args).result():
        for function, value in ((double, x.clone().requires_grad_()), (lambda x: model(x), x)):
            with (
                torch.enable_grad(),
                nullcontext() if kind == "thread" else pytest.raises(SessionError, match=said),
            ):
                assert call(function, value).requires_grad
    refusal = (
        nullcontext()
        if kind == "thread"
        else pytest.raises(SessionError, match=f"a parameter.*{said}")
    )
    with torch.enable_grad(), refusal, over(kind, model) as p:
        p(x)


@pytest.mark.filterwarnings("ignore:.*use_deterministic_algorithms:UserWarning")
def test_calls_draw_different_numbers(block, kind):
    """Each worker draws from its own generator, and the caller's stays as it is."""
    x, before = torch.ones(9, 3), torch.get_rng_state()
    drawn = torch.cat([*runs(block, noisy, x), *runs(block, noisy, x)])
    assert len(drawn.flatten().unique()) == drawn.numel()
    assert torch.equal(torch.get_rng_state(), before) == (kind != "thread")


def test_seed_gives_the_same_numbers(block, kind):
    """Under deterministic algorithms, lanes continue the caller's numbers one after another.

    Workers cannot.
    """
    x = torch.ones(7, 3)
    torch.manual_seed(5)
    expected = torch.cat([noisy(x[:4]), noisy(x[4:])]), torch.rand(3)
    if kind != "thread":
        with (
            deterministic(),
            pytest.raises(SessionError, match=r"random numbers in a cut call.*Use map or submit"),
        ):
            block(noisy, x)
        return
    with deterministic():
        for _ in range(3):
            torch.manual_seed(5)
            assert_same((block(noisy, x), torch.rand(3)), expected)


def test_error_keeps_its_attributes(block):
    """An error keeps its attributes, its notes, its cause, and its traceback. A note names the lane
    and the shard.
    """

    def fail(x):
        if len(x) == 5:
            return x
        error = CustomError(7)
        error.add_note("a note of the model")
        raise error from KeyError("inner")  # the user's line

    for run, place in (block, "shard 1 of 2"), (lambda *call: block.submit(*call).result(), "lane"):
        with pytest.raises(CustomError, match="code 7") as caught:
            run(fail, torch.ones(9, 2))
        assert caught.value.code == 7
        assert isinstance(caught.value.__cause__, KeyError)
        assert "the user's line" in str(caught.getrepr(style="native"))
        assert "a note of the model" in caught.value.__notes__
        (note,) = [note for note in caught.value.__notes__ if note.startswith("in lane")]
        assert place in note


@pytest.mark.parametrize("error", [KeyboardInterrupt, StopIteration, SystemExit])
def test_exception_is_never_retried(block, tmp_path, error):
    def stop(x, path):
        with path.open("a") as file:
            file.write("x")
        raise error("stopped by the model")

    with pytest.raises(error, match="stopped by the model"):
        block.submit(stop, torch.ones(2), tmp_path / "runs").result(PATIENCE_S)
    assert (tmp_path / "runs").read_text() == "x"
    with pytest.raises(error, match="stopped by the model"):
        block(stop, torch.ones(9), tmp_path / "runs")
    assert_same(runs(block, double, torch.ones(9)), [torch.full((9,), 2.0)] * 3)


def test_warning_appears_once(block):
    """A warning appears once, as in the plain call, under the filters of the caller, in whichever
    lanes the line runs.
    """

    def warn(x):
        warnings.warn("of the model", stacklevel=1)
        return x

    x = torch.ones(9, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            runs(block, warn, x)
    assert [str(each.message) for each in caught] == ["of the model"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="of the model") as raised:
            block(warn, x)
    assert [note for note in raised.value.__notes__ if note.startswith("in lane 0 on cpu")]


def test_writes_into_the_model_warn_once(kind):
    """One warning names a write into the model, in whichever lanes it runs, at the user's line."""

    class Noting(nn.Linear):
        def forward(self, x):
            self.seen = len(x)
            return super().forward(x)

    x = torch.ones(9, 2)
    with warnings.catch_warnings(record=True) as caught, over(kind, Noting(2, 2).eval()) as p:
        warnings.simplefilter("always")
        for _ in range(2):
            p(x)
            p.submit(x).result()
            list(p.map([x, x]))
    (warning,) = caught
    assert str(warning.message).startswith("the model wrote 'seen' during a call")
    assert warning.filename == __file__


@pytest.mark.parametrize("chunksize", [1, 4])
def test_value_that_cannot_travel(block, kind, chunksize):
    """A value that cannot travel fails its own batch, and the workers go on.

    The error of a pickle names its place. Threads take any value.
    """

    def run(x, *, extra=None):
        return {1: (x, (each for each in ())), 2: OnlyHere()}.get(int(x[0]), x)

    batches = [{"function": run, "x": x} for x in numbers(6)]
    batches[3]["extra"], batches[4]["extra"] = (each for each in ()), OnlyHere()
    outputs = list(block.map(batches * 2, return_exceptions=True, chunksize=chunksize))
    assert firsts(outputs[number] for number in (0, 5, 6, 11)) == [0, 5, 0, 5]
    expected = {
        1: (UnsendableError, "output"),
        2: (LookupError, "home"),
        3: (UnsendableError, "extra"),
        4: (LookupError, "home"),
    }
    for number, (error, said) in expected.items():
        for output in outputs[number::6]:
            assert isinstance(output, error) == (kind != "thread")
            assert kind == "thread" or said in str(output)


@pytest.mark.parametrize(("buffersize", "chunksize"), [(1, 1), (9, 4), (None, 7)])
def test_outputs_are_in_order(block, buffersize, chunksize):
    batches = torch.randn(61, 4).split(4)
    options = {"buffersize": buffersize, "chunksize": chunksize}
    assert_same(list(stream(block, double, batches, **options)), [batch * 2 for batch in batches])
    assert list(block.map([], **options)) == []


@pytest.mark.parametrize("chunksize", [1, 4])
def test_prepare_runs_in_the_lane(block, kind, chunksize):
    """`prepare` runs in the lane, and reads the values of the moment of the call."""
    table = {"offset": 1.0}

    def prepare(batch):
        return {
            "function": lambda x, pid: (x * 2, pid),
            "x": batch + table["offset"],
            "pid": os.getpid(),
        }

    for offset in (1.0, 10.0):
        table["offset"] = offset
        found = list(block.map(numbers(5), prepare=prepare, chunksize=chunksize))
        assert firsts(output for output, _ in found) == [
            2 * (number + offset) for number in range(5)
        ]
        assert (os.getpid() in {pid for _, pid in found}) == (kind == "thread")


@pytest.mark.parametrize("chunksize", [1, 4])
def test_error_is_in_its_batchs_place(block, chunksize):
    """Earlier outputs come first, also before an error of the source."""

    def fail_on_three(x):
        if int(x[0]) == 3:
            raise LookupError("three")
        return x

    def source():
        yield from ((double, batch) for batch in numbers(5))
        raise KeyError("no more")

    outputs = []
    with pytest.raises(LookupError, match="three") as caught:
        outputs.extend(stream(block, fail_on_three, numbers(9), chunksize=chunksize))
    assert firsts(outputs) == [0, 1, 2]
    for part in "batch 3", "lane", "on cpu":
        assert part in "\n".join(caught.value.__notes__)
    found = list(
        stream(block, fail_on_three, numbers(9), return_exceptions=True, chunksize=chunksize)
    )
    assert [number for number, each in enumerate(found) if isinstance(each, LookupError)] == [3]
    for return_exceptions in (True, False):
        outputs.clear()
        with pytest.raises(KeyError, match="no more"):
            outputs.extend(
                block.map(source(), return_exceptions=return_exceptions, chunksize=chunksize)
            )
        assert firsts(outputs) == [0, 2, 4, 6, 8]


def test_trace_has_spans_of_each_lane(block, tmp_path):
    with block.trace(tmp_path / "lanes.json") as trace:
        block(double, torch.randn(7, 4))
        list(stream(block, double, [torch.randn(3, 4)]))
        with pytest.raises(ValueError):
            block.submit(refuse_negative, -torch.ones(2, 5)).result()
    *cut, of_map, failed = trace.spans
    assert sorted((span.track, span.details["batch"], span.details["rows"]) for span in cut) == [
        (0, None, 4),
        (1, None, 3),
    ]
    assert [(span.details["batch"], span.details["rows"]) for span in (of_map, failed)] == [
        (0, 3),
        (None, 2),
    ]
    assert [span.details["error"] for span in trace.spans] == [None] * 3 + ["ValueError"]
    assert all(0 < span.start <= span.end for span in trace.spans)

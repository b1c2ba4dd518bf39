"""`map(resume=folder)`: each output is computed and saved once; equal batches are recognized."""

from __future__ import annotations

import copy
import enum
import json
import math
import os
import random
import re
import stat
import threading
import typing
import uuid
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import ResumeError, ShardError, build, parallel
from parawrap.engine.fingerprint import fingerprint_of
from parawrap.engine.join_rules import JoinRules
from parawrap.engine.resume import digest_value
from tests.helpers.processes import run_script, running_script
from tests.helpers.scripts import read_script
from tests.helpers.shards import Output
from tests.helpers.waiting import PATIENCE_S, eventually

fcntl = pytest.importorskip("fcntl")

TWO = ["cpu"] * 2


def batches(count):
    return [torch.full((2, 1), float(index)) for index in range(count)]


computed: Counter[float] = Counter()
guard = threading.Lock()


class Counting(nn.Module):
    """Doubles its input, and records every batch that it computes."""

    def forward(self, x):
        with guard:
            computed[x[0].item()] += 1
        return x * 2


@pytest.fixture(autouse=True)
def _nothing_computed():
    computed.clear()


def run(folder, source, target=None, **options):
    with torch.no_grad(), parallel(Counting() if target is None else target, TWO) as p:
        return [output[0].item() for output in p.map(source, resume=folder, **options)]


def test_a_second_run_computes_nothing(tmp_path):
    """A second run computes nothing, and neither does a run after an interrupted one for what the
    loop has read. A longer source adds its new batches.
    """
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(9), resume=str(tmp_path), buffersize=1)
        assert [next(stream)[0].item() for _ in range(4)] == [0, 2, 4, 6]
        stream.close()
    for count in (9, 9, 11):
        assert sorted(run(tmp_path, batches(count), ordered=False)) == [
            2 * index for index in range(count)
        ]
    assert [computed[index] for index in (0, 1, 2, 3, 9, 10)] == [1] * 6
    assert sum(computed.values()) <= 12  # the stream may have read one batch ahead


def test_a_failed_batch_runs_again(tmp_path):
    failed = []

    def once(x):
        if x[0].item() == 1 and not failed:
            failed.append(x)
            raise ValueError("once")
        return x * 2

    with torch.no_grad(), parallel(once, TWO) as p:
        assert isinstance(
            list(p.map(batches(3), resume=tmp_path, return_exceptions=True))[1], ValueError
        )
        assert [output[0].item() for output in p.map(batches(3), resume=tmp_path)] == [0, 2, 4]


def test_outputs_of_any_kind_come_back(tmp_path):
    """A part of a large tensor is saved alone, without the rest of its storage."""
    outputs = [
        {"logits": torch.randn(2, 3), "names": ["a", "b"], "count": 2, "none": None},
        (torch.randn(2, dtype=torch.bfloat16), torch.empty(0, 4)),
        Output(torch.randn(2, 4), ["cat", "dog"]),
        [np.arange(3), torch.eye(4).to_sparse()],
        torch.randn(100_000)[:2],
    ]
    outputs[2].logits.mark = "a"
    for _ in range(2):
        with torch.no_grad(), parallel(lambda x: outputs[int(x[0])], TWO) as p:
            found = list(p.map(batches(len(outputs)), resume=tmp_path))
        assert [(type(each), repr(each)) for each in found] == [
            (type(each), repr(each)) for each in outputs
        ]
        assert found[2].logits.mark == "a"
    assert p.stats().calls == 0
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 30_000


def test_outputs_that_cannot_be_saved(tmp_path):
    """A loaded output has no graph, so the loop would see another value than without `resume`."""
    with pytest.raises(ResumeError, match=r"torch\.no_grad"), parallel(nn.Linear(1, 1), TWO) as p:
        list(p.map(batches(1), resume=tmp_path))
    with pytest.raises(ResumeError, match=r"output of batch 0 .*lock"):
        run(tmp_path / "locks", batches(1), lambda x: threading.Lock())


def test_a_source_that_changed(tmp_path):
    """The error names the first batch that differs; the outputs before it come out."""
    run(tmp_path, batches(5))
    first, *others = batches(5)
    outputs = []
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map([first, *others[1:]], resume=tmp_path, return_exceptions=True)
        with pytest.raises(
            ResumeError, match=r"batch 1 is not the batch that .*seed its shuffling"
        ):
            outputs.extend(stream)
    assert len(outputs) == 1
    with pytest.raises(
        ResumeError, match=r"ended after 3 batches, but .* holds the output of batch 4"
    ):
        run(tmp_path, batches(3))


def test_another_target_is_refused(tmp_path):
    run(tmp_path, batches(1))
    with pytest.raises(
        ResumeError, match=r"an output of .*\.Counting\.forward, not of partial of .*mul"
    ):
        run(tmp_path, batches(1), partial(torch.mul, torch.ones(1)))


def test_a_key_is_compared(tmp_path):
    """A key replaces the batch in the comparison, and its function gets the batch as the source
    gave it.
    """
    options = {"key": lambda batch: batch[0], "chunksize": 2, "prepare": lambda batch: batch}
    with torch.no_grad(), parallel(lambda name, x: x, TWO) as p:
        for shift in range(2):
            source = [
                (f"file {number}", torch.full((1,), float(number + shift))) for number in range(4)
            ]
            assert [output.item() for output in p.map(source, resume=tmp_path, **options)] == [
                0,
                1,
                2,
                3,
            ]
        source[2] = ("file 9", source[2][1])
        with pytest.raises(ResumeError, match="batch 2 is not the batch that"):
            list(p.map(source, resume=tmp_path, **options))


def test_the_folder_may_hold_other_files(tmp_path, monkeypatch):
    """~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "².output").write_text("mine")
    for _ in range(2):
        assert run("~", batches(2)) == [0, 2]
    with pytest.raises(
        ResumeError, match=r"thesis\.txt.* cannot be used: .*Give the path of a folder"
    ):
        run(file, batches(2))
    for working_directory in ("", ".", "./"):
        with pytest.raises(ResumeError, match=r"resume is '' or '\.'.*such as resume='outputs'"):
            run(working_directory, batches(2))
    assert file.read_text() == "mine"
    assert torch.load(tmp_path / "000000001.output", weights_only=False)["output"].tolist() == [
        [2.0],
        [2.0],
    ]


def test_files_that_cannot_be_loaded(tmp_path):
    """The error names the file. Once it is deleted, its batch runs again."""
    run(tmp_path, batches(3))
    (file := tmp_path / "000000001.output").write_bytes(b"")
    with pytest.raises(
        ResumeError, match=r"000000001\.output cannot be loaded: .*Or delete the file"
    ):
        run(tmp_path, batches(3))
    file.unlink()
    assert run(tmp_path, batches(3)) == [0, 2, 4]
    assert computed == {0: 1, 1: 2, 2: 1}


def test_a_run_that_is_killed_at_random(tmp_path, monkeypatch):
    """No saved output is lost or computed again.

    The last run, with other hashes of texts, yields every output once.
    """
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    folder, log = tmp_path / "out", tmp_path / "log"
    committed: dict[int, int] = {}  # how often the batch of each saved output was computed

    def saved():
        return {int(file.stem) for file in folder.glob("*.output")}

    def check():
        runs = Counter(map(int, log.read_text().split()))
        assert {number: runs[number] for number in committed} == committed
        assert committed.keys() <= saved()
        committed.update({number: runs[number] for number in saved()})

    count = 200
    for enough in sorted(random.Random(5).sample(range(1, count), 2)):
        with running_script(tmp_path, read_script("killed_stream"), folder, log, count) as script:
            eventually(lambda: len(saved()) >= enough, f"{enough} outputs")  # noqa: B023
            script.kill()
            script.communicate(PATIENCE_S)
        check()
    lines = run_script(tmp_path, read_script("killed_stream"), folder, log, count).splitlines()
    assert json.loads(lines[-1]) == [2.0 * index for index in range(count)]
    check()
    assert committed.keys() == set(range(count))


# -- outputs of another model


class Scaled(nn.Module):
    """Has a parameter, buffers of several kinds, and one that is not saved."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("turn", torch.ones(1, dtype=torch.complex64))
        self.layer = nn.BatchNorm1d(1)

    def forward(self, x):
        return x * 2

    def embed(self, x):
        return x * 2


def change_value(model):
    with torch.no_grad():
        model.weight[1] += 1e-7


def swap_values(model):
    with torch.no_grad():
        model.weight.copy_(torch.tensor([1.0, 1.0, 2.0]))


OTHER_MODELS = {
    "value": change_value,
    "integer": lambda model: model.count.add_(1),
    "buffer that is not saved": lambda model: model.mask.logical_not_(),
    "complex buffer": lambda model: model.turn.mul_(1j),
    "dtype": lambda model: model.double(),
    "shape": lambda model: setattr(model, "weight", nn.Parameter(torch.ones(1, 3))),
    "new parameter": lambda model: setattr(model, "bias", nn.Parameter(torch.zeros(0))),
    "training flag": lambda model: model.train(),
    "training flag of a layer": lambda model: model.layer.train(),
}


@pytest.mark.parametrize("other", OTHER_MODELS)
def test_outputs_of_other_models_are_refused(tmp_path, other):
    """Both cures that the error names work as written. The other folder and the first one are
    usable afterwards.
    """
    model, changed = Scaled().eval(), Scaled().eval()
    OTHER_MODELS[other](changed)
    assert run(tmp_path, batches(2), model) == [0, 2]
    assert run(tmp_path, batches(2), Scaled().eval()) == [0, 2]
    what = "training flags" if "flag" in other else "weights"
    with pytest.raises(
        ResumeError, match=rf"with other {what} of .*another folder.*check_model=False"
    ):
        run(tmp_path, batches(2), changed)
    assert run(tmp_path, batches(3), changed, check_model=False) == [0, 2, 4]
    assert run(tmp_path / "other", batches(2), changed) == [0, 2]
    with pytest.raises(ResumeError, match=r"000000002\.output does not say which weights"):
        run(tmp_path, batches(3), model)


def test_where_a_value_lies_counts(tmp_path):
    """Equal values in another order are other weights; equal weights in other memory are not."""
    one, other = Scaled().eval(), Scaled().eval()
    with torch.no_grad():
        one.weight.copy_(torch.tensor([2.0, 1.0, 1.0]))
        other.weight.copy_(torch.tensor([1.0, 1.0, 2.0]))
    run(tmp_path, batches(1), one)
    with pytest.raises(ResumeError, match="other weights"):
        run(tmp_path, batches(1), other)
    other.weight = nn.Parameter(torch.tensor([9.0, 2.0, 9.0, 1.0, 9.0, 1.0])[1::2])
    assert run(tmp_path, batches(1), other) == [0]


def over(model):
    return lambda x: model(x)


class Pipeline:
    def __init__(self, model):
        self.parts = {"model": model}

    def __call__(self, x):
        return self.parts["model"](x)

    def run(self, x):
        return self(x)


HOLDERS = {
    "closure": over,
    "partial": lambda model: partial(over(model)),
    "argument of a partial": lambda model: partial(lambda model, x: model(x), model),
    "default": lambda model: lambda x, model=model: model(x),
    "method": lambda model: model.embed,
    "object": Pipeline,
    "method of an object": lambda model: Pipeline(model).run,
    "another method": lambda model: model,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_models_inside_functions(tmp_path, holder):
    def stream(model):
        options = {"methods": ("embed",)} if holder == "another method" else {}
        with torch.no_grad(), parallel(HOLDERS[holder](model), TWO, **options) as p:
            return [output[0].item() for output in p.map(batches(2), resume=tmp_path)]

    other = Scaled().eval()
    change_value(other)
    assert stream(Scaled().eval()) == stream(Scaled().eval()) == [0, 2]
    with pytest.raises(ResumeError, match="other weights"):
        stream(other)


def test_arguments_of_a_partial_count(tmp_path):
    """Other values that a function holds may be counters."""
    seen = []

    def double(x, by):
        seen.append(by)
        return x * 2

    for by in (torch.ones(2), 2, 2.0, "a"):
        folder = tmp_path / str(len(seen))
        run(folder, batches(2), partial(double, by=by))
        run(folder, batches(2), partial(double, by=copy.deepcopy(by)))
        with pytest.raises(ResumeError, match="other weights"):
            run(folder, batches(2), partial(double, by=3))


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Settings:
    size: int
    more: typing.Any = None


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        (Path("small.pt"), Path("large.pt")),
        (torch.float16, torch.float32),
        (Color.RED, Color.BLUE),
        (np.zeros(9000), np.eye(1, 9000, 4500)[0]),
        (np.float32(1), np.float32(2)),
        ({"a", "b", "c"}, {"a", "b", "d"}),
        (Settings(1), Settings(2)),
        (Settings(1, [Path("a")]), Settings(1, [Path("b")])),
        (SimpleNamespace(size=1), SimpleNamespace(size=2)),
    ],
    ids=lambda value: type(value).__name__,  # the text of a set varies
)
def test_values_among_arguments_count(argument, other):
    """An argument of a partial or of `build` may name the weights, or the size of the model."""
    for make in (partial, build):
        first, second = (
            fingerprint_of(make(dict, value), JoinRules())
            for value in (argument, copy.deepcopy(argument))
        )
        assert first == second
        assert fingerprint_of(make(dict, other), JoinRules()) != first


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_weights_are_compared(tmp_path):
    """Equal integers with another scale are other weights."""

    def quantized(scale, per_channel=False):
        model, values = Scaled().eval(), torch.arange(3.0)
        if per_channel:
            scales, zeros = torch.tensor([1.0, 1.0, scale]), torch.zeros(3, dtype=torch.int64)
            tensor = torch.quantize_per_channel(values * scales, scales, zeros, 0, torch.qint8)
        else:
            tensor = torch.quantize_per_tensor(values * scale, scale, 0, torch.qint8)
        model.register_buffer("scaled", tensor)
        return model

    for folder, per_channel in (("a", False), ("b", True)):
        for _ in range(2):
            assert run(tmp_path / folder, batches(1), quantized(0.5, per_channel)) == [0]
        with pytest.raises(ResumeError, match="other weights"):
            run(tmp_path / folder, batches(1), quantized(0.25, per_channel))
    run(tmp_path, batches(1), quantized(0.5))
    for model in quantized(1.0, per_channel=True), Scaled().eval():
        with pytest.raises(ResumeError, match="other weights"):
            run(tmp_path, batches(1), model)


def test_options_that_change_a_whole_output(tmp_path):
    """Only options that change a whole output are compared."""

    def stream(**options):
        with torch.no_grad(), parallel(lambda x: x.sum(), TWO, **options) as p:
            return list(p.map(batches(2), resume=tmp_path))

    assert stream() == stream(reduce="mean") == stream(out_dims=None, dim=1)
    for options in ({"reduce": "stack"}, {"join": "list"}, {"reduce": {"a": torch.amax}}):
        with pytest.raises(ResumeError, match="other options"):
            stream(**options)


def test_folders_without_a_fingerprint(tmp_path):
    """A folder of an earlier version is refused, unless `check_model` is False."""
    run(tmp_path, batches(2))
    for file in tmp_path.iterdir():
        saved = torch.load(file, weights_only=False)
        del saved["model"]
        torch.save(saved, file)
    with pytest.raises(
        ResumeError, match=r"does not say which weights .*another folder.*check_model"
    ):
        run(tmp_path, batches(2))
    assert run(tmp_path, batches(2), check_model=False) == [0, 2]
    with parallel(Counting(), TWO) as p, pytest.raises(ShardError, match="without resume="):
        p.map(batches(2), check_model=False)


# -- whose files


def test_the_folder_is_private(tmp_path):
    """A folder that exists keeps its mode."""
    run(tmp_path / "a" / "b", batches(1))
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    mode = tmp_path.stat().st_mode
    run(tmp_path, batches(1))
    assert tmp_path.stat().st_mode == mode


def test_files_of_another_user_are_refused(tmp_path, monkeypatch):
    """Files of another user are refused before they are loaded, which can run their code."""
    run(tmp_path, batches(2))
    files, me = os.fstat, os.getuid()
    monkeypatch.setattr("parawrap.engine.resume.os.getuid", lambda: me + 1)
    with pytest.raises(ResumeError, match=rf"{tmp_path} belongs to the user with the number {me}"):
        run(tmp_path, batches(2))
    monkeypatch.undo()

    def of_another(descriptor):
        found = list(files(descriptor))
        found[4] += 1
        return os.stat_result(found)

    monkeypatch.setattr("parawrap.engine.resume.os.fstat", of_another)
    with pytest.raises(ResumeError, match=r"000000000\.output belongs to the user .* of your own"):
        run(tmp_path, batches(2))


def test_files_of_killed_runs_are_removed(tmp_path):
    """Files of killed runs are removed.

    Those of a process that runs, and files of the user, stay.
    """
    names = [uuid.uuid4().hex for _ in range(2)]
    left, used = (tmp_path / f"{name}.unfinished" for name in names)
    own = tmp_path / "thesis.unfinished"
    for file in (left, used, own):
        file.write_bytes(b"half")
    with used.open("rb+") as content:
        fcntl.flock(content, fcntl.LOCK_EX)
        assert run(tmp_path, batches(1)) == [0]
        assert (left.exists(), used.exists(), own.exists()) == (False, True, True)
    assert run(tmp_path, batches(1)) == [0]
    assert (used.exists(), own.exists()) == (False, True)


# -- equal batches, in every process


@dataclass(eq=False)
class Sample:
    value: object = None


def marked(value, mark):
    value.mark = mark
    return value


EYE = torch.eye(2)
DIFFERENT = {
    "equal numbers": [1, True, 1.0],
    "texts": ["a", b"a", "b", None],
    "lists": [["a", "b"], ["ab"], ("a", "b"), [10**5000], [10**5000 + 1]],
    "containers": [[[1], []], [[1]], [[1], {}], [(1,), []], [[[1]], []]],
    "functions": [len, sum, math.sqrt, int, re.compile("a"), re.compile("b")],
    "objects": [Sample("x"), Sample("y"), Sample(torch.zeros(1)), Sample(torch.ones(1))],
    "arrays": [array("f", [1.0]), array("d", [1.0]), np.arange(3), np.arange(3.0), np.arange(1, 4)],
    "dtypes": [
        np.array([1], "M8[s]"),
        np.array([1], "M8[ms]"),
        np.datetime64(5, "s"),
        np.datetime64(5, "ns"),
    ],
    "objects in arrays": [
        np.array(["a"], object),
        np.array(["b"], object),
        np.empty((0, 3), object),
    ],
    "tensors": [
        EYE,
        EYE * 2,
        EYE.double(),
        EYE[0],
        EYE * 1j,
        marked(EYE.clone(), "a"),
        marked(EYE.clone(), "b"),
    ],
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_different_batches_differ(kind):
    assert len({digest_value(value) for value in DIFFERENT[kind]}) == len(DIFFERENT[kind])


text = "one text"
EQUAL = {
    "texts": ([text, text], [text, "".join(["one ", "text"])]),
    "view": (torch.arange(9)[3:6], torch.arange(3, 6)),
    "column": (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
    "gradient": (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
    "conjugate": (torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1))),
    "nan": (torch.full((2,), math.nan), torch.full((2,), math.nan)),
    "array": (np.arange(9)[3:6], np.arange(3, 6)),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_batches_are_recognized(kind):
    """A digest depends on values, not on the memory that they are in."""
    one, same = EQUAL[kind]
    assert digest_value(one) == digest_value(same)


CYCLE = Sample()
CYCLE.value = [CYCLE]
UNSTABLE = {
    "lock": threading.Lock(),
    "deep": reduce(lambda inner, _: [inner], range(100_000), []),
    "cycle": CYCLE,
}


@pytest.mark.parametrize("kind", UNSTABLE)
def test_other_batches_need_a_key(tmp_path, kind):
    """A later run could not detect a changed source, so nothing is computed.

    A key replaces the pickle.
    """
    batch, options = UNSTABLE[kind], {"prepare": lambda _: torch.ones(1)}
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p:
        with pytest.raises(ResumeError, match=r"(?s)^batch 0 cannot be pickled: .* Give map\(key="):
            list(p.map([(batch,)], resume=tmp_path, **options))
        assert not list(tmp_path.glob("*.output"))
        assert list(p.map([(batch,)], resume=tmp_path, key=lambda _: "the batch", **options)) == [1]
        with pytest.raises(
            ResumeError,
            match=r"^the key of batch 0 cannot be pickled: .*lock.* a string or a number",
        ):
            list(
                p.map(
                    [(batch,)], resume=tmp_path / "other", key=lambda _: threading.Lock(), **options
                )
            )


class SlotPipeline:
    """Holds a model, as pipelines of other packages do."""

    __slots__ = ("model",)

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)


class Around:
    """Holds a pipeline."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, x):
        return self.inner(x)


def with_default(model):
    pipeline = SlotPipeline(model)
    return lambda x, held=pipeline: held.model(x)


@pytest.mark.parametrize(
    "make",
    [
        SlotPipeline,
        lambda model: Around(SlotPipeline(model)),
        lambda model: partial(SlotPipeline(model)),
        with_default,
        lambda model: (lambda pipeline: lambda x: pipeline(x))(Around(Around(model))),
    ],
    ids=["slots", "object in an object", "partial", "default", "closure"],
)
@torch.no_grad()
def test_models_inside_objects_are_compared(make, tmp_path):
    """The weights of a model count wherever a target holds it."""
    batches = [torch.ones(3, 4)] * 2
    models = [torch.nn.Linear(4, 2).eval() for _ in range(2)]
    with parallel(make(models[0]), TWO) as p:
        list(p.map(batches, resume=tmp_path))
    with parallel(make(models[0]), TWO) as p:
        list(p.map(batches, resume=tmp_path))
    with parallel(make(models[1]), TWO) as p, pytest.raises(ResumeError, match="other weights"):
        list(p.map(batches, resume=tmp_path))

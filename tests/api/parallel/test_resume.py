"""`map(resume=folder)`: each output is computed and saved once. Equal batches are recognized in every process."""

from __future__ import annotations

import json
import math
import random
import re
import threading
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import ResumeError, parallel
from parawrap.engine.resume import digest_value
from tests.helpers.processes import run_script, running_script
from tests.helpers.shards import Output
from tests.helpers.waiting import PATIENCE_S, eventually

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
    """Nor does a run after an interrupted one compute what the loop has read. A longer source adds its new batches."""
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(9), resume=str(tmp_path), buffersize=1)
        assert [next(stream)[0].item() for _ in range(4)] == [0, 2, 4, 6]
        stream.close()
    for count in (9, 9, 11):
        assert sorted(run(tmp_path, batches(count), ordered=False)) == [2 * index for index in range(count)]
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
        assert isinstance(list(p.map(batches(3), resume=tmp_path, return_exceptions=True))[1], ValueError)
        assert [output[0].item() for output in p.map(batches(3), resume=tmp_path)] == [0, 2, 4]


def test_outputs_of_any_kind_come_back(tmp_path):
    """A part of a large tensor is saved alone, although torch.save would write the whole storage."""
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
        assert [(type(each), repr(each)) for each in found] == [(type(each), repr(each)) for each in outputs]
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
        with pytest.raises(ResumeError, match=r"batch 1 is not the batch that .*seed its shuffling"):
            outputs.extend(stream)
    assert len(outputs) == 1
    with pytest.raises(ResumeError, match=r"ended after 3 batches, but .* holds the output of batch 4"):
        run(tmp_path, batches(3))


def test_another_target_is_refused(tmp_path):
    run(tmp_path, batches(1))
    with pytest.raises(ResumeError, match=r"an output of .*\.Counting\.forward, not of partial of .*mul"):
        run(tmp_path, batches(1), partial(torch.mul, torch.ones(1)))


def test_a_key_is_compared(tmp_path):
    """It replaces the batch, and gets it as the source gave it."""
    options = {"key": lambda batch: batch[0], "chunksize": 2, "prepare": lambda batch: batch}
    with torch.no_grad(), parallel(lambda name, x: x, TWO) as p:
        for shift in range(2):
            source = [(f"file {number}", torch.full((1,), float(number + shift))) for number in range(4)]
            assert [output.item() for output in p.map(source, resume=tmp_path, **options)] == [0, 1, 2, 3]
        source[2] = ("file 9", source[2][1])
        with pytest.raises(ResumeError, match="batch 2 is not the batch that"):
            list(p.map(source, resume=tmp_path, **options))


def test_the_folder_may_hold_other_files(tmp_path, monkeypatch):
    """~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "thesis.txt").write_text("mine")
    for _ in range(2):
        assert run("~", batches(2)) == [0, 2]
    with pytest.raises(ResumeError, match=r"thesis\.txt.* cannot be used: .*Give the path of a folder"):
        run(file, batches(2))
    assert file.read_text() == "mine"
    assert torch.load(tmp_path / "000000001.output", weights_only=False)["output"].tolist() == [[2.0], [2.0]]


def test_files_that_cannot_be_loaded(tmp_path):
    """The error names the file. Once it is deleted, its batch runs again."""
    run(tmp_path, batches(3))
    (file := tmp_path / "000000001.output").write_bytes(b"")
    with pytest.raises(ResumeError, match=r"000000001\.output cannot be loaded: .*Or delete the file"):
        run(tmp_path, batches(3))
    file.unlink()
    assert run(tmp_path, batches(3)) == [0, 2, 4]
    assert computed == {0: 1, 1: 2, 2: 1}


KILLED = """
import json, os, sys, torch
from parawrap import parallel

folder, log, count = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND), int(sys.argv[3])

def double(x, name):
    os.write(log, b"%d\\n" % x[0].item())
    return x * 2

seen = []
with torch.no_grad(), parallel(double, ["cpu", "cpu"]) as p:
    for output in p.map(({"name": f"row {i}", "x": torch.full((2, 1), float(i))} for i in range(count)), resume=folder):
        seen.append(output[0].item())
print(json.dumps(seen))
"""


def test_a_run_that_is_killed_at_random(tmp_path, monkeypatch):
    """No saved output is lost or computed again. The last run, with other hashes of texts, yields every output once."""
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
    for enough in sorted(random.Random(5).sample(range(1, count), 3)):
        with running_script(tmp_path, KILLED, folder, log, count) as script:
            eventually(lambda: len(saved()) >= enough, f"{enough} outputs")  # noqa: B023
            script.kill()
            script.communicate(PATIENCE_S)
        check()
    lines = run_script(tmp_path, KILLED, folder, log, count).splitlines()
    assert json.loads(lines[-1]) == [2.0 * index for index in range(count)]
    check()
    assert committed.keys() == set(range(count))


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
    "dtypes": [np.array([1], "M8[s]"), np.array([1], "M8[ms]"), np.datetime64(5, "s"), np.datetime64(5, "ns")],
    "objects in arrays": [np.array(["a"], object), np.array(["b"], object), np.empty((0, 3), object)],
    "tensors": [EYE, EYE * 2, EYE.double(), EYE[0], EYE * 1j, marked(EYE.clone(), "a"), marked(EYE.clone(), "b")],
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
    """A later run could not detect a changed source, so nothing is computed. A key replaces the pickle."""
    batch, options = UNSTABLE[kind], {"prepare": lambda _: torch.ones(1)}
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p:
        with pytest.raises(ResumeError, match=r"(?s)^batch 0 cannot be pickled: .* Give map\(key="):
            list(p.map([(batch,)], resume=tmp_path, **options))
        assert not list(tmp_path.glob("*.output"))
        assert list(p.map([(batch,)], resume=tmp_path, key=lambda _: "the batch", **options)) == [1]
        with pytest.raises(ResumeError, match=r"^the key of batch 0 cannot be pickled: .*lock.* a string or a number"):
            list(p.map([(batch,)], resume=tmp_path / "other", key=lambda _: threading.Lock(), **options))

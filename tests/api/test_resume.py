"""`map(resume=folder)`: each output is computed and saved once, over any number of interrupted runs."""

from __future__ import annotations

import cmath
import errno
import fcntl
import functools
import gc
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from array import array
from collections import Counter, UserDict, defaultdict, deque
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import ResumeError, ShardError, parallel
from parawrap.engine._digest import digest_value
from parawrap.engine._output_folder import OutputFolder
from tests.helpers.processes import run_script, scripts, write_script
from tests.helpers.waiting import eventually

TWO = ["cpu"] * 2


def batches(count, rows=2):
    return [torch.full((rows, 1), float(index)) for index in range(count)]


class Counting(nn.Module):
    """Doubles its input, and records every batch that it computes."""

    def __init__(self):
        super().__init__()
        self.ran = Counter()

    def forward(self, x):
        with guard:
            computed[x[0].item()] += 1
        return x * 2


computed: Counter[float] = Counter()
guard = threading.Lock()


@pytest.fixture(autouse=True)
def _nothing_computed():
    computed.clear()


def run(folder, source, target=None, **options):
    with torch.no_grad(), parallel(Counting() if target is None else target, TWO) as p:
        return [output[0].item() for output in p.map(source, resume=folder, **options)]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_second_run_computes_nothing(tmp_path, ordered):
    """It yields the saved outputs."""
    for _ in range(2):
        assert sorted(run(tmp_path / "out", batches(7), ordered=ordered)) == [0, 2, 4, 6, 8, 10, 12]
    assert computed == dict.fromkeys(map(float, range(7)), 1)


def test_an_interrupted_run_goes_on_where_it_was(tmp_path):
    """The outputs that the loop has read are not computed again, and the loop sees all outputs in order."""
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(9), resume=str(tmp_path), buffersize=1)
        assert [next(stream)[0].item() for _ in range(4)] == [0, 2, 4, 6]
        stream.close()
    assert run(tmp_path, batches(9)) == [2 * index for index in range(9)]
    assert [computed[index] for index in range(4)] == [1] * 4


def test_a_source_that_grew_adds_the_new_batches(tmp_path):
    """A longer source repeats the earlier batches."""
    run(tmp_path, batches(3))
    assert run(tmp_path, batches(5)) == [0, 2, 4, 6, 8]
    assert set(computed.values()) == {1}


def test_a_failed_batch_is_computed_again(tmp_path):
    """Exceptions are not saved, also with `return_exceptions`."""

    class Once(nn.Module):
        def forward(self, x):
            if x[0].item() == 1 and not failed:
                failed.append(x)
                raise ValueError("once")
            return x * 2

    failed = []
    with torch.no_grad(), parallel(Once(), TWO) as p:
        _, second, _ = p.map(batches(3), resume=tmp_path, return_exceptions=True)
        assert isinstance(second, ValueError)
        assert [output[0].item() for output in p.map(batches(3), resume=tmp_path)] == [0, 2, 4]


@dataclass
class Boxes:
    """One kind of object that a model may return."""

    corners: torch.Tensor
    names: list[str]


@pytest.mark.parametrize(
    "output",
    [
        {"logits": torch.randn(2, 3), "names": ["a", "b"], "count": 2, "none": None},
        (torch.randn(2, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 4)),
        Boxes(torch.randn(2, 4), ["cat", "dog"]),
        [np.arange(3), "text", 1.5],
        torch.randn(4, 4).to_sparse(),
    ],
    ids=["dict", "tuple", "dataclass", "list", "sparse"],
)
def test_outputs_of_any_kind_come_back_as_they_were(tmp_path, output):
    """Types, dtypes, and values."""
    for _ in range(2):
        with torch.no_grad(), parallel(lambda x: output, TWO) as p:
            (found,) = p.map(batches(1), resume=tmp_path)
        assert type(found) is type(output)
        assert repr(found) == repr(output)


@dataclass(frozen=True)
class Sample:
    """A dataclass without tensors."""

    name: str
    tags: set[str]


class Marked(list):
    """A list with an attribute."""

    def __init__(self, items, mark=None):
        super().__init__(items)
        self.mark = mark


class Hidden(str):
    """A text that its repr does not show."""

    __slots__ = ()

    def __repr__(self):
        return "***"


class Built:
    """An object that pickle makes by a bound method."""

    def __init__(self, number):
        self.number = number

    def again(self):
        return Built(self.number)

    def __reduce__(self):
        return Factory(self.number).make, ()


class Factory:
    def __init__(self, number):
        self.number = number

    def make(self):
        return Built(self.number)


def marked(tensor, mark):
    tensor.mark = mark
    return tensor


class Pair(torch.Tensor):
    """A tensor that consists of two others, without memory of its own."""

    @staticmethod
    def __new__(cls, left, right):
        return torch.Tensor._make_wrapper_subclass(cls, left.shape, dtype=left.dtype)

    def __init__(self, left, right):
        self.left, self.right = left, right

    def __tensor_flatten__(self):
        return ["left", "right"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError


class Picture:
    """An object that keeps its values where `vars` does not show them."""

    __slots__ = ("pixels",)

    def __init__(self, pixels):
        self.pixels = pixels


def test_a_part_of_a_large_tensor_is_saved_alone(tmp_path):
    """torch.save would write the whole storage."""
    table = torch.randn(100_000)
    with torch.no_grad(), parallel(lambda x: table[:2], TWO) as p:
        list(p.map(batches(1), resume=tmp_path))
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 10_000


# -- refused


@pytest.mark.parametrize(
    "changed",
    [
        [torch.zeros(2, 1), torch.full((2, 1), 7.0)],
        [torch.zeros(2, 1), torch.ones(3, 1)],
        [torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.float64)],
        [torch.zeros(2, 1), (torch.ones(2, 1),)],
    ],
    ids=["value", "rows", "dtype", "structure"],
)
def test_a_source_that_changed_is_refused(tmp_path, changed):
    """The error names the first batch that differs; the outputs before it come out."""
    run(tmp_path, batches(2))
    outputs = []
    with (
        torch.no_grad(),
        parallel(Counting(), TWO) as p,
        pytest.raises(ResumeError, match=r"batch 1 is not the batch that .*seed its shuffling") as caught,
    ):
        outputs.extend(p.map(changed, resume=tmp_path, return_exceptions=True))
    assert len(outputs) == 1
    assert caught.value.__notes__ == ["while batch 1 of the stream was read, counted from 0"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b"),
        (1, True),
        (1, 1.0),
        (b"a", "a"),
        (None, 0),
        (["a", "b"], ["ab"]),
        ({"x": 1}, {"x": 2}),
        ({1, 2}, {1, 3}),
        (np.arange(3), np.arange(1, 4)),
        (np.arange(3), np.arange(3.0)),
        (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
        (Boxes(torch.zeros(1), []), Boxes(torch.ones(1), [])),
        (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64) * 1j),
        (Path("a.png"), Path("b.png")),
        (date(2026, 1, 1), date(2026, 1, 2)),
        (Sample("a", {"x", "y"}), Sample("a", {"x", "z"})),
        (Picture(b"white"), Picture(b"black")),
        (re.compile("a"), re.compile("b")),
        (int, float),
        (frozenset({(1, "a")}), frozenset({(1, "b")})),
        (array("d", [1.0]), array("d", [2.0])),
        (np.ma.array([1, 2], mask=[True, False]), np.ma.array([1, 2], mask=[False, True])),
        (np.array([1], "M8[s]"), np.array([1], "M8[ms]")),
        (np.array([(1, "a")], [("n", int), ("o", object)]), np.array([(1, "b")], [("n", int), ("o", object)])),
        (np.float32(1), np.float32(2)),
        (Marked([1], mark="a"), Marked([1], mark="b")),
        (marked(torch.ones(2), "a"), marked(torch.ones(2), "b")),
        (Pair(torch.ones(2), torch.ones(2)), Pair(torch.ones(2), torch.zeros(2))),
        (array("f", [1.0, 2.0]), array("d", [1.0, 2.0])),
        (np.datetime64(5, "s"), np.datetime64(5, "ns")),
        (np.array([(1,)], [("O1", "i4")]), np.array([(1,)], [("O2", "i4")])),
        (np.empty((0, 3), object), np.empty((0, 5), object)),
        (defaultdict(int), defaultdict(float)),
        (deque([1], maxlen=1), deque([1], maxlen=2)),
        (UserDict(a=1), UserDict(a=2)),
        (Hidden("a"), Hidden("b")),
        (Built(1), Built(2)),
        (math.sqrt, cmath.sqrt),
        (len, sum),
        ([10**5000], [10**5000 + 1]),
    ],
)
def test_batches_of_any_kind_are_told_apart(tmp_path, first, second):
    """And an equal batch of the same kind is recognised."""
    with torch.no_grad(), parallel(lambda x: 1, TWO) as p:
        for again in range(2):
            assert list(p.map([(first,)], resume=tmp_path)) == [1], again
        with pytest.raises(ResumeError, match="batch 0 is not"):
            list(p.map([(second,)], resume=tmp_path))


def test_a_batch_that_cannot_be_pickled_asks_for_a_key(tmp_path):
    """Nothing is computed: a later run could not detect a changed source."""
    with torch.no_grad(), parallel(lambda x, lock: x, TWO) as p:
        outputs = p.map([(torch.ones(2), threading.Lock())], resume=tmp_path)
        with pytest.raises(ResumeError, match=r"^batch 0 cannot be pickled: .*_thread\.lock.* Give map\(key=") as caught:
            next(outputs)
    assert caught.value.__notes__ == ["while batch 0 of the stream was read, counted from 0"]
    assert not list(tmp_path.glob("*.output"))


@dataclass(eq=False)
class Node:
    """An object that refers to others, and maybe to itself."""

    others: object = None


def cyclic(node, others):
    node.others = others
    return node


@pytest.mark.parametrize(
    "batch",
    [
        (i for i in range(2)),
        torch.ones(2, device="meta"),
        torch.ones(2).untyped_storage(),
        torch.ones(2).to_mkldnn(),
        lambda: 1,
        partial(lambda: 1),
        functools.reduce(lambda inner, _: [inner], range(100_000), []),
        cyclic(node := Node(), node),
        cyclic(node := Node(), [node]),
        cyclic(node := Node(), {node}),
    ],
    ids=["generator", "meta", "storage", "mkldnn", "lambda", "partial", "deep", "cycle", "list-cycle", "set-cycle"],
)
def test_values_without_a_stable_pickle_ask_for_a_key(tmp_path, batch):
    """Also those of which a usual pickle differs in each run, or does not end. A key replaces the pickle."""
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p:
        with pytest.raises(ResumeError, match=r"(?s)^batch 0 cannot be pickled: .*key="):
            list(p.map([(batch,)], resume=tmp_path))
        for _ in range(2):
            options = {"key": lambda _: "the batch", "prepare": lambda _: torch.ones(1)}
            assert list(p.map([(batch,)], resume=tmp_path, **options)) == [1]
        assert sum(lane.tasks for lane in p.stats().lanes) == 1


@pytest.mark.filterwarnings("ignore:.*quantize")
def test_a_quantized_batch_asks_for_a_key(tmp_path):
    """Its pickle has an address in memory."""
    batch = torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.qint8)
    with torch.no_grad(), parallel(lambda batch: 1, TWO) as p, pytest.raises(ResumeError, match="of a quantized one"):
        list(p.map([(batch,)], resume=tmp_path))


# -- equal batches


def samples():
    """One batch of each kind that a run may pickle in another way than the run before."""
    tensor = torch.arange(12.0).view(3, 4)
    return [
        {*"abcdefgh"},
        {"k": frozenset("ijklmnop"), "tags": Tags("qrstuvwx")},
        Sample("a", {"x", "y", "z"}),
        Path("x"),
        date(2026, 1, 1),
        np.arange(6).reshape(2, 3).T,
        tensor[1],
        tensor.t(),
        tensor.to_sparse(),
        {"x": tensor, "none": None, "nan": float("nan"), "text": "ab"},
    ]


class Tags(set):
    """A set of a user."""


def test_digests_do_not_depend_on_the_process():
    """Sets and hashes of strings have another order in each process."""
    script = "from tests.api.test_resume import digest_value, samples; print([digest_value(x).hex() for x in samples()])"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.strip() == str([digest_value(sample).hex() for sample in samples()])


text = "one text"


@pytest.mark.parametrize(
    ("one", "same"),
    [
        ([text, text], [text, "".join(["one ", "text"])]),
        ([[1], [1]], [[1]] * 2),
        (torch.arange(9)[3:6], torch.arange(3, 6)),
        (torch.eye(3)[:, 1], torch.eye(3)[:, 1].clone()),
        (torch.ones(2, requires_grad=True) * 1, torch.ones(2)),
        (torch.tensor([1j]).conj(), torch.complex(torch.zeros(1), -torch.ones(1))),
        ([torch.ones(2)] * 2, [torch.ones(2), torch.ones(2)]),
        (torch.full((2,), math.nan), torch.full((2,), math.nan)),
        ({"b", "a"}, {"a", "b"}),
        (np.arange(9)[3:6], np.arange(3, 6)),
    ],
    ids=["texts", "lists", "view", "column", "gradient", "conjugate", "twice", "nan", "sets", "array"],
)
def test_equal_batches_are_recognized(tmp_path, one, same):
    """A digest depends on values, not on the memory that they are in."""
    with torch.no_grad(), parallel(lambda x: 1, TWO) as p:
        for batch in (one, same):
            assert list(p.map([(batch,)], resume=tmp_path)) == [1]
        assert sum(lane.tasks for lane in p.stats().lanes) == 1


# -- keys


@pytest.mark.parametrize(
    "options", [{}, {"ordered": False}, {"chunksize": 2}, {"with_inputs": True}, {"prepare": lambda x: x[1]}]
)
def test_a_key_is_compared_in_place_of_the_batch(tmp_path, options):
    """It gets the batch as the source gave it, once per batch and run."""
    seen = []

    def key(batch):
        seen.append(batch[0])
        return batch[0]

    target = (lambda x: x) if "prepare" in options else (lambda name, x: x)
    with torch.no_grad(), parallel(target, TWO) as p:
        for shift in range(2):
            source = [(f"file {number}", torch.full((1,), float(number + shift))) for number in range(4)]
            found = list(p.map(source, resume=tmp_path, key=key, **options))
            found = [pair[1] for pair in found] if "with_inputs" in options else found
            assert sorted(output.item() for output in found) == [0, 1, 2, 3]
        source[2] = ("file 9", source[2][1])
        with pytest.raises(ResumeError, match="batch 2 is not the batch that"):
            list(p.map(source, resume=tmp_path, key=key, **options))
    assert seen[:8] == [f"file {number}" for number in range(4)] * 2


def test_the_key_of_a_method(tmp_path):
    """`p.method(name).map` takes it, too."""
    with torch.no_grad(), parallel(Counting(), TWO, methods=["forward"]) as p:
        for _ in range(2):
            outputs = p.method("forward").map(batches(3), resume=tmp_path, key=lambda batch: batch[0].item())
            assert [output[0].item() for output in outputs] == [0, 2, 4]
    assert computed == dict.fromkeys(map(float, range(3)), 1)


def test_a_key_that_fails_or_cannot_be_pickled_is_named(tmp_path):
    """The error of the key has a note with the number of the batch."""
    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        with pytest.raises(ResumeError, match=r"^the key of batch 0 cannot be pickled: .*lock.* a string or a number"):
            list(p.map(batches(1), resume=tmp_path, key=lambda _: threading.Lock()))
        with pytest.raises(KeyError) as caught:
            list(p.map(batches(1), resume=tmp_path, key=lambda _: {}["name"]))
    assert caught.value.__notes__ == ["while batch 0 of the stream was read, counted from 0"]


def test_a_key_needs_a_folder():
    """Without one, nothing would call the key."""
    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        with pytest.raises(ShardError, match="key= is given without resume="):
            p.map(batches(1), key=len)
        with pytest.raises(ShardError, match="key='name' is not callable"):
            p.map(batches(1), resume="folder", key="name")


# -- the folder


def test_a_source_that_ends_early_is_refused(tmp_path):
    """Outputs of an earlier run are never dropped silently."""
    run(tmp_path, batches(5))
    with pytest.raises(ResumeError, match=r"ended after 3 batches, but .* holds the output of batch 4"):
        run(tmp_path, batches(3))


def test_a_folder_of_another_target_is_refused(tmp_path):
    """Another method or class computes other outputs."""
    run(tmp_path, batches(2))
    with pytest.raises(ResumeError, match=r"holds the outputs of .*\.Counting\.forward, not of torch\..*\.Linear\.forward"):
        run(tmp_path, batches(2), nn.Linear(1, 1))


def test_a_folder_with_other_files_is_refused_and_unchanged(tmp_path):
    """A wrong path does not fill a folder with outputs."""
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ResumeError, match="holds other files, such as"):
        run(tmp_path, batches(2))
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.txt"]


def test_the_home_folder_may_be_short(tmp_path, monkeypatch):
    """A shell expands ~ only at the beginning of a word."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run("~/outputs", batches(1))
    assert (tmp_path / "outputs" / "000000000.output").exists()


def test_the_path_of_a_file_is_refused(tmp_path):
    """A file is not overwritten by the outputs of a stream."""
    (tmp_path / "thesis.txt").write_text("mine")
    for path in tmp_path / "thesis.txt", tmp_path / "thesis.txt" / "outputs":
        with pytest.raises(ResumeError, match=r"thesis\.txt.* cannot be used: .*Give the path of a new"):
            run(path, batches(2))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_folder_that_cannot_be_read_or_locked_is_refused(tmp_path, monkeypatch):
    """Missing permissions and file systems without locks are no running stream."""
    failure = OSError(errno.ENOLCK, "No locks available")
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", Mock(side_effect=failure))
        with pytest.raises(ResumeError, match=r"cannot be used: .*No locks available"):
            run(tmp_path / "locked", batches(2))
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(ResumeError, match=r"cannot be used: .*Permission denied"):
            run(tmp_path / "unreadable", batches(2))
    assert run(tmp_path / "locked", batches(2)) == [0, 2]


def test_a_stream_that_was_refused_leaves_the_other_one_open(tmp_path):
    """A third stream is refused, too."""
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(3), resume=tmp_path)
        next(stream)
        for _ in range(2):
            with pytest.raises(ResumeError, match="in use by another stream of this process"):
                list(p.map(batches(3), resume=tmp_path))


def test_files_that_are_not_outputs_are_ignored(tmp_path):
    """A user may keep notes in the folder."""
    run(tmp_path, batches(2))
    (tmp_path / "my.output").write_text("mine")
    assert run(tmp_path, batches(2)) == [0, 2]
    assert (tmp_path / "my.output").read_text() == "mine"


@pytest.mark.parametrize("form", [1, 2])
def test_a_folder_of_another_release_is_refused(tmp_path, form):
    """Its batches have other digests."""
    run(tmp_path, batches(2))
    (tmp_path / "stream.json").write_text(json.dumps({"format": form, "target": "Counting.forward"}))
    with pytest.raises(ResumeError, match="was written by another release of parawrap"):
        run(tmp_path, batches(2))


def test_two_streams_of_one_process_cannot_share_a_folder(tmp_path):
    """The second is refused while the first is open, also by another path to the folder."""
    (link := tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(3), resume=tmp_path)
        next(stream)
        with pytest.raises(ResumeError, match="in use by another stream of this process"):
            list(p.map(batches(3), resume=tmp_path))
        with pytest.raises(ResumeError, match="in use by another stream of this process"):
            list(p.map(batches(3), resume=link))
        stream.close()
        assert len(list(p.map(batches(3), resume=tmp_path))) == 3


def test_two_processes_cannot_share_a_folder(tmp_path):
    """The error names the process that has it."""
    script = f"""
import sys, torch
from parawrap import parallel
with torch.no_grad(), parallel(torch.neg, ["cpu", "cpu"]) as p:
    stream = p.map([torch.ones(1)] * 3, resume={str(tmp_path)!r})
    next(stream)
    print("open", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "open\n"
        with pytest.raises(ResumeError, match=f"in use by process {process.pid} on "):
            run(tmp_path, [torch.ones(1)] * 3, torch.neg)
        process.kill()
    assert run(tmp_path, [torch.ones(1)] * 3, torch.neg) == [-1, -1, -1]


def test_copying_a_folder_keeps_its_lock(tmp_path):
    """Other processes stay locked out if this process opens and closes the files, and the copy is free."""
    script = f"""
import torch
from parawrap import ResumeError, parallel
with torch.no_grad(), parallel(torch.neg, ["cpu", "cpu"]) as p:
    try:
        list(p.map([torch.ones(1)] * 3, resume={str(tmp_path / "out")!r}))
    except ResumeError as error:
        print(error)
"""
    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        stream = p.map([torch.ones(1)] * 3, resume=tmp_path / "out")
        next(stream)
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
        found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        assert f"in use by process {os.getpid()} on " in found
        assert [output.item() for output in p.map([torch.ones(1)] * 3, resume=tmp_path / "copy")] == [-1, -1, -1]
        assert len(list(stream)) == 2


def in_fork(check):
    """Return the exit code of a forked child that runs `check`."""
    child = os.fork()
    if child == 0:
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_cannot_share_the_folder(tmp_path):
    """It is refused while the parent's stream is open, and closing its copy of the stream does not unlock the folder."""

    def check():
        with pytest.raises(ResumeError, match=f"in use by process {os.getppid()} on "):
            folder.__enter__()
        stale.__exit__(None, None, None)
        with pytest.raises(ResumeError, match=f"in use by process {os.getppid()} on "):
            folder.__enter__()

    stale, folder = OutputFolder(tmp_path, "target"), OutputFolder(tmp_path, "target")
    with stale:
        assert in_fork(check) == 0
        with pytest.raises(ResumeError, match="in use by another stream"):
            folder.__enter__()
    with folder:
        pass


def test_a_child_that_outlives_a_killed_run_does_not_keep_the_lock(tmp_path):
    """A forked process, such as a worker of a DataLoader, may end later than its parent."""
    script = f"""
import os, sys, torch
from parawrap import parallel
with torch.no_grad(), parallel(torch.neg, ["cpu", "cpu"]) as p:
    stream = p.map([torch.ones(1)] * 3, resume={str(tmp_path)!r})
    next(stream)
    if os.fork() == 0:
        print("child", flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "child\n"
        process.kill()
        process.wait()
        assert run(tmp_path, [torch.ones(1)] * 3, torch.neg) == [-1, -1, -1]


def test_outputs_with_gradients_are_refused(tmp_path):
    """A loaded output has no graph, so the loop would see another value than without `resume`."""
    with parallel(nn.Linear(1, 1), TWO) as p, pytest.raises(ResumeError, match=r"torch\.no_grad"):
        list(p.map(batches(1), resume=tmp_path))


def test_a_gradient_inside_an_object_is_refused(tmp_path):
    """Parawrap does not know the class of the output."""
    linear = nn.Linear(1, 1)
    target = lambda x: Picture(linear(x))  # noqa: E731
    with (
        parallel(target, TWO, join="list") as p,
        pytest.raises(ResumeError, match=r"batch 0 cannot be saved: it has a gradient"),
    ):
        list(p.map(batches(1), resume=tmp_path))


class Scaled(torch.Tensor):
    """A tensor with a scale in a slot."""

    __slots__ = ("scale",)


def test_slots_of_tensors_are_compared():
    """A tensor of a subclass may have state outside its dict."""
    one, same, other = (torch.ones(2).as_subclass(Scaled) for _ in range(3))
    one.scale, same.scale, other.scale = 1, 1, 5
    assert digest_value(one) == digest_value(same) != digest_value(other)


def test_attributes_of_outputs_are_saved(tmp_path):
    """A later run yields what the first one yielded."""

    def target(x):
        output = Marked([x * 2], mark=x.sum())
        output.append(marked(x[:1], "a"))
        return output

    for _ in range(2):
        with torch.no_grad(), parallel(target, TWO) as p:
            (found,) = p.map(batches(1), resume=tmp_path)
        assert (type(found), found.mark, found[1].mark) == (Marked, torch.tensor(0.0), "a")


@pytest.mark.parametrize("second", [partial(torch.add, torch.ones(1)), torch.nn.functional.relu])
def test_another_function_is_refused(tmp_path, second):
    """Also a partial of another function."""
    run(tmp_path, batches(1), partial(torch.mul, torch.ones(1)))
    with pytest.raises(ResumeError, match=r"holds the outputs of partial of .*mul, not of"):
        run(tmp_path, batches(1), second)


def test_an_output_that_cannot_be_saved_is_named(tmp_path):
    """The error gives the batch and the reason."""
    with parallel(lambda x: threading.Lock(), TWO) as p, pytest.raises(ResumeError, match=r"output of batch 0 .*lock"):
        list(p.map(batches(1), resume=tmp_path))


# -- damage


def test_a_damaged_output_is_computed_again(tmp_path, caplog):
    """A checksum finds it, and a log message names the file."""
    run(tmp_path, batches(3))
    file = sorted(tmp_path.glob("*.output"))[1]
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert run(tmp_path, batches(3)) == [0, 2, 4]
    assert computed == {0: 1, 1: 2, 2: 1}
    assert f"{file} is damaged" in caplog.text
    assert run(tmp_path, batches(3)) == [0, 2, 4]
    assert computed == {0: 1, 1: 2, 2: 1}


@pytest.mark.parametrize(
    "form",
    [
        torch.Tensor.to_sparse,
        torch.Tensor.to_sparse_csr,
        torch.Tensor.to_sparse_csc,
        lambda dense: dense.to_sparse_bsr((1, 1)),
        lambda dense: torch.nested.nested_tensor([dense, dense[:1]]),
    ],
    ids=["coo", "csr", "csc", "bsr", "nested"],
)
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.filterwarnings("ignore:.*nested tensors")
def test_a_sparse_or_nested_batch_with_other_values_is_refused(form):
    """Its digest covers the values, not only the shape."""
    assert digest_value(form(torch.eye(2))) == digest_value(form(torch.eye(2)))
    assert digest_value(form(torch.eye(2))) != digest_value(form(torch.eye(2) * 2))
    assert digest_value(form(torch.eye(2))) != digest_value(form(torch.eye(2).flip(0)))


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """A later run with space goes on."""
    with monkeypatch.context() as patch:
        real, written = Path.write_bytes, []

        def write(file, content):
            if len(written) == 3:  # the manifest and two outputs
                raise OSError(errno.ENOSPC, "No space left on device")
            written.append(file)
            return real(file, content)

        patch.setattr(Path, "write_bytes", write)
        with pytest.raises(ResumeError, match=r"000000002\.output cannot be written: .*No space left.*Free some space"):
            run(tmp_path, batches(4), return_exceptions=True)
    assert run(tmp_path, batches(4)) == [0, 2, 4, 6]
    assert computed[0.0] == computed[1.0] == 1


def test_a_folder_that_is_deleted_during_the_stream_is_an_error_of_resume(tmp_path):
    """The output that cannot be written is named."""
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        outputs = p.map(batches(8), resume=tmp_path / "out")
        next(outputs)
        shutil.rmtree(tmp_path / "out")
        with pytest.raises(ResumeError, match=r"000000001\.output cannot be written"):
            next(outputs)


def test_an_output_file_that_is_deleted_during_the_stream_is_computed_again(tmp_path):
    """The stream listed the file at its start."""
    run(tmp_path / "out", batches(8))
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        outputs = p.map(batches(8), resume=tmp_path / "out")
        first = next(outputs)
        (tmp_path / "out" / "000000007.output").unlink()
        assert [output[0].item() for output in [first, *outputs]] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert computed[7.0] == 2


def test_a_damaged_manifest_is_named(tmp_path):
    """A power failure may leave it empty."""
    (tmp_path / "stream.json").touch()
    with pytest.raises(ResumeError, match=r"stream\.json is damaged"):
        run(tmp_path, batches(1))


@pytest.mark.parametrize("text", ["[]", "null", "5"])
def test_a_manifest_of_another_form_is_damaged(tmp_path, text):
    """It is JSON, and no description of a stream."""
    (tmp_path / "stream.json").write_text(text)
    with pytest.raises(ResumeError, match=r"stream\.json is damaged"):
        run(tmp_path, batches(1))


def test_outputs_that_cannot_be_read_or_loaded_are_named(tmp_path, monkeypatch):
    """A folder in place of a file, or a class that no longer exists."""
    run(tmp_path, batches(2))
    (file := tmp_path / "000000001.output").unlink()
    file.mkdir()
    with pytest.raises(ResumeError, match=r"000000001\.output cannot be read"):
        run(tmp_path, batches(2))
    monkeypatch.setattr(torch, "load", Mock(side_effect=AttributeError("Box is gone")))
    with pytest.raises(ResumeError, match=r"000000000\.output cannot be loaded: Box is gone"):
        run(tmp_path, batches(2))


def test_an_empty_output_file_is_computed_again(tmp_path):
    """As a power failure may leave it."""
    run(tmp_path, batches(2))
    min(tmp_path.glob("*.output")).write_bytes(b"")
    assert run(tmp_path, batches(2)) == [0, 2]


def test_a_run_that_died_before_its_first_output_is_no_obstacle(tmp_path):
    """It may leave a lock and files that are not finished."""
    (tmp_path / "lock").write_text("process 1 on another machine")
    (tmp_path / "unfinished").write_text("{")
    assert run(tmp_path, batches(2)) == [0, 2]
    assert not (tmp_path / "unfinished").exists()


def test_a_stream_that_is_collected_while_another_opens_does_not_block_it(tmp_path, monkeypatch):
    """The garbage collector may close an abandoned stream at any moment, also in the lock of the open folders."""

    class Reader:
        def __init__(self, stream):
            self.stream, self.me = stream, self
            next(stream)

    lock = OutputFolder._lock

    def collected(folder):
        gc.collect()
        return lock(folder)

    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        Reader(p.map(batches(2), resume=tmp_path / "abandoned"))
        monkeypatch.setattr(OutputFolder, "_lock", collected)
        assert len(list(p.map(batches(2), resume=tmp_path / "other"))) == 2


# -- killed at random

KILLED = """
import json, os, sys, torch
from parawrap import parallel

folder, log, count = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND), int(sys.argv[3])

def double(x):
    os.write(log, b"%d\\n" % x[0].item())
    return x * 2

seen = []
with torch.no_grad(), parallel(double, ["cpu", "cpu"]) as p:
    for output in p.map((torch.full((2, 1), float(i)) for i in range(count)), resume=folder):
        seen.append(output[0].item())
print(json.dumps(seen))
"""


def numbers_of_outputs(folder):
    return {int(file.stem) for file in folder.glob("*.output")}


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("kills", "count"), [(3, 200), pytest.param(50, 5_000, marks=pytest.mark.long)])
def test_a_run_that_is_killed_at_random_loses_and_doubles_nothing(tmp_path, kills, count):
    """Runs end by SIGKILL at random moments. No saved output is computed again. The last run yields every output once."""
    path, folder, log = write_script(tmp_path, KILLED), tmp_path / "out", tmp_path / "log"
    random_ = random.Random(5)
    committed: dict[int, int] = {}  # how often the batch of each saved output was computed

    def check():
        runs = Counter(map(int, log.read_text().split()))
        assert {number: runs[number] for number in committed} == committed
        assert committed.keys() <= numbers_of_outputs(folder)
        committed.update({number: runs[number] for number in numbers_of_outputs(folder)})

    for saved in sorted(random_.sample(range(count), kills)):
        with closing(scripts.start(path, [folder, log, count], tmp_path, streams=1)) as script:
            eventually(lambda: len(numbers_of_outputs(folder)) >= saved, f"{saved} outputs")  # noqa: B023
            time.sleep(random_.random() / 100)
            script.kill()
            script.communicate(20)
        if log.exists():
            check()
    lines = run_script(tmp_path, KILLED, folder, log, count).splitlines()
    assert json.loads(lines[-1]) == [2.0 * index for index in range(count)]
    check()
    assert committed.keys() == set(range(count))
    assert not (folder / "unfinished").exists()

"""`map(resume=folder)`: each output is computed and saved once, over any number of interrupted runs."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import threading
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from parawrap import ResumeError, parallel
from tests.helpers.processes import is_gone, pids_in, run_script, running_script, scripts, write_script
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


# -- runs


def test_a_second_run_computes_nothing(tmp_path):
    """A longer source adds its new batches."""
    for count in (5, 5, 7):
        assert sorted(run(tmp_path / "out", batches(count), ordered=False)) == [2 * index for index in range(count)]
    assert computed == dict.fromkeys(map(float, range(7)), 1)


def test_an_interrupted_run_goes_on(tmp_path):
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        stream = p.map(batches(9), resume=str(tmp_path), buffersize=1)
        assert [next(stream)[0].item() for _ in range(4)] == [0, 2, 4, 6]
        stream.close()
    assert run(tmp_path, batches(9)) == [2 * index for index in range(9)]
    assert [computed[index] for index in range(4)] == [1] * 4


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


# -- outputs


@dataclass
class Boxes:
    corners: torch.Tensor
    names: list[str]


def test_outputs_of_any_kind_come_back(tmp_path):
    """A part of a large tensor is saved alone, although torch.save would write the whole storage."""
    outputs = [
        {"logits": torch.randn(2, 3), "names": ["a", "b"], "count": 2, "none": None},
        (torch.randn(2, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 4)),
        Boxes(torch.randn(2, 4), ["cat", "dog"]),
        [np.arange(3), "text", 1.5],
        torch.randn(4, 4).to_sparse(),
        torch.randn(100_000)[:2],
    ]
    outputs[2].corners.mark = "a"
    for _ in range(2):
        with torch.no_grad(), parallel(lambda x: outputs[int(x[0])], TWO) as p:
            found = list(p.map(batches(len(outputs)), resume=tmp_path))
        assert [(type(each), repr(each)) for each in found] == [(type(each), repr(each)) for each in outputs]
        assert found[2].corners.mark == "a"
    assert p.stats().calls == 0
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 30_000


@pytest.mark.parametrize(
    ("wrap", "says"),
    [(lambda y: y, r"torch\.no_grad"), (lambda y: threading.Lock(), "output of batch 0 .*lock")],
    ids=["gradient", "lock"],
)
def test_outputs_that_cannot_be_saved(tmp_path, wrap, says):
    """A loaded output has no graph, so the loop would see another value than without `resume`."""
    linear = nn.Linear(1, 1)
    with parallel(lambda x: wrap(linear(x)), TWO, join="list") as p, pytest.raises(ResumeError, match=says):
        list(p.map(batches(1), resume=tmp_path))


# -- the source and the target


def test_a_source_that_changed(tmp_path):
    """The error names the first batch that differs; the outputs before it come out."""
    run(tmp_path, batches(5))
    first, *others = batches(5)
    for changed in (torch.full((2, 1), 7.0), torch.ones(3, 1), torch.ones(2, 1).double(), (torch.ones(2, 1),)):
        outputs = []
        with torch.no_grad(), parallel(Counting(), TWO) as p:
            stream = p.map([first, changed, *others[1:]], resume=tmp_path, return_exceptions=True)
            with pytest.raises(ResumeError, match=r"batch 1 is not the batch that .*seed its shuffling") as caught:
                outputs.extend(stream)
        assert len(outputs) == 1
        assert caught.value.__notes__ == ["while batch 1 of the stream was read, counted from 0"]
    with pytest.raises(ResumeError, match=r"ended after 3 batches, but .* holds the output of batch 4"):
        run(tmp_path, batches(3))


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (Counting(), nn.Linear(1, 1), r"outputs of .*\.Counting\.forward, not of torch\..*\.Linear\.forward"),
        (partial(torch.mul, torch.ones(1)), partial(torch.add, torch.ones(1)), "outputs of partial of .*mul, not of"),
    ],
    ids=["module", "partial"],
)
def test_another_target_is_refused(tmp_path, first, second, says):
    run(tmp_path, batches(1), first)
    with pytest.raises(ResumeError, match=says):
        run(tmp_path, batches(1), second)


@pytest.mark.parametrize("options", [{}, {"ordered": False, "chunksize": 2, "prepare": lambda x: x}], ids=["", "options"])
def test_a_key_is_compared(tmp_path, options):
    """It replaces the batch, and gets it as the source gave it, once per batch and run."""
    seen = []

    def key(batch):
        seen.append(batch[0])
        return batch[0]

    with torch.no_grad(), parallel(lambda name, x: x, TWO) as p:
        for shift in range(2):
            source = [(f"file {number}", torch.full((1,), float(number + shift))) for number in range(4)]
            found = p.map(source, resume=tmp_path, key=key, **options)
            assert sorted(output.item() for output in found) == [0, 1, 2, 3]
        source[2] = ("file 9", source[2][1])
        with pytest.raises(ResumeError, match="batch 2 is not the batch that"):
            list(p.map(source, resume=tmp_path, key=key, **options))
    assert seen[:8] == [f"file {number}" for number in range(4)] * 2


# -- the folder


def test_other_files_are_kept(tmp_path, monkeypatch):
    """~ is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run("~/outputs", batches(1))
    (file := tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ResumeError, match="holds other files, such as"):
        run(tmp_path, batches(2))
    for path in (file, file / "outputs"):
        with pytest.raises(ResumeError, match=r"thesis\.txt.* cannot be used: .*Give the path of a new"):
            run(path, batches(2))
    assert file.read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 2


def test_manifests_that_are_refused(tmp_path):
    """Another release has other digests. A power failure may leave an empty file."""
    for content in ('{"format": 1, "target": "Counting.forward"}', "", "[]", "null"):
        (tmp_path / "stream.json").write_text(content)
        says = "was written by another release of parawrap" if "format" in content else r"stream\.json is damaged"
        with pytest.raises(ResumeError, match=says):
            run(tmp_path, batches(1))


def test_streams_cannot_share_a_folder(tmp_path):
    """Neither by another path, nor after a refusal. The folder is free when the stream ends."""
    (link := tmp_path.parent / f"{tmp_path.name}-link").symlink_to(tmp_path)
    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        stream = p.map(batches(3), resume=tmp_path)
        next(stream)
        for path in (tmp_path, link, tmp_path):
            with pytest.raises(ResumeError, match="in use by another stream of this process"):
                list(p.map(batches(3), resume=path))
        stream.close()
        assert len(list(p.map(batches(3), resume=tmp_path))) == 3


ASK = """
import sys, torch
from parawrap import ResumeError, parallel
with torch.no_grad(), parallel(torch.neg, ["cpu", "cpu"]) as p:
    try:
        print(len(list(p.map([torch.ones(1)] * 3, resume=sys.argv[1]))))
    except ResumeError as error:
        print(error)
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_processes_share_no_folder(tmp_path):
    """Neither a copy of the folder nor a stream that a forked child closes ends the lock."""
    with torch.no_grad(), parallel(torch.neg, TWO) as p:
        stream = p.map([torch.ones(1)] * 3, resume=tmp_path / "out")
        next(stream)
        shutil.copytree(tmp_path / "out", tmp_path / "copy")
        if (child := os.fork()) == 0:
            stream.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert f"in use by process {os.getpid()} on " in run_script(tmp_path, ASK, tmp_path / "out")
        assert len(list(p.map([torch.ones(1)] * 3, resume=tmp_path / "copy"))) == 3
        assert len(list(stream)) == 2


OPEN_STREAM = """
import os, signal, sys, torch
from parawrap import parallel
with torch.no_grad(), parallel(torch.neg, ["cpu", "cpu"]) as p:
    stream = p.map([torch.ones(1)] * 3, resume=sys.argv[1])
    next(stream)
    if os.fork() == 0:
        report_pid(sys.argv[2])
    signal.pause()
"""


def test_a_killed_run_keeps_no_lock(tmp_path):
    """Also if a child that it forked, such as a worker of a DataLoader, outlives it."""
    with running_script(tmp_path, OPEN_STREAM, tmp_path / "out", tmp_path) as script:
        (child,) = pids_in(tmp_path, 1)
        os.kill(script.pid, signal.SIGKILL)
        eventually(lambda: script.poll() is not None, "the end of the run")
        try:
            assert run(tmp_path / "out", [torch.ones(1)] * 3, torch.neg) == [-1, -1, -1]
            assert not is_gone(child)
        finally:
            os.kill(child, signal.SIGKILL)


# -- damage


def test_damaged_outputs_run_again(tmp_path, caplog):
    """A checksum finds damage, and a log message names the file. An empty file, or one that is deleted, is damage, too."""
    run(tmp_path, batches(5))
    files = sorted(tmp_path.glob("*.output"))
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    files[2].write_bytes(b"")
    with torch.no_grad(), parallel(Counting(), TWO) as p:
        outputs = p.map(batches(6), resume=tmp_path)
        first = next(outputs)
        files[4].unlink()
        assert [output[0].item() for output in (first, *outputs)] == [0, 2, 4, 6, 8, 10]
    assert computed == {0: 1, 1: 2, 2: 2, 3: 1, 4: 2, 5: 1}
    assert f"{files[1]} is damaged" in caplog.text


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    """A later run with space goes on."""
    real, written = Path.write_bytes, []

    def write(file, content):
        if len(written) == 3:  # the manifest and two outputs
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(file)
        return real(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", write)
        with pytest.raises(ResumeError, match=r"000000002\.output cannot be written: .*No space left.*Free some space"):
            run(tmp_path, batches(4), return_exceptions=True)
    assert run(tmp_path, batches(4)) == [0, 2, 4, 6]
    assert computed[0.0] == computed[1.0] == 1


def test_outputs_that_cannot_be_loaded(tmp_path, monkeypatch):
    """A folder in place of a file, or a class that no longer exists."""
    run(tmp_path, batches(2))
    (file := tmp_path / "000000001.output").unlink()
    file.mkdir()
    with pytest.raises(ResumeError, match=r"000000001\.output cannot be read"):
        run(tmp_path, batches(2))
    monkeypatch.setattr(torch, "load", Mock(side_effect=AttributeError("Box is gone")))
    with pytest.raises(ResumeError, match=r"000000000\.output cannot be loaded: Box is gone"):
        run(tmp_path, batches(2))


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


def test_a_run_that_is_killed_at_random(tmp_path):
    """No saved output is lost or computed again. The last run yields every output once."""
    path, folder, log = write_script(tmp_path, KILLED), tmp_path / "out", tmp_path / "log"
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
        with closing(scripts.start(path, [folder, log, count], tmp_path, streams=1)) as script:
            eventually(lambda: len(saved()) >= enough, f"{enough} outputs")  # noqa: B023
            script.kill()
            script.communicate(PATIENCE_S)
        check()
    lines = run_script(tmp_path, KILLED, folder, log, count).splitlines()
    assert json.loads(lines[-1]) == [2.0 * index for index in range(count)]
    check()
    assert committed.keys() == set(range(count))
    assert not (folder / "unfinished").exists()

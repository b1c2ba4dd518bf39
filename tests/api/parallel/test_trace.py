"""`p.trace`: when each lane works."""

from __future__ import annotations

import json
import os
import threading

import pytest
import torch
from torch import nn

from parawrap import SessionError, ShardError, parallel
from tests.helpers.waiting import PATIENCE_S

TWO = ["cpu"] * 2


def events_in(path):
    return json.loads(path.read_text())["traceEvents"]


class Net(nn.Linear):
    def embed(self, x):
        return self(x)


def test_spans_name_their_work(tmp_path):
    """Cut calls have the rows of each shard, batches of a stream their number, and plain calls no lane."""
    with torch.no_grad(), parallel(Net(4, 2), TWO, out_dims=0, methods=("forward", "embed")) as p:
        with p.trace(tmp_path / "t.json") as trace:
            p.target(torch.zeros(7, 4))
            list(p.method("embed").map([torch.zeros(rows, 4) for rows in (1, 5)], prepare=lambda batch: batch))
            p.target(torch.zeros(1, 4))
        p.target(torch.zeros(7, 4))
    found = {(span.lane is None, *span.work) for span in trace.spans}
    assert {each for each in found if each[1] != "prepare"} == {
        (False, "forward", None, 4),
        (False, "forward", None, 3),
        (False, "embed", 0, 1),
        (False, "embed", 1, 5),
        (True, "forward", None, None),
    }
    assert {str(span.work) for span in trace.spans} >= {"embed, batch 0, 1 row", "embed, batch 1, 5 rows"}
    for number in range(2):
        prepare, call = (span for span in trace.spans if span.work.batch == number)
        assert (prepare.work.method, prepare.lane) == ("prepare", call.lane)
        assert prepare.end <= call.start
    events = events_in(tmp_path / "t.json")
    assert [event["args"]["name"] for event in events if event["ph"] == "M"][:2] == [f"lane {i} on cpu" for i in range(2)]
    assert len([event for event in events if event["ph"] == "X"]) == len(trace.spans) == 7


def test_traces_may_overlap(tmp_path):
    """A call that runs when a trace is opened is not part of it."""
    begun, go = threading.Event(), threading.Event()

    def wait(x):
        begun.set()
        assert go.wait(PATIENCE_S)
        return x

    with parallel(wait, TWO) as p, p.trace(tmp_path / "outer.json") as outer:
        early = p.submit(torch.zeros(2))
        assert begun.wait(PATIENCE_S)
        with p.trace(tmp_path / "inner.json") as inner:
            go.set()
            early.result(PATIENCE_S)
            p.submit(torch.zeros(3)).result(PATIENCE_S)
    assert [span.work.rows for span in outer.spans] == [2, 3]
    assert [(span.work.rows, span.work.method) for span in inner.spans] == [(3, "wait")]
    with parallel(wait, TWO) as p, pytest.raises(SessionError, match="was already used"):
        inner.__enter__()


def test_the_place_of_the_file(tmp_path, monkeypatch):
    """A relative path is relative to the folder of the call of `trace`, and ~ is the home folder."""
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with parallel(torch.tanh, TWO) as p, p.trace("t.json"), p.trace("~/home.json"):
        p(torch.zeros(7))
        os.chdir("other")
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["home.json", "t.json"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone/t.html", r"the folder of '.*gone/t\.html' does not exist\. Create '.*gone' first"),
        ("t.png", r"'.*t\.png' is not NAME\.html"),
        ("a\0.html", r"'.*a\\x00\.html' cannot be written: embedded null"),
    ],
    ids=["folder", "suffix", "null"],
)
def test_files_that_cannot_be_written(tmp_path, name, says):
    """`trace` raises before the block, and creates nothing."""
    with parallel(torch.tanh, TWO) as p, pytest.raises(ShardError, match=says):
        p.trace(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_trace_after_an_exception(tmp_path):
    """The file has the spans of the call that raised. If it cannot be written, a note of the exception says so."""
    (folder := tmp_path / "folder").mkdir()

    def fail(x):
        if folder.exists() and len(x) == 1:
            folder.rmdir()
        raise ZeroDivisionError

    with parallel(fail, TWO) as p:
        with pytest.raises(ZeroDivisionError), p.trace(tmp_path / "t.json"):
            p(torch.zeros(7))
        with pytest.raises(ZeroDivisionError) as caught, p.trace(folder / "t.json"):
            p(torch.zeros(1))
        folder.mkdir()
        with pytest.raises(FileNotFoundError), p.trace(folder / "t.json"):
            folder.rmdir()
    assert "the trace could not be written" in caught.value.__notes__[-1]
    errors = [event["args"]["error"] for event in events_in(tmp_path / "t.json") if event["ph"] == "X"]
    assert errors == ["ZeroDivisionError"] * 2

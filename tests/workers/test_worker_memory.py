"""Streams do not grow the memory of any process, and sessions leave nothing behind."""

from __future__ import annotations

import itertools
import tempfile
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from parawrap.engine import Entry, StreamOptions, stream

MIB = 1 << 20


@pytest.mark.parametrize(
    ("elements", "batches"),
    [
        pytest.param(64, 500, id="inline"),
        pytest.param(50_000, 300, id="slab, copied"),
        pytest.param(400_000, 100, id="slab, lent"),
        pytest.param(256, 10_000, id="10,000 inline", marks=pytest.mark.long),
        pytest.param(MIB // 4, 10_000, id="10,000 lent", marks=pytest.mark.long),
        pytest.param(16 * MIB, 200, id="200 of 64 MiB", marks=pytest.mark.long),
    ],
)
def test_stream_does_not_grow_memory(opened, elements, batches):
    """After its first batches, a stream takes no more memory, in this process and in the workers."""
    session = opened(model := nn.Identity())
    batch = torch.ones(elements)
    used = []
    source = itertools.chain(itertools.repeat(batch, 50), _noting(used, session, batch), itertools.repeat(batch, batches))
    for output in stream(session, Entry(model), source, StreamOptions(4)):
        del output
    before, after = used[0], _used(session)
    assert after - before < 8 * MIB + 4 * batch.nbytes, "as many batches as are in flight, never all"


def test_slabs_are_reused(opened):
    """A long stream of equal batches uses as many slabs as tensors lie on at one moment."""
    session = opened(model := nn.Identity(), 1)
    for _ in stream(session, Entry(model), itertools.repeat(torch.ones(400_000), 60), StreamOptions(2)):
        pass
    line = session.pool.lanes[0]._worker._line
    assert line._own._made <= 3, "to the worker: two in flight, and the one before them"
    assert len(line._others._maps) <= 5, "from the worker"


@pytest.mark.parametrize("count", [5, pytest.param(300, marks=pytest.mark.long)])
def test_sessions_leave_nothing_behind(opened, monkeypatch, count):
    """Sessions one after another leave no descriptor, thread, process, or folder."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        _check_sessions(opened, count)
        monkeypatch.undo()


def _check_sessions(opened, count):
    model, x = nn.Identity(), torch.ones(40_000)

    def once():
        session = opened(model)
        session.call(Entry(model), (x,), {})
        session.close()
        for thread in threading.enumerate():
            if thread.name.startswith("parawrap-launch"):
                thread.join()

    once()
    once()
    before = _held()
    for _ in range(count):
        once()
    now = _held()
    assert all(map(int.__le__, now, before)), f"{now} are held, and {before} were before"


def _held():
    me = psutil.Process()
    folders = len(list(Path(tempfile.gettempdir()).glob("parawrap-*")))
    return me.num_fds(), threading.active_count(), len(me.children(recursive=True)), folders


def _noting(used, session, batch):
    used.append(_used(session))
    yield batch


def _used(session):
    processes = [psutil.Process(), *(psutil.Process(lane.pid) for lane in session.pool.lanes)]
    return sum(process.memory_info().rss for process in processes)

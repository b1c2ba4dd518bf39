"""Workers that die are replaced, each batch comes out once and in order, and nothing survives a session."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap.engine import Entry, StreamOptions, stream
from parawrap.errors import RankDiedError, SessionError, UnsendableError
from parawrap.workers import _local_worker


class Dying(nn.Module):
    """Kills its process if the batch says so; -1 exits."""

    def forward(self, x):
        if x[0] == -9:
            os.kill(os.getpid(), signal.SIGKILL)
        if x[0] == -1:
            os._exit(7)
        return x * 2


class DyingOnce(nn.Module):
    """Kills its process at the first call that finds the marker file."""

    def __init__(self, marker):
        super().__init__()
        self.marker = Path(marker)

    def forward(self, x):
        if x[0] == -1 and self.marker.exists():
            self.marker.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2


def workers_of(session):
    session.pool.refresh()
    return session.pool.lanes


@pytest.mark.parametrize(("value", "signal_", "code"), [(-9.0, signal.SIGKILL, None), (-1.0, None, 7)])
def test_poison_batch_ends_in_an_error_that_says_how_the_worker_died(opened, value, signal_, code):
    """A batch that kills each worker raises after its retries, and the session works on."""
    session = opened(model := Dying())
    with pytest.raises(RankDiedError, match="worker") as caught:
        session.submit(Entry(model), (torch.tensor([value]),), {}).result()
    assert (caught.value.signal, caught.value.exit_code) == (signal_, code)
    assert_close(session.call(Entry(model), (torch.ones(5),), {}), torch.full((5,), 2.0))


def test_batch_runs_again_after_its_worker_died(opened, tmp_path):
    """With one retry, a worker that dies once is not seen in the outputs."""
    (tmp_path / "marker").touch()
    session = opened(model := DyingOnce(str(tmp_path / "marker")))
    batches = [torch.tensor([float(number)]) for number in (1, 2, -1, 3, 4)]
    outputs = [float(each) for each in stream(session, Entry(model), batches, StreamOptions(4))]
    assert outputs == [2, 4, -2, 6, 8]
    assert not (tmp_path / "marker").exists()


def test_no_retries(opened, tmp_path):
    """With retries=0, the first death is the error."""
    (tmp_path / "marker").touch()
    session = opened(model := DyingOnce(str(tmp_path / "marker")), retries=0)
    with pytest.raises(RankDiedError):
        session.submit(Entry(model), (torch.tensor([-1.0]),), {}).result()


@pytest.mark.parametrize("retries", [1, 0])
def test_death_counts_for_every_batch_of_a_chunk(opened, tmp_path, retries):
    """All batches of a chunk may have run when a worker dies. They run again one by one, so only the cause fails twice."""
    session = opened(model := Dying(), retries=retries)
    batches = [torch.tensor([float(number)]) for number in (1, 2, -9, 3, 4, 5, 6, 7)]
    options = StreamOptions(8, 4, return_exceptions=True)
    outputs = list(stream(session, Entry(model), batches, options))
    failed = [number for number, output in enumerate(outputs) if isinstance(output, RankDiedError)]
    assert failed == ([2] if retries else [0, 1, 2, 3])
    for number in failed:
        note = "\n".join(outputs[number].__notes__)
        assert f"batch {number} of the stream" in note
        assert note.count("of the stream") == 1
        assert ("its chunk of 4" in note) != bool(retries)
    assert [float(each) for number, each in enumerate(outputs) if number not in failed and number != 2] == [
        float(2 * batches[number]) for number in range(8) if number not in failed and number != 2
    ]


@pytest.mark.parametrize("chunksize", [1, 8])
@pytest.mark.parametrize("elements", [3, 20_000], ids=["inline", "slab"])
@pytest.mark.parametrize(
    ("batches", "kills"), [(400, 6), pytest.param(10_000, 50, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_killed_workers_lose_and_repeat_no_batch(opened, batches, kills, elements, chunksize):
    """While workers are killed at random moments, each batch of a stream comes out once, in order."""
    session = opened(model := nn.Identity(), retries=10)
    at = set(random.Random(7).sample(range(batches), kills))

    def source():
        for number in range(batches):
            if number in at:
                victim = random.Random(number).choice(workers_of(session))
                with contextlib.suppress(ProcessLookupError):  # it was killed before, and nothing has noticed yet
                    os.kill(victim.pid, signal.SIGKILL)
            yield torch.full((elements,), float(number))

    options = StreamOptions(4 * chunksize, chunksize)
    outputs = [int(each.unique()) for each in stream(session, Entry(model), source(), options)]
    assert outputs == list(range(batches))


def test_death_between_calls_is_not_seen(opened):
    """Workers that die while idle are replaced by the next call, also after a tensor of the model changed."""
    model = nn.Linear(2, 2)
    session, x = opened(model), torch.randn(5, 2)
    session.call(Entry(model), (x,), {})
    for worker in workers_of(session):
        os.kill(worker.pid, signal.SIGKILL)
    model.weight.mul_(3)
    assert_close(session.call(Entry(model), (x,), {}), model(x))


def test_model_that_cannot_be_sent_is_refused_by_its_path(opened):
    """A model that cannot be pickled raises at the first call, and its workers end with the session."""
    model = nn.Identity()
    model.guard = threading.Lock()
    session = opened(model)
    with pytest.raises(UnsendableError, match="guard"):
        session.call(Entry(model), (torch.ones(9),), {})


def test_replacements_start_from_the_module(opened, monkeypatch):
    """Each replacement starts one worker, never two."""
    started = []
    original = _local_worker.LocalWorker
    monkeypatch.setattr(_local_worker, "LocalWorker", lambda *args: started.append(args[0]) or original(*args))
    session = opened(model := Dying())
    with pytest.raises(RankDiedError):
        session.submit(Entry(model), (torch.tensor([-9.0]),), {}).result()
    session.call(Entry(model), (torch.ones(5),), {})  # waits for the last worker
    assert len(started) == 4, "two at the start, one after each death"


SCRIPT = """
import os, signal, sys, time, torch
from torch import nn
from parawrap import parallel

class Sleeping(nn.Module):
    def forward(self, x):
        time.sleep(60)
        return x

if __name__ == "__main__":
    with torch.no_grad(), parallel(Sleeping(), ["cpu", "cpu"], workers="process") as p:
        p._session.pool.refresh()
        futures = [p.submit(torch.ones(2)) for _ in range(2)]
        print(*[lane.pid for lane in p._session.pool.lanes], flush=True)
        futures[0].result()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_launching_process(tmp_path, number):
    """Ctrl-C and SIGKILL of the launching process end workers that are in the middle of a call."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        process.send_signal(number)
    assert len(workers) == 2
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert not alive


def test_too_little_memory_is_an_error_with_the_size(opened, monkeypatch):
    """A batch that does not fit into shared memory raises, and the worker lives on."""
    session = opened(model := nn.Identity(), 1)
    assert_close(session.submit(Entry(model), (torch.ones(3),), {}).result(), torch.ones(3))

    def refuse(_file, _start, _size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(SessionError, match=r"bytes of shared memory.*smaller batches"):
            session.submit(Entry(model), (torch.ones(100_000),), {}).result()
    assert_close(session.submit(Entry(model), (torch.ones(100_000),), {}).result(), torch.ones(100_000))

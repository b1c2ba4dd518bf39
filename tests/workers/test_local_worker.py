"""Worker processes that die are replaced, each batch comes out once, and
nothing survives a block.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading

import psutil
import pytest
import torch
from torch import nn
from torch.testing import assert_close

from parawrap import RankDiedError, SessionError
from tests.helpers.pools import processes
from tests.helpers.processes import (
    assert_gone,
    assert_nothing_left,
    descendant_pids,
    pids_in,
    running_script,
)
from tests.helpers.scripts import read_script
from tests.helpers.waiting import PATIENCE_S, eventually
from tests.helpers.worker_models import Dying, Where


def batches_of(*values):
    return [torch.tensor([float(value)]) for value in values]


def workers_of(p, x):

    def pids():
        found = {pid for _, pid in p.map([x] * 8)}
        return found if len(found) == 2 else None

    return sorted(eventually(pids, "calls in both workers"))


def test_batch_that_kills_every_worker():
    """After its retries, the error says how the worker died, and the block works on."""
    with processes(Dying()) as p:
        for value, number, code in ((-9, signal.SIGKILL, None), (-1, None, 7)):
            with pytest.raises(
                RankDiedError, match=r"worker . on cpu (was killed by SIGKILL|exited with code 7)"
            ) as caught:
                p.submit(*batches_of(value)).result()
            assert (caught.value.signal, caught.value.exit_code) == (number, code)
        assert_close(p(torch.ones(5)), torch.full((5,), 2.0))


@pytest.mark.parametrize("retries", [1, 0])
def test_death_in_a_chunk(retries):
    """All batches of a chunk may have run when a worker dies.

    They run again one by one, so only the cause fails twice.
    """
    values = (1, 2, -9, 3, 4, 5, 6, 7)
    with processes(Dying(), retries=retries) as p:
        outputs = list(
            p.map(batches_of(*values), buffersize=8, chunksize=4, return_exceptions=True)
        )
    failed = [number for number, output in enumerate(outputs) if isinstance(output, RankDiedError)]
    assert failed == ([2] if retries else [0, 1, 2, 3])
    for number in failed:
        note = "\n".join(outputs[number].__notes__)
        assert note.count("of the stream") == note.count(f"batch {number} of the stream") == 1
        assert ("its chunk of 4" in note) != bool(retries)
    assert [float(outputs[n]) for n in range(8) if n not in failed] == [
        2 * values[n] for n in range(8) if n not in failed
    ]


@pytest.mark.parametrize(
    ("batches", "every", "elements", "chunksize"),
    [
        (200, 50, 3, 8),
        (200, 50, 20_000, 1),
        pytest.param(3_000, 150, 20_000, 8, marks=pytest.mark.long),
    ],
)
def test_killed_workers_lose_no_batch(batches, every, elements, chunksize):
    pids, outputs = [0], []
    with processes(Where(), retries=10) as p:

        def source():
            for number in range(batches):
                if number % every == every - 1 and pids[-1] in descendant_pids():
                    os.kill(pids[-1], signal.SIGKILL)
                yield torch.full((elements,), float(number))

        for output, pid in p.map(source(), buffersize=4 * chunksize, chunksize=chunksize):
            outputs.append(int(output.unique()))
            pids.append(pid)
    assert outputs == list(range(batches))
    assert len({*pids}) > 3


def test_death_of_an_idle_worker():
    """No call ran, so it counts for none, and the new worker has the model of the next call."""
    model = nn.Sequential(nn.Linear(2, 2), Where())
    x = torch.randn(5, 2)
    with processes(model, retries=0) as p:
        pids = workers_of(p, x)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: not any(map(psutil.pid_exists, pids)), "the end of all threads of the workers"
        )
        model[0].weight.mul_(3)
        assert_close(p.submit(x).result()[0], model[0](x))
        assert not {*pids} & {*workers_of(p, x)}


def test_too_little_memory_is_an_error(monkeypatch):
    """The error has the size, and the worker lives on."""

    def refuse(_file, _start, _size):
        raise OSError(errno.ENOSPC, "No space left on device")

    with processes(nn.Identity()) as p:
        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", refuse)
            assert_close(p.submit(torch.ones(3)).result(), torch.ones(3))
            with pytest.raises(SessionError, match=r"bytes of shared memory.*smaller batches"):
                p.submit(torch.ones(100_000)).result()
        assert_close(p.submit(torch.ones(100_000)).result(), torch.ones(100_000))


def test_blocks_leave_nothing_behind():

    def open_a_block():
        with processes(nn.Identity()) as p:
            p(torch.ones(40_000))

    assert_nothing_left([os.getpid()], open_a_block, lambda: [open_a_block() for _ in range(3)])


def test_abandoned_block_ends():
    """A block that nothing refers to leaves no process and no thread."""
    p = processes(Where())
    pid = p.submit(torch.ones(1)).result()[1]
    unread = p.map(batches_of(*range(9)))
    next(unread)
    del p, unread
    gc.collect()
    assert_gone([pid])
    eventually(
        lambda: not [each for each in threading.enumerate() if each.name.startswith("parawrap")],
        "the threads",
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_their_parent(tmp_path, number):
    """A script that Ctrl-C interrupts exits, and its workers end without the end of their blocks:
    an idle one, and two in the middle of a call. They end also if the script is killed.
    """
    with running_script(tmp_path, read_script("unclosed_block"), tmp_path) as parent:
        pids = pids_in(tmp_path, 3)
        os.kill(parent.pid, number)
        output, _ = parent.communicate(timeout=PATIENCE_S)
        assert_gone(pids)
    interrupted = number == signal.SIGINT
    assert output == "[0.0, 0.0]\n" + interrupted * "interrupted\n"
    assert parent.returncode == (0 if interrupted else -number)

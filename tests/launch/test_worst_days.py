"""Launches under odd conditions: forks, file systems without locks, non-Unicode texts, damaged keys."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parawrap import LaunchError, Platform, current_rank, wrapper
from parawrap.launch.coordinator._interruptible_event import Latch
from parawrap.launch.rank._control_thread import _MainThread, _waits_in
from parawrap.launch.rank._signed_values import Signer
from tests.helpers.processes import notes_of, ranks
from tests.helpers.waiting import PATIENCE_S


def test_an_exception_whose_text_is_not_unicode_arrives():
    """The text of a non-UTF-8 file name has lone surrogates, which cannot be encoded, and arrives unchanged."""

    def fails():
        raise ValueError(os.fsdecode(b"caf\xe9"))

    with pytest.raises(ValueError, match="caf") as caught:
        wrapper(ranks())(fails)()
    assert str(caught.value) == "caf\udce9"
    assert "in fails" in notes_of(caught.value)


def test_a_fork_during_the_start_does_not_delay_the_launch(monkeypatch):
    """A process forked while ranks start does not keep the pipe open that reports a rank's end."""
    children, send = [], socket.send_fds

    def fork_and_send(*arguments):
        if not children:
            children.append(os.fork())
            if children[0] == 0:
                time.sleep(600)
                os._exit(0)
        return send(*arguments)

    wrapper(ranks())(lambda: 1)()
    monkeypatch.setattr(socket, "send_fds", fork_and_send)
    try:
        began = time.monotonic()
        assert wrapper(ranks())(lambda: 1)() == (1, 1)
        assert time.monotonic() - began < PATIENCE_S
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_results_raises_in_a_fork_of_the_parent():
    """LaunchError names the launch's process, because its thread does not run in the fork."""
    launch = wrapper(ranks(1))(lambda: 1).submit()
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            launch.results()
        except LaunchError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as message:
        assert f"belongs to process {os.getpid()}" in message.read()
    os.waitpid(pid, 0)
    assert launch.results(timeout=PATIENCE_S) == (1,)


def test_a_file_system_without_locks_works(monkeypatch, tmp_path):
    """A launch works without file locks, which only help to find folders of killed processes."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other test processes remove unlocked folders from /tmp
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_checkpoint_code_does_not_count_as_waiting():
    """Frames of torch.distributed count as waiting for ranks, but frames of torch.distributed.checkpoint do not."""
    assert _waits_in(dist.distributed_c10d.__file__)
    assert not _waits_in(dcp.__file__)
    assert not _waits_in(__file__)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_damaged_key_raises(size, tmp_path, monkeypatch):
    """A key file of the wrong size raises LaunchError, which says to delete the file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_SECRET", raising=False)
    Signer()
    (tmp_path / ".parawrap" / "key").write_bytes(b"k" * size)
    with pytest.raises(LaunchError, match=f"has {size} bytes instead of 32: delete it"):
        Signer()


def test_a_latch_wakes_all_waiting_threads():
    """`set` wakes each waiting thread, later waits return at once, and a wait can time out before `set`."""
    latch = Latch()
    assert not latch.wait(0.01)
    waiting = [threading.Thread(target=latch.wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    latch.set()
    for thread in waiting:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    assert latch.is_set()
    assert latch.wait()


def test_the_backward_of_ddp_counts_as_waiting_for_other_ranks():
    """A rank that waits in the backward of DistributedDataParallel is seen to wait, while the other computes."""

    def train():
        rank = current_rank().global_rank
        store = dist.distributed_c10d._get_default_store()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            waited = float(store.get("waited"))
            loss.backward()
            return waited
        observed = _MainThread()

        def observe():
            until = time.monotonic() + 20
            while observed.waits_s < 0.3 and time.monotonic() < until:
                time.sleep(0.05)
                observed.look()
            store.set("waited", str(observed.waits_s))

        threading.Thread(target=observe).start()
        loss.backward()
        return None

    assert wrapper(Platform(device="cpu", n_cpus=2, verbose=False))(train)()[1] >= 0.3

"""Odd days of a launch on this machine: forks, file systems without locks, odd texts, damaged keys."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
import time

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from parawrap import LaunchError, wrapper
from parawrap.launch.ranks._control import _waits_in
from parawrap.launch.ranks._secret import Signer
from parawrap.launch.watch._latch import Latch
from tests.launch.processes import PATIENCE_S, SOON_S, notes_of, ranks


def test_an_exception_whose_text_is_not_unicode_arrives():
    """A file name that is not UTF-8 has lone surrogates, which no encoding takes."""

    def fails():
        raise ValueError(os.fsdecode(b"caf\xe9"))

    with pytest.raises(ValueError, match="caf") as caught:
        wrapper(ranks())(fails)()
    assert str(caught.value) == "caf\udce9"
    assert "in fails" in notes_of(caught.value)


def test_a_process_that_is_forked_during_a_start_does_not_hold_up_the_launch(monkeypatch):
    """It does not keep the pipe open that reports the end of the rank."""
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
        assert time.monotonic() - began < SOON_S / 2
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)


def test_a_launch_is_refused_in_a_fork_of_its_process():
    """Its thread does not run there, so waiting would never end."""
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
    with os.fdopen(reader) as told:
        assert f"belongs to process {os.getpid()}" in told.read()
    os.waitpid(pid, 0)
    assert launch.results(timeout=PATIENCE_S) == (1,)


def test_a_file_system_without_locks_keeps_no_launch_from_starting(monkeypatch):
    """Locks only serve to find the folders of processes that were killed."""

    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert wrapper(ranks())(lambda: 1)() == (1, 1)


def test_a_checkpoint_does_not_wait_for_ranks():
    """Code of torch.distributed.checkpoint may wait for a disk; other code of torch.distributed waits for ranks."""
    assert _waits_in(dist.distributed_c10d.__file__)
    assert not _waits_in(dcp.__file__)
    assert not _waits_in(__file__)


@pytest.mark.parametrize("size", [0, 31, 33])
def test_a_damaged_key_is_refused(size, tmp_path, monkeypatch):
    """A key of another size may be known to others; the error says what to do."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PARAWRAP_SECRET", raising=False)
    Signer()
    (tmp_path / ".parawrap" / "key").write_bytes(b"k" * size)
    with pytest.raises(LaunchError, match=f"has {size} bytes and not 32: delete it"):
        Signer()


def test_a_latch_wakes_all_who_wait():
    """Each waiting thread goes on, a later wait returns at once, and a wait with a limit ends without it."""
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

"""Channels between the launching process and its ranks."""

import os
import socket
import threading
from contextlib import closing
from pathlib import Path

import pytest

from parawrap import Platform, wrapper
from parawrap.launch.messages._channel import Channel


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as here, closing(Channel(theirs)) as there:
        yield here, there


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_large_message_does_not_wait_for_its_reader(ends):
    """A body beyond the buffer of a socket is sent before the other end reads, and arrives with the attached files."""
    here, there = ends
    body = os.urandom(4 << 20)
    reader, writer = os.pipe()
    sending = threading.Thread(target=here.send, args=("word", body, [reader]), daemon=True)
    sending.start()
    sending.join(10)
    assert not sending.is_alive()
    message = there.receive()
    assert (message.word, message.body, len(message.files)) == ("word", body, 1)
    os.write(writer, b"x")
    assert os.read(message.files[0], 1) == b"x"
    for file in (reader, writer, *message.files):
        os.close(file)


def test_large_messages_leave_no_open_files(ends):
    """Both ends close the files of large bodies."""
    here, there = ends
    before = open_files()
    for _ in range(20):
        assert here.send("word", bytes(1 << 20))
        assert there.receive().body == bytes(1 << 20)
    assert open_files() == before


def test_a_large_environment_reaches_ranks_that_start_slowly(monkeypatch):
    """Ranks with a fresh interpreter, which read their message seconds later, get 600 KiB of environment variables."""
    for number in range(6):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    platform = Platform(device="cpu", n_cpus=2, ipc_groups=None, spawn_method="spawn", verbose=False)
    assert wrapper(platform)(lambda: len(os.environ["LARGE_5"]))() == (100_000, 100_000)

"""Channels between the launching process and its ranks."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import psutil

from parawrap.launch.messages._channel import Channel


def test_large_body_never_blocks():
    """It is sent before the other end reads, next to other files, and leaves no file open."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with closing(Channel(ours)) as here, closing(Channel(theirs)) as there:
        before = psutil.Process().num_fds()
        assert here.send("word", bytes(4 << 20), [theirs.fileno()])
        message = there.receive()
        assert (message.word, message.body, len(message.files)) == ("word", bytes(4 << 20), 1)
        os.close(message.files[0])
        assert psutil.Process().num_fds() == before

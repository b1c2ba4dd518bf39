"""Channels between the launching process and its ranks."""

from __future__ import annotations

import os
import socket
from contextlib import closing

from parawrap.launch.messages._channel import Channel


def test_message_needs_no_reader():
    """Bodies beyond the buffer of a socket are sent before the other end reads, and arrive with the attached files."""
    ours, theirs = socket.socketpair()
    with closing(Channel(ours)) as here, closing(Channel(theirs)) as there:
        body = os.urandom(4 << 20)
        reader, writer = os.pipe()
        assert all(here.send("word", body, [reader]) for _ in range(3))
        for _ in range(3):
            message = there.receive()
            assert (message.word, message.body, len(message.files)) == ("word", body, 1)
            os.write(writer, b"x")
            assert os.read(message.files[0], 1) == b"x"
            os.close(message.files[0])
        os.close(reader)
        os.close(writer)

"""Messages between two processes: a word, a small body, and a block, over one end of a socket.

::

    encode ──► letter ──► unsent pieces ──► socket ──► room ──► message
                  └── block ──► slab, or a shared file ──────────┘

The block has the memory of tensors. Up to 32 KiB travel in the socket, and one read takes the whole
message. On one machine, a larger block lies in a slab, or in a memory file that several receivers
map. Over TCP, everything travels in the socket.

A launching process never waits for a wire: parts of messages that have arrived, and parts that have
not left yet, stay in buffers. A rank waits: for its next message, and until an answer has left.

EOF and connection errors mean that the other end is gone. A limit of this process, on files or on
memory, is an error here, and the connection goes on.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import socket
import struct
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from parawrap.processes.forks import close_in_forked_children
from parawrap.processes.shared_memory import (
    ALIGNMENT,
    Block,
    Slabs,
    aligned_copy,
    aligned_room,
    map_file,
)

# The head of a message: the bytes of the body and of the block, the place of the block, True if its
# slab is new, and how many numbers of released and of retired slabs follow
_HEAD = struct.Struct("<QQq?HH")
_IN_SOCKET, _IN_FILE = -1, -2  # places of a block. Others are numbers of slabs
# Bytes of a body, and of both: larger ones do not travel in the socket of one machine, which
# buffers about 200 KiB, so that a send rarely waits
_LARGEST_INLINE = 32 << 10
_ROOM = 64 << 10  # bytes of one read: a small message, and the begin of the next
_FILE_ROOM = socket.CMSG_SPACE(array("i").itemsize)  # each message brings one file at most
# Plain integers: an enum takes longer than the read. macOS lacks the first
_CLOSE_ON_EXEC = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))
_TRUNCATED = int(socket.MSG_CTRUNC)
_NUMBER = 8  # bytes of a number of a slab, in an array of the type "q"
_MOST_NUMBERS = 1 << 12  # of slabs in one message: others wait for the next
# Errors that report a limit of this process: the connection goes on. All others end it
_LIMITS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ETOOMANYREFS)
_EMPTY = memoryview(b"")
# Seconds without a message, after which a rank returns large slabs. A guess: training steps are
# shorter
_WIRE_IDLE_S = 3.0

SLABS_ONLY = ""
"""The word of a message that has only numbers of slabs."""

LOST = "lost"
"""The word of a received message whose own word was in memory that this process could not map."""


class Message(NamedTuple):
    """One message. `error` is the limit of this process at which it could not take the block."""

    word: str
    body: Any
    block: memoryview
    error: OSError | None = None


class Letter(NamedTuple):
    """A message that is ready: it must be posted or dropped before the next is encoded."""

    pieces: list[Any]
    block: Block | None  # kept alive: it owns the file, or the memory of the pieces
    place: int = _IN_SOCKET  # `_IN_FILE`, or the number of a slab
    file: int | None = None  # leaves with the first piece
    # True if `file` is that of a new slab: the wire closes the file once it has left
    is_new: bool = False
    released: Sequence[int] = ()  # numbers of slabs in the message
    retired: Sequence[int] = ()


class _Unsent(NamedTuple):
    """A piece of a message that has not left."""

    data: Any
    letter: Letter  # keeps the memory of the data alive
    brings_file: bool  # True if the file of the letter leaves with it


@dataclass
class _Partial:
    """A message that is larger than the room, and has not arrived completely."""

    head: tuple[Any, ...]
    content: memoryview  # what follows the head
    filled: int  # how many bytes of it have arrived


class Wire:
    """One end of a connection between two processes. A forked child of this process closes it.

    One thread at a time uses it; threads that share it hold a lock. With `waits`, sending and
    reading block until they are done.
    """

    def __init__(self, sock: socket.socket, *, waits: bool = False) -> None:
        sock.settimeout(None if waits else 0.0)  # whatever socket.setdefaulttimeout says
        self._socket = sock
        self._is_local = sock.family == socket.AF_UNIX
        self._slabs = Slabs()
        self._unsent: deque[_Unsent] = deque()
        self._room = memoryview(bytearray(_ROOM))
        self._start = self._end = 0  # of the bytes in the room that belong to no message yet
        self._partial: _Partial | None = None
        # Files of messages that are not complete. None for a file that the kernel has dropped
        self._files: deque[int | None] = deque()
        self._messages: deque[Message] = deque()  # for `receive`: one read may return several
        close_in_forked_children(self)

    def fileno(self) -> int:
        """Return the socket's descriptor for selectors; -1 once closed."""
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._socket.fileno() >= 0

    def lend_all(self) -> None:
        """Copy no tensors out of the slabs in which they arrive: the reader drops them soon."""
        self._slabs.lends_all = True

    # Sending

    @property
    def has_unsent(self) -> bool:
        """True if a part of a message has not left: call `flush` when the socket has room."""
        return bool(self._unsent)

    def send(self, word: str, body: Any = None, block: Block | None = None) -> bool:
        """Send a message. Return False if the other end is closed.

        Raises:
            SessionError: If memory lacks room for the block. Nothing is sent.
            OSError: If this process has reached a limit. Nothing is sent.
        """
        return self.post(self.encode(pickle.dumps((word, body), 5), block))

    def encode(self, pickled: bytes, block: Block | None = None) -> Letter:
        """Return a message of a pickled word and body. On one machine, the block is copied here.

        Raises as `send` does.
        """
        slabs = self._slabs
        if block is None:
            parts, block_file, size = [], None, 0
        else:
            parts, block_file, size = block.parts, block.file, block.size
        is_small = size + len(pickled) <= _LARGEST_INLINE
        # Most messages take this way: one piece, and no numbers of slabs
        if is_small and block_file is None and not (slabs.has_released or slabs.retired):
            head = _HEAD.pack(len(pickled), size, _IN_SOCKET, False, 0, 0)
            data = b"".join((head, pickled, *parts))
            return Letter([data], block)
        # `content` travels in the socket, with `file` if the other end lacks it. On one machine,
        # other parts are at `place`
        place, file, is_new = _IN_SOCKET, None, False
        content = [pickled, *parts]
        if self._is_local and block_file is not None:
            place, file, content = _IN_FILE, block_file, [pickled]
        elif self._is_local and not is_small:
            if len(pickled) > _LARGEST_INLINE:  # the body follows the block in the slab
                place, file = slabs.fill([*parts, pickled], size + len(pickled))
                content = []
            else:
                place, file = slabs.fill(parts, size)
                content = [pickled]
            is_new = file is not None

        # From here on nothing may raise: only `drop` returns the slab and the numbers
        released, retired = self._take_numbers()
        numbers = array("q", released + retired).tobytes()
        counts = len(released), len(retired)
        head = _HEAD.pack(len(pickled), size, place, is_new, *counts)
        pieces = [head, numbers, *content]
        # One piece if it is small: a copy costs less than another system call
        if sum(map(len, pieces)) <= _ROOM + _LARGEST_INLINE:
            pieces = [b"".join(pieces)]
        return Letter(pieces, block, place, file, is_new, released, retired)

    def drop(self, letter: Letter) -> None:
        """Give back the parts of a message that is not sent."""
        # At the front, where they were: the other end waits longest for them
        self._slabs.return_released(letter.released)
        self._slabs.retired[:0] = letter.retired
        if letter.is_new:
            _close_new(letter)
            self._slabs.forget(letter.place)
        elif letter.place >= 0:  # a slab that the other end has
            self._slabs.free(letter.place)

    def post(self, letter: Letter) -> bool:
        """Send a message as far as the socket takes it. Return False if the other end is closed.

        Raises:
            OSError: If this process has reached a limit. The message is dropped.
        """
        is_first = not self._unsent
        self.enqueue(letter)
        try:
            return self._send_unsent()
        except OSError:
            has_left_in_part = self._unsent[0].data is not letter.pieces[0]
            # Then it is too late to drop the message: the rest leaves later
            if has_left_in_part or not is_first:
                return True
            self._unsent.clear()
            self.drop(letter)
            raise

    def enqueue(self, letter: Letter) -> None:
        """Have a message leave with the next `flush`, after those before it."""
        first, *others = letter.pieces
        self._unsent.append(_Unsent(first, letter, letter.file is not None))
        for piece in others:
            self._unsent.append(_Unsent(piece, letter, brings_file=False))

    def flush(self) -> bool:
        """Send unsent data as far as the socket takes it. Return False if the end is closed."""
        try:
            return self._send_unsent()
        except OSError:  # a limit of this process: the data leaves later
            return True

    def _send_unsent(self) -> bool:
        """Send as `flush`, but raise OSError at a limit of this process."""
        while self._unsent:
            data, letter, brings_file = self._unsent[0]
            try:
                if brings_file:
                    assert letter.file is not None
                    sent = socket.send_fds(self._socket, [data], [letter.file])
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                return True
            except OSError as error:
                if error.errno in _LIMITS:
                    raise
                self._discard_unsent()
                return False
            if sent < len(data):
                rest = memoryview(data).cast("B")[sent:]
                # The file has left with the first byte
                self._unsent[0] = _Unsent(rest, letter, brings_file=False)
            else:
                self._unsent.popleft()
            if brings_file:
                _close_new(letter)
        return True

    def _discard_unsent(self) -> None:
        """Drop unsent data: the other end is gone."""
        for _, letter, brings_file in self._unsent:
            if brings_file:
                _close_new(letter)
        self._unsent.clear()

    def _take_numbers(self) -> tuple[list[int], list[int]]:
        """Take the numbers of slabs for one message: of released ones, and of retired ones."""
        retired = self._slabs.retired[:_MOST_NUMBERS]
        del self._slabs.retired[:_MOST_NUMBERS]
        return self._slabs.take_released(_MOST_NUMBERS), retired

    # Receiving

    def receive(self) -> Message | None:
        """Wait for the next message. Return None if the other end is closed."""
        while True:
            while self._messages:
                message = self._messages.popleft()
                if message.word != SLABS_ONLY:
                    return message
            try:
                # Only then with a time limit, which takes two system calls
                if self._slabs.has_large or self._slabs.has_released:
                    self._read_or_trim()
                else:
                    self._messages += self.read()
            except EOFError:
                return None

    def _read_or_trim(self) -> None:
        """Read, or return large slabs to the system if no message comes for some seconds."""
        self._socket.settimeout(_WIRE_IDLE_S)
        try:
            self._messages += self.read()
        except TimeoutError:
            self._socket.settimeout(None)  # first: `trim` must not time out within its message
            self.trim()
        finally:
            self._socket.settimeout(None)

    def read(self) -> list[Message]:
        """Read once, and return the messages that are complete.

        Messages with the word SLABS_ONLY need no handling: `read` has taken their numbers.

        Raises:
            EOFError: If the other end is closed.
            TimeoutError: If `receive` has set a time limit, and nothing has arrived.
        """
        found: list[Message] = []
        if (partial := self._partial) is not None:
            partial.filled += self._read_into(partial.content[partial.filled :])
            if partial.filled == len(partial.content):
                self._partial = None
                found.append(self._open(partial.head, partial.content, is_own=True))
        else:
            # There is room: `_take` moves the rest to the front, and large messages elsewhere
            self._end += self._read_into(self._room[self._end :])
            while self._start < self._end and (message := self._take()) is not None:
                found.append(message)
        return found

    def _read_into(self, memory: memoryview) -> int:
        """Read bytes, and note the file that came with them. Return 0 if nothing is there."""
        try:
            if self._is_local:
                count, attached, flags, _ = self._socket.recvmsg_into(
                    [memory], _FILE_ROOM, _CLOSE_ON_EXEC
                )
                if attached:  # at most one file: a read ends before the data with the next one
                    ((_, _, data),) = attached
                    (file,) = array("i", data)
                    self._files.append(file)
                elif flags & _TRUNCATED:  # the kernel has dropped a file: a limit of this process
                    self._files.append(None)
            else:
                count = self._socket.recv_into(memory)
        except BlockingIOError:
            return 0
        except TimeoutError:  # an OSError too, but not the end of the connection
            raise
        except OSError as error:
            if error.errno in _LIMITS:  # nothing was read
                return 0
            raise EOFError from error
        if not count:
            raise EOFError
        return count

    def _take(self) -> Message | None:
        """Take the first message from the room. Return None if it has not arrived completely."""
        arrived = self._room[self._start : self._end]
        if len(arrived) >= _HEAD.size:
            head = _HEAD.unpack_from(arrived)
            body_size, block_size, place, _, n_released, n_retired = head
            before = _NUMBER * (n_released + n_retired)  # bytes between the head and the block
            is_body_in_slab = place >= 0 and body_size > _LARGEST_INLINE
            if not is_body_in_slab:
                before += body_size
            needed = before + (block_size if place == _IN_SOCKET else 0)
            content = arrived[_HEAD.size : _HEAD.size + needed]
            if len(content) == needed:
                message = self._open(head, content, is_own=False)
                self._start += _HEAD.size + needed
                if self._start == self._end:
                    self._start = self._end = 0
                return message
            if _HEAD.size + needed > _ROOM:
                pad = -before % ALIGNMENT  # in front, so that the block is aligned
                memory = aligned_room(pad + needed)[pad:]
                memory[: len(content)] = content
                # The next reads write into this memory: a large message is not copied twice
                self._partial = _Partial(head, memory, len(content))
                self._start = self._end = 0
                return None
        if self._start:  # to the front: the rest of the message needs the room
            self._room[: len(arrived)] = bytes(arrived)
            self._start, self._end = 0, len(arrived)
        return None

    def _open(self, head: tuple[Any, ...], content: memoryview, *, is_own: bool) -> Message:
        """Return a complete message. `is_own` is False if the content is in the room."""
        body_size, block_size, place, is_new, n_released, n_retired = head
        is_body_in_slab = place >= 0 and body_size > _LARGEST_INLINE
        at = _NUMBER * (n_released + n_retired)
        if at > 0:
            numbers = array("q", bytes(content[:at]))
            self._slabs.take_back(numbers[:n_released], numbers[n_released:])
        pickled, block = content[at : at + body_size], content[at + body_size :]
        try:
            if place == _IN_FILE:
                block = self._map_file()
            elif is_body_in_slab:
                slab = self._read_slab(place, block_size + body_size, is_new=is_new)
                block, pickled = slab[:block_size], slab[block_size:]
            elif place >= 0:
                block = self._read_slab(place, block_size, is_new=is_new)
            elif block_size > 0 and not is_own:  # the next read overwrites the room
                block = aligned_copy(block)
        except OSError as reason:
            said = reason.strerror or str(reason)
            error = OSError(reason.errno, f"this process cannot take a message: {said}")
            if is_body_in_slab:
                return Message(LOST, None, _EMPTY, error)
            word, body = pickle.loads(pickled)
            return Message(word, body, _EMPTY, error)
        word, body = pickle.loads(pickled)
        return Message(word, body, block if block_size > 0 else _EMPTY)

    def _read_slab(self, number: int, size: int, *, is_new: bool) -> memoryview:
        """Return a block in a slab, whose file has arrived if it is new."""
        file = None
        if is_new:
            file = self._files.popleft()
            if file is None:
                self._slabs.refuse(number)
                raise _too_many_files()
        return self._slabs.read(number, size, file)

    def _map_file(self) -> memoryview:
        """Return the bytes of the file that has arrived with a message."""
        file = self._files.popleft()
        if file is None:
            raise _too_many_files()
        try:
            return map_file(file)
        finally:
            os.close(file)

    # The end

    def trim(self) -> None:
        """Return large slabs to the system, and send the numbers that the other end waits for."""
        self._slabs.trim()
        if self._slabs.retired or self._slabs.has_released:
            with contextlib.suppress(OSError):  # at a limit, the next message has the numbers
                self.send(SLABS_ONLY)

    def shut(self) -> None:
        """End the connection at both ends, also if a forked child has this one.

        Messages that have arrived can still be read.
        """
        with contextlib.suppress(OSError):  # the other end is gone, or this one is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The other end receives end of file."""
        self._discard_unsent()
        for file in self._files:  # of messages that have not arrived completely
            if file is not None:
                os.close(file)
        self._files.clear()
        self._slabs.close()
        self._socket.close()


def _close_new(letter: Letter) -> None:
    """Close the file of a new slab. The file of a block belongs to the block."""
    if letter.is_new and letter.file is not None:
        os.close(letter.file)


def _too_many_files() -> OSError:
    return OSError(errno.EMFILE, os.strerror(errno.EMFILE))

"""How many batches of a stream travel in one message: about 5 ms of measured work."""

from __future__ import annotations

from time import perf_counter_ns

from parawrap.engine.streams import StreamSize

# The time of the work in one message: long compared with the time that a message takes
TARGET_NS = 5_000_000
# The bytes of the tensors in one message. A batch that exceeds them is sent at once, so it needs no
# copy
MOST_BYTES = 256 << 10
_MOST = 64  # batches in one message; a guess that no test has contradicted
# Chunks per lane that the caller has not read: two in the worker, and one to replace them
_READ_AHEAD = 3


class ChunkSize:
    """The size of the chunks of one stream. For one thread.

    Measured time changes only the schedule, never a value. Without retries, each batch travels
    alone: the batches of a chunk must not fail because another one killed the worker.

    `each_ns` is the time that a worker needs for a batch; None if it is not known.

    Attributes:
        most: The largest number of batches in flight.
    """

    def __init__(
        self, lanes: int, size: StreamSize, *, retries: int, each_ns: float | None
    ) -> None:
        self._lanes = lanes
        self._fixed = size.chunksize  # None if measured times decide
        if self._fixed is None and not retries:
            self._fixed = 1
        self._most = _MOST
        if size.buffersize is not None:  # each lane has two messages
            self._most = max(1, size.buffersize // (2 * lanes))
        self._left = size.total  # batches to come; None if it is not known
        self._size = self._fixed or self._fit(each_ns)
        self._goal = 1  # the size of the open chunk
        self._until = 0  # the open chunk gets no more batches after this time
        self.most = _READ_AHEAD * lanes * (size.chunksize or _MOST)

    @property
    def ahead(self) -> int:
        """The number of batches that keep all lanes busy."""
        return _READ_AHEAD * self._lanes * self._size

    def open(self, each_ns: float | None) -> int:
        """Begin a chunk, and return the number of its batches."""
        self._until = perf_counter_ns() + TARGET_NS
        if self._fixed is None:
            # At most four times as large as the last one: a single measurement may be far off
            self._size = min(self._fit(each_ns), 4 * self._size)
        self._goal = self._size
        if self._fixed is None and self._left is not None:
            # Smaller near the end, so that all workers end at about the same time
            even = self._left // (2 * self._lanes)
            smallest = max(1, self._size // 4)
            self._goal = min(self._size, max(smallest, even))
        return self._goal

    def note_batch(self, batches: int, n_bytes: int) -> bool:
        """Note another batch of the open chunk. Return True if the chunk must be sent now.

        Args:
            batches: The number of its batches now.
            n_bytes: The number of bytes of its tensors now.
        """
        if self._left is not None:
            self._left -= 1
        # A batch that is ready does not wait long for the next one of a slow source
        is_late = self._fixed is None and perf_counter_ns() > self._until
        return is_late or batches >= self._goal or n_bytes > MOST_BYTES

    def _fit(self, each_ns: float | None) -> int:
        """Return the number of batches that a worker runs in the time of one message."""
        if not each_ns:
            return 1
        return max(1, min(self._most, int(TARGET_NS / each_ns)))

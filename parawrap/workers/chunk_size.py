"""How many batches of a stream travel in one message: about 5 ms of measured work."""

from __future__ import annotations

from time import perf_counter_ns

from parawrap.engine.streams import StreamSize

TARGET_NS = 5_000_000  # of work in one message
# Of the tensors of a message. A larger one is the last of its message, so it is not copied
MOST_BYTES = 256 << 10
_MOST = 64  # batches in one message; a guess that no test has contradicted
# Chunks per lane that the caller has not read: two in the worker, and one to replace them
_READ_AHEAD = 3


class ChunkSize:
    """The size of the chunks of one stream. Only the schedule depends on time, never a value.

    Without retries, each batch travels alone: the batches of a chunk must not run again because one
    killed the worker.

    Attributes:
        most: The largest number of batches in flight.
    """

    def __init__(
        self, lanes: int, size: StreamSize, *, retries: int, each_ns: float | None
    ) -> None:
        self._lanes = lanes
        self._given = size.chunksize
        if self._given is None and not retries:
            self._given = 1
        self._most = _MOST
        if size.buffersize is not None:  # each lane has two messages
            self._most = max(1, size.buffersize // (2 * lanes))
        self._left = size.total  # batches to come; None if it is unknown
        self._size = self._given or self._fit(each_ns)
        self._goal = 1  # batches of the open chunk
        self._until = 0  # the open chunk gets no more batches then
        self.most = _READ_AHEAD * lanes * (size.chunksize or _MOST)

    @property
    def ahead(self) -> int:
        """The number of batches that keep all lanes busy."""
        return _READ_AHEAD * self._lanes * self._size

    def open(self, each_ns: float | None) -> int:
        """Begin a chunk, and return the number of its batches.

        `each_ns` is the time of a batch; None if it is unknown.
        """
        self._goal, self._until = self._size, perf_counter_ns() + TARGET_NS
        if self._given is None:
            # At most four times as large as the last one: a single measurement may be far off
            self._goal = self._size = min(self._fit(each_ns), 4 * self._size)
            if self._left is not None:  # smaller near the end, for all workers to end together
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
        # The batches of a slow source do not wait for each other
        is_late = self._given is None and perf_counter_ns() > self._until
        return is_late or batches >= self._goal or n_bytes > MOST_BYTES

    def _fit(self, each_ns: float | None) -> int:
        if not each_ns:
            return 1
        return max(1, min(self._most, int(TARGET_NS / each_ns)))

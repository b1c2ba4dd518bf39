"""The process of a worker on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.processes.outcomes import traceback_of
from parawrap.processes.pickling import pickle_apart, unpack
from parawrap.workers._server import Server, pack_error

__all__ = ["Actor", "PickleAndBuffers"]

PickleAndBuffers = tuple[bytes, list[Any]]
"""A pickle, and buffers that Ray moves without pickling their data."""


class Actor:
    """Answers requests, one after another. Runs as a Ray actor."""

    def __init__(self, device: str, threads: int, seed: int, path: list[str]) -> None:
        sys.path[:0] = [each for each in path if each not in sys.path]  # of the driver, for the modules of its model
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._server = Server(torch.device(device))

    def started(self) -> int:
        """Return the process id."""
        return os.getpid()

    def take_model(self, packed: Any) -> tuple[bool, int, PickleAndBuffers]:
        """Take a packed model."""
        return self._answer("model", lambda: unpack(memoryview(bytearray(packed))))

    def answer(self, word: str, parcel: PickleAndBuffers) -> tuple[bool, int, PickleAndBuffers]:
        """Return True if the request raised, the nanoseconds that it took, and the value or the exception."""
        return self._answer(word, lambda: loaded(parcel))

    def _answer(self, word: str, load: Callable[[], Any]) -> tuple[bool, int, PickleAndBuffers]:
        start = perf_counter_ns()
        try:
            value = pack_apart(self._server.answer(word, load()), "the output")
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
            return True, perf_counter_ns() - start, (pack_error(error), [traceback_of(error)])
        return False, perf_counter_ns() - start, value


def pack_apart(value: Any, address: str) -> PickleAndBuffers:
    """Return a pickle and its buffers, as Ray takes them. Raises UnsendableError."""
    import numpy as np

    pickled, buffers = pickle_apart(value, address)
    return bytes(pickled), [np.frombuffer(buffer, dtype=np.uint8) for buffer in buffers]


def loaded(parcel: PickleAndBuffers) -> Any:
    """Return a value. Its tensors own their memory: arrays from Ray's object store are read-only."""
    pickled, buffers = parcel
    return pickle.loads(pickled, buffers=[bytearray(buffer) for buffer in buffers])

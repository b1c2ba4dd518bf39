"""The process of a worker on a Ray cluster."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.processes.outcomes import pack_exception, traceback_of
from parawrap.processes.pickling import unpack
from parawrap.workers.packing import Block, Packer, aligned
from parawrap.workers.worker import Calls, Server

Parcel = tuple[bytes, Any]
"""The pickled body of a message, and its block as an array, which Ray moves without pickling."""


class Actor:
    """Answers messages, one after another. Runs as a Ray actor."""

    def __init__(self, device: str, threads: int, seed: int, path: list[str]) -> None:
        sys.path[:0] = [each for each in path if each not in sys.path]  # of the driver, for the modules of its model
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._server = Server(torch.device(device))

    def started(self) -> int:
        """Return the process id."""
        return os.getpid()

    def take_model(self, packed: Any) -> tuple[bool, int, Parcel]:
        """Take a packed model."""
        return _answer(lambda: (self._server.take_model(unpack(memoryview(bytearray(packed)))["model"]), Packer()))

    def build_model(self, packed: bytes) -> tuple[bool, int, Parcel]:
        """Build a model."""
        return _answer(lambda: (self._server.build_model(packed), Packer()))

    def call(self, parcel: Parcel) -> tuple[bool, int, Parcel]:
        """Make the calls of a message."""
        return _answer(lambda: self._server.answer(Calls(*pickle.loads(parcel[0])), block_of(parcel)))


def _answer(work: Callable[[], tuple[Any, Packer]]) -> tuple[bool, int, Parcel]:
    """Return True if the work failed as a whole, the nanoseconds that it took, and the answer or the exception."""
    start = perf_counter_ns()
    try:
        body, packer = work()
        return False, perf_counter_ns() - start, parcel_of(body, packer)
    except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
        failed = pack_exception(error).to_bytes(), traceback_of(error)
        return True, perf_counter_ns() - start, parcel_of(failed, Packer())


def parcel_of(body: Any, packer: Packer) -> Parcel:
    """Return a message as Ray takes it."""
    import numpy as np

    return pickle.dumps(body, 5), np.frombuffer(b"".join(packer.pieces), dtype=np.uint8)


def block_of(parcel: Parcel) -> Block:
    """Return the block of a message. It owns its memory: arrays from Ray's object store are read-only."""
    return aligned(memoryview(parcel[1]))

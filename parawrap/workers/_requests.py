"""The requests that workers answer, and the parts of a call that travel with each request."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from parawrap.errors import UnsendableError
from parawrap.lanes import Lane, Modes
from parawrap.launch import pickled_apart
from parawrap.workers._server import Call, Returned, SentModes, SentWarning
from parawrap.workers._worker_lane import Answer, Request, Worker

__all__ = ["CallRequest", "ChangeRequest", "ModelRequest", "PackedModes", "warn_again"]


class CallRequest(Request):
    """A call. `read` makes the result from what it returned. `prepare` is a number and a pickled function."""

    is_call = True
    __slots__ = ("_call", "_is_inference", "_prepare", "_read", "is_whole")

    def __init__(
        self,
        call: Call,
        read: Callable[[Returned, Lane], Any] | None = None,
        prepare: tuple[int, bytes] | None = None,
        *,
        is_inference: bool,
    ) -> None:
        super().__init__()
        self._call = call
        self.is_whole = read is not None
        self._read = read
        self._prepare = prepare
        self._is_inference = is_inference

    def send(self, worker: Worker) -> None:
        call = self._call
        if self._prepare is not None:
            number, pickled = self._prepare
            call = call._replace(prepare=(number, None if worker.function == number else pickled))
        try:
            worker.send(self.number, "call", tuple(call), "the call")
        except UnsendableError:
            pickled_apart({"args": call.args, "kwargs": call.kwargs}, "")  # raises with the address of the argument
            raise
        if call.prepare is not None:
            worker.function = call.prepare[0]

    def result(self, answer: Answer, lane: Lane) -> Any:
        if self._is_inference:  # tensors that are made now are inference tensors, as in the plain call
            with torch.inference_mode():
                returned = Returned(*answer.read())
        else:
            returned = Returned(*answer.read())
        read, self._read = self._read, None  # it refers to the pool, which must not end in a lane's thread
        return returned if read is None else read(returned, lane)


class ModelRequest(Request):
    """The whole model."""

    __slots__ = ("_send",)

    def __init__(self, send: Callable[[Worker, int], None]) -> None:
        super().__init__()
        self._send = send

    def send(self, worker: Worker) -> None:
        self._send(worker, self.number)

    def result(self, answer: Answer, lane: Lane) -> None:
        answer.read()


class ChangeRequest(Request):
    """New values of tensors of the model, by their positions."""

    __slots__ = ("_changed",)

    def __init__(self, changed: Sequence[tuple[int, torch.Tensor]]) -> None:
        super().__init__()
        self._changed = list(changed)

    def send(self, worker: Worker) -> None:
        worker.send(self.number, "tensors_changed", self._changed, "the model")

    def result(self, answer: Answer, lane: Lane) -> None:
        answer.read()


class PackedModes:
    """Pickles the modes of calls. They rarely change between calls."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._last: tuple[SentModes | None, bytes] = None, b""

    def __call__(self, modes: Modes) -> bytes:
        sent = SentModes.of(modes)
        last, data = self._last
        if sent != last:
            data = pickle.dumps(sent)
            self._last = sent, data
        return data


def warn_again(warned: Iterable[SentWarning]) -> None:
    """Give the warnings of a worker in this process, under its filters."""
    for each in warned:
        warnings.warn_explicit(*each)

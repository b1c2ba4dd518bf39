"""The requests that workers answer, and the parts of a call that travel with each request."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from parawrap.engine.call import Lane, Modes
from parawrap.errors import UnsendableError
from parawrap.processes.pickling import pickle_apart
from parawrap.workers._server import Answered, CallOutput, SentModes, SentWarning, WorkerCall, unpickle
from parawrap.workers._worker_lane import Answer, Request, Worker, WorkerLane, raise_from_worker

__all__ = ["CallRequest", "ChunkRequest", "ModelRequest", "PackedModes", "warn_again"]


_given_warnings: dict[str, dict[Any, Any]] = {}  # by file: "once per line" holds for all workers together


class CallRequest(Request):
    """A call. `read` makes the result from what it returned. `prepare` is a number and a pickled function."""

    __slots__ = ("_call", "_is_inference", "_prepare", "_read", "is_whole")

    def __init__(
        self,
        call: WorkerCall,
        read: Callable[[CallOutput, Lane], Any] | None = None,
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

    @property
    def calls(self) -> int:
        return 1

    def fields(self, function: int) -> tuple[tuple[Any, ...], int]:
        """Return the fields of the call for a worker with that `prepare`, and the number of the one that it then has."""
        call = self._call
        if self._prepare is None:
            return tuple(call), function
        number, pickled = self._prepare
        return tuple(call._replace(prepare=(number, None if function == number else pickled))), number

    def send(self, worker: Worker) -> None:
        fields, function = self.fields(worker.function)
        try:
            worker.send(self.number, "call", fields, "the call")
        except UnsendableError:
            pickle_apart({"args": self._call.args, "kwargs": self._call.kwargs}, "")  # raises with the argument's address
            raise
        worker.function = function

    def result(self, answer: Answer, lane: Lane) -> Any:
        with (
            torch.inference_mode() if self._is_inference else nullcontext()
        ):  # new tensors are like those of the plain call
            returned = CallOutput(*answer.read())
        read, self._read = self._read, None  # it refers to the pool, which must not end in a lane's thread
        return returned if read is None else read(returned, lane)


class ChunkRequest(Request):
    """Several whole calls, in one message and one answer.

    If the answer is an error, the worker could not read the message. Each call is then sent alone.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[CallRequest]) -> None:
        super().__init__()
        self._parts = parts
        missing = [*range(len(parts))]
        for part in parts:  # no callback holds this request, which holds the futures
            part.future.add_done_callback(partial(_count_down, missing, self.future))

    @property
    def calls(self) -> int:
        return len(self._parts)

    def parts(self) -> Sequence[CallRequest]:
        return self._parts

    def start(self) -> bool:
        self._parts = [part for part in self._parts if part.start()]
        return bool(self._parts)

    def cancel(self) -> None:
        for part in self._parts:
            part.cancel()

    def fail(self, error: BaseException) -> None:
        for part in self._parts:
            part.fail(error)

    def send(self, worker: Worker) -> None:
        chunk, function = [], worker.function
        for part in self._parts:
            fields, function = part.fields(function)
            chunk.append(fields)
        worker.send(self.number, "calls", chunk, "the calls")
        worker.function = function

    def finish(self, answer: Answer, lane: WorkerLane) -> None:
        try:
            answered = [Answered(*each) for each in answer.read()]
        except BaseException:  # noqa: BLE001
            lane.post_parts(self)
            return
        for part, (start, end, value, traceback) in zip(self._parts, answered, strict=True):
            read = partial(unpickle, value)
            if traceback is not None:
                read = partial(raise_from_worker, value, traceback, f"worker {lane.index} on {lane.device}")
            part.finish(Answer(self.number, answer.start + start, answer.start + end, read), lane)

    def result(self, answer: Answer, lane: Lane) -> None:
        """Do nothing: each part has its result."""


def _count_down(missing: list[int], whole: Future[Any], _: object) -> None:
    """Note that one part has ended. The one that takes 0, which is the last, ends the whole."""
    if missing.pop() == 0:
        whole.set_result(None)


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
        warnings.warn_explicit(*each, registry=_given_warnings.setdefault(each.filename, {}))

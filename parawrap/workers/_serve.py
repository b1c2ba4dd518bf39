"""The process of a local worker: answer requests until the connection closes."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from time import perf_counter_ns

import torch

from parawrap.processes.outcomes import traceback_of
from parawrap.processes.pickling import map_file, unpack
from parawrap.workers._line import Arrival, Line, Message
from parawrap.workers._server import Server, pack_error

__all__ = ["serve_lane"]


def serve_lane(file: int, device: str, threads: int, seed: int) -> None:
    """Answer the requests that arrive at a socket. Runs as the only rank of a launch."""
    signal.signal(signal.SIGTERM, _exit)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    line = Line(socket.socket(fileno=file), copies_small=False)
    server = Server(torch.device(device))
    try:
        while (request := line.receive()) is not None:
            _answer(line, server, request)
            del request  # its tensors lie in a slab that the next request may use
    except ConnectionError:
        pass  # the launching process has exited
    finally:
        line.close()


def _exit(number: int, _: object) -> None:
    """Exit without unwinding: the launching process ends a worker that it does not need any more, also during a call."""
    with contextlib.suppress(RuntimeError):  # the signal came during a write
        sys.stdout.flush()
    os._exit(128 + number)


def _answer(line: Line, server: Server, request: Arrival) -> None:
    start = perf_counter_ns()
    try:
        value = server.answer(request.word, _value_of(request))
        line.send(Message("returned", value, request.number, start, perf_counter_ns()), "the output")
    except ConnectionError:
        raise
    except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
        _report(line, error, request.number, start)


def _value_of(request: Arrival) -> object:
    if request.file is None:
        return request.load()
    try:
        return unpack(map_file(request.file))
    finally:
        os.close(request.file)


def _report(line: Line, error: BaseException, number: int, start: int) -> None:
    raised = pack_error(error), traceback_of(error)
    line.send(Message("raised", raised, number, start, perf_counter_ns()), "the exception")

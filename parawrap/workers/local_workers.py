"""Workers on this machine: each is the only rank of a pool of processes, without process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Collection, Sequence
from itertools import count
from time import perf_counter_ns
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import RankDiedError, add_note
from parawrap.launch import Place, Platform
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.outcomes import Died, Ending, pack_exception, traceback_of
from parawrap.processes.output import Printer, Transcript
from parawrap.processes.pickling import Packed, map_file, unpack
from parawrap.processes.pool import Call, Limits, Pool
from parawrap.processes.process import Assignment
from parawrap.processes.script import SentScript
from parawrap.processes.server import PRELOADABLE, LocalStarter
from parawrap.processes.settings import Settings
from parawrap.workers.connection import Connection, Message
from parawrap.workers.lanes import Reply, error_from_worker
from parawrap.workers.model import SEEDS
from parawrap.workers.packing import Packer
from parawrap.workers.worker import Answer, Calls, Server

_LAST_S = 5.0  # for the end of a process that closed its connection
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # in malloc.h
_NOTHING = Packer()


# -- in this process


class LocalWorkers:
    """Starts the workers of one block on this machine. They share its cores, and each has its own random numbers."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices)) or 1
        self._numbers = count(1)

    def start(self, lane: int) -> LocalWorker:
        """Start the worker of a lane."""
        return LocalWorker(lane, self.devices[lane], self._threads, (torch.initial_seed() + next(self._numbers)) % SEEDS)

    def poll(self, workers: Sequence[Any], timeout_s: float | None) -> Collection[int]:
        """Wait until a worker has answered or ended, and return the positions of such workers."""
        poll, positions = select.poll(), {}
        for position, worker in enumerate(workers):
            file = worker.fileno()
            if file < 0:  # its connection was closed here
                return [position]
            positions[file] = position
            poll.register(file, select.POLLIN)
        return [positions[file] for file, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)]

    def end(self) -> None:
        """Do nothing: local workers share nothing."""


class LocalWorker:
    """A process that answers messages in the order of sending. One thread at a time uses it."""

    def __init__(self, index: int, device: torch.device, threads: int, seed: int) -> None:
        self.label = f"worker {index} on {device}"
        self.function = -1
        platform = Platform(device="cpu", n_cpus=1, launcher="local", ipc_groups=None, seed=None, name=f"worker-{index}")
        set_up = RankSetUp(platform, Place.of(0, 1, 1), store=None)
        assignment = Assignment(Settings.here(), set_up, _LAST_S, stays=False, modules=PRELOADABLE)
        self._printer = Printer()
        self._transcript = Transcript(self._printer, "", None)
        self._ending: Ending | BaseException | None = None
        self._pool = Pool(
            LocalStarter(), [assignment], [self._transcript], Limits(_LAST_S), wants_groups=False, watches=False
        )
        ours, its = socket.socketpair()
        self._connection = Connection(ours, lends=False)
        packed = SentScript().pack_call(serve, (str(device), threads, seed), {})
        call = Call(self.label, [0], packed, files=[its.detach()])
        self._thread = threading.Thread(target=self._supervise, args=(call,), name=f"parawrap-{self.label}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the connection's descriptor; -1 once closed."""
        return self._connection.fileno()

    @property
    def has_more(self) -> bool:
        """True if a further answer may have arrived with the last one."""
        return self._connection.has_more

    def send(self, body: tuple[Any, ...], packer: Packer) -> None:
        """Send calls.

        Raises:
            SessionError: If memory lacks room for their tensors. Nothing is sent then.
            ConnectionError: If the process has ended.
        """
        self._connection.send(("calls", body), packer)

    def send_model(self, model: Packed | bytes) -> None:
        """Send a model, or a pickled call that builds it."""
        if isinstance(model, Packed):
            self._connection.send(("model", None), _NOTHING, file=model.file())
        else:
            self._connection.send(("build", model), _NOTHING)

    def receive(self) -> Reply | BaseException | None:
        """Wait for the next reply, or the exception of a model that cannot be made; None if the process has ended."""
        message = self._connection.receive()
        if message is None:
            return None
        word, value = message.body
        if word == "failed":
            packed, traceback = value
            return error_from_worker(packed, traceback, self.label)
        return Reply(value, message.block, message.given, message.start, message.end)

    def death(self) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended."""
        self._connection.close()
        self._thread.join(_LAST_S)
        ending = self._ending
        self.close()
        died = ending.outcomes.get(0) if isinstance(ending, Ending) else None
        number, code = (died.signal, died.code) if isinstance(died, Died) else (None, None)
        how = f"was killed by {getattr(number, 'name', number)}" if number is not None else f"exited with code {code or 0}"
        error = RankDiedError(f"{self.label} {how}", signal=number, exit_code=None if number is not None else code)
        if isinstance(died, Died) and died.last_words:
            add_note(error, f"its last output:\n{died.last_words}")
        if isinstance(ending, BaseException):
            add_note(error, str(ending))
        return error

    def close(self, *, at_once: bool = True) -> None:
        """End the process, and wait for its end. Unless `at_once`, an idle process gets time to exit on its own."""
        self._connection.close()
        if not at_once:
            self._thread.join(_LAST_S)
        self._pool.post(self._pool.cancel)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _supervise(self, call: Call) -> None:
        """Supervise the process until it has ended."""
        try:
            try:
                self._pool.fork()
                self._ending = self._pool.set_up()
                if self._ending.is_success:
                    self._ending = self._pool.call(call)
            finally:
                if not call.has_begun:
                    for file in call.files:
                        os.close(file)
                self._pool.close()
        except BaseException as error:  # noqa: BLE001 (`death` has it)
            self._ending = error
        finally:
            self._transcript.finish()
            self._printer.finish()


# -- in the worker


def serve(file: int, device: str, threads: int, seed: int) -> None:
    """Answer the messages that arrive at a socket. Runs as the function of a rank."""
    signal.signal(signal.SIGTERM, _exit)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    _keep_memory()
    connection = Connection(socket.socket(fileno=file), lends=True)
    server = Server(torch.device(device))
    try:
        while (message := connection.receive()) is not None:
            _answer(connection, server, message)
            del message  # its tensors lie in a slab that the next message may use
    except ConnectionError:
        pass  # the launching process has exited
    finally:
        connection.close()


def _keep_memory() -> None:
    """Have malloc keep freed memory: large outputs then need no new pages from the kernel."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _exit(number: int, _: object) -> None:
    """Exit without unwinding: the launching process ends a worker that it does not need any more, also during a call."""
    with contextlib.suppress(RuntimeError):  # the signal came during a write
        sys.stdout.flush()
    os._exit(128 + number)


def _answer(connection: Connection, server: Server, message: Message) -> None:
    start = perf_counter_ns()
    word, value = message.body
    body: Any
    try:
        if word == "calls":
            body, packer = server.answer(Calls(*value), message.block, message.addresses)
        elif word == "model":
            assert message.file is not None
            body, packer = server.take_model(_unpack(message.file)), _NOTHING
        else:
            body, packer = server.build_model(value), _NOTHING
    except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
        connection.send(("failed", _describe(error)), _NOTHING)
        return
    try:
        connection.send(("done", body), packer, start=start, end=perf_counter_ns(), given=message.slab)
    except ConnectionError:
        raise
    except Exception as error:  # noqa: BLE001 (memory lacks room)
        failed = tuple(Answer(None, None, _describe(error), None, start, start))
        connection.send(("done", [failed] * len(body)), _NOTHING, start=start, end=perf_counter_ns())


def _describe(error: BaseException) -> tuple[bytes, str]:
    return pack_exception(error).to_bytes(), traceback_of(error)


def _unpack(file: int) -> Any:
    try:
        return unpack(map_file(file))["model"]
    finally:
        os.close(file)

"""Workers on this machine: each is the only rank of a pool of processes, without process groups."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import threading
from collections.abc import Collection, Sequence
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import RankDiedError, SessionError, add_note
from parawrap.launch import Place, Platform
from parawrap.launch.set_up import RankSetUp
from parawrap.processes.fork_server import fork_server
from parawrap.processes.outcomes import Died, Ending
from parawrap.processes.output import Printer, Transcript
from parawrap.processes.pickling import Packed, map_file
from parawrap.processes.pool import Call, Pool
from parawrap.processes.rank_process import Assignment
from parawrap.processes.script_globals import SentScript
from parawrap.processes.settings import Settings
from parawrap.workers.connection import Connection
from parawrap.workers.packing import Packer
from parawrap.workers.worker import Form, Server

_LAST_S = 5.0  # for the end of a process that closed its connection
_LOOK_S = 0.2  # between two looks for workers that other threads have started meanwhile
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # in malloc.h


# -- in this process


class LocalWorkers:
    """Starts the workers of one block on this machine. They share its cores."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices)) or 1

    def start(self, lane: int, seed: int) -> LocalWorker:
        """Start the worker of a lane."""
        return LocalWorker(lane, self.devices[lane], self._threads, seed)

    def poll(self, workers: Sequence[Any], timeout_s: float | None) -> Collection[int]:
        """Wait until a worker has answered or ended, for a moment at most. Return the positions of such workers."""
        poll, positions = select.poll(), {}
        for position, worker in enumerate(workers):
            file = worker.fileno()
            if file < 0:  # its connection was closed here
                return [position]
            positions[file] = position
            poll.register(file, select.POLLIN)
        return [positions[file] for file, _ in poll.poll(1000 * (_LOOK_S if timeout_s is None else timeout_s))]

    def end(self) -> None:
        """Do nothing: local workers share nothing."""


class LocalWorker:
    """A process that answers messages in the order of sending. One thread at a time uses it."""

    def __init__(self, index: int, device: torch.device, threads: int, seed: int) -> None:
        self._label = f"worker {index} on {device}"
        platform = Platform(device="cpu", n_cpus=1, launcher="local", ipc_groups=None, seed=None, name=f"worker-{index}")
        set_up = RankSetUp(platform, Place.of(0, 1, 1), store=None)
        assignment = Assignment(Settings.here(), set_up.enter, set_up.regroup, _LAST_S, stays=False)
        self._printer = Printer()
        self._transcript = Transcript(self._printer, "", None)
        self._ending: Ending | BaseException | None = None
        self._pool = Pool(fork_server(), [assignment], [self._transcript], watches=False)
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection = Connection(ours, lends=False)
        serving = its, SentScript().pack_call(serve, (str(device), threads, seed), {})
        self._thread = threading.Thread(target=self._supervise, args=serving, name=f"parawrap-{self._label}", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the connection's descriptor; -1 once closed."""
        return self._connection.fileno()

    def send(self, body: tuple[Any, ...], packer: Packer, model: Packed | None) -> None:
        """Send calls, and the model that they and the later ones need if it is another one.

        Raises:
            SessionError: If memory lacks room for their tensors. Nothing is sent then.
            ConnectionError: If the process has ended.
        """
        self._connection.send(body, packer, None if model is None else model.file())

    def receive(self) -> tuple[list[tuple[Any, ...]], memoryview] | None:
        """Wait for the answers to the next message, and their block; None if the process has ended."""
        message = self._connection.receive()
        return None if message is None else message[:2]

    def death(self) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended."""
        self.stop(at_once=False)
        self.join()
        died = self._ending.outcomes.get(0) if isinstance(self._ending, Ending) else None
        if not isinstance(died, Died):
            return RankDiedError(f"{self._label} ended: {getattr(self._ending, 'lost', self._ending)}")
        code = None if died.signal is not None else died.code
        error = RankDiedError(f"{self._label} {died.summary}", signal=died.signal, exit_code=code)
        if died.last_words:
            add_note(error, f"its last output:\n{died.last_words}")
        return error

    def stop(self, *, at_once: bool) -> None:
        """Begin to end the process. Unless `at_once`, it has time to exit on its own."""
        self._connection.close()
        if at_once:
            self._pool.post(self._pool.cancel)

    def join(self) -> None:
        """Wait for the end of the process. If it is late, it is killed."""
        if self._thread is not threading.current_thread():  # where the garbage collector may end a block
            self._thread.join(_LAST_S)
            self._pool.post(self._pool.cancel)
            self._thread.join()

    def _supervise(self, its: socket.socket, packed: Packed) -> None:
        """Supervise the process until it has ended. It gets its end of the connection with the call of `serve`."""
        try:
            with contextlib.closing(self._pool), its:
                self._pool.fork()
                self._ending = self._pool.set_up()
                if self._ending.is_success:
                    self._ending = self._pool.call(Call(self._label, [0], packed, files=[its.detach()]))
        except BaseException as error:  # noqa: BLE001 (`death` has it)
            self._ending = error
        finally:
            self._transcript.finish()
            self._printer.finish()


# -- in the worker


def serve(file: int, device: str, threads: int, seed: int) -> None:
    """Answer the messages that arrive at a socket. Runs as the function of a rank."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ends the process also during a call, without unwinding
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    _keep_memory()
    connection = Connection(socket.socket(fileno=file), lends=True)
    server = Server(torch.device(device))
    with contextlib.closing(connection), contextlib.suppress(ConnectionError):  # the launching process has exited
        while (message := connection.receive()) is not None:
            (form, items), block, model = message
            if model is not None:
                server.take_model(map_file(model))
                os.close(model)
            answers, packer = server.answer(Form(*form), items, block)
            try:
                connection.send(answers, packer)
            except SessionError as error:  # memory lacks room
                connection.send(*server.fail(items, error))
            del message, block, answers, packer  # the tensors lie in a slab that the next message may use


def _keep_memory() -> None:
    """Have malloc keep freed memory: large outputs then need no new pages from the kernel."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)

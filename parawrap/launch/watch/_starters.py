"""The three ways to start a rank's process on this machine, each of which hands it one end of a line.

What they guarantee: whatever the way, how the process ended can be read from its status pipe, once, as an exit code or as
minus the number of the signal that killed it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple, NoReturn, Protocol

import torch

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch.parcels._wire import close_in_forked_children, receive_exactly
from parawrap.launch.ranks._worker import PRELOADABLE, run_rank
from parawrap.launch.watch._forkserver import FORK, LOAD, REQUEST, STATUS

__all__ = ["Started", "Starter", "interpreter", "starter_named", "status_pipe_of", "stop_server"]

# Variables that libraries read while they are loaded: with another value, a warm process is another one.
_READ_AT_LOAD = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "ATEN_", "TORCH_", "PYTORCH_", "MALLOC_", "GLIBC_", "LD_",
    "DYLD_", "PYTHON",
)  # fmt: skip


_STOP_S = 60.0


class Started(NamedTuple):
    """A process that runs: its id, and the pipe from which its end is read. Whoever takes it closes the pipe."""

    pid: int
    status: int


class Starter(Protocol):
    """Starts ranks. Safe to use from any thread."""

    def start(self, line: socket.socket, grace_s: float) -> Started:
        """Start one; the caller closes its copy of `line` afterwards."""
        ...

    def load(self, names: Iterable[str]) -> None:
        """Take note that ranks import these modules, if that helps the next ones."""


def starter_named(method: str) -> Starter:
    """The starter of a platform's ``spawn_method``.

    Raises:
        PlatformError: fork was asked for where CUDA runs in this process.
    """
    if method == "forkserver":
        return _server_for_now()
    if method == "spawn":
        return _Spawn()
    if torch.cuda.is_initialized():
        msg = (
            "spawn_method='fork': CUDA runs in this process already, and does not work in a fork of it: "
            "give 'forkserver' or 'spawn', or launch before CUDA is used"
        )
        raise PlatformError(msg)
    return _Fork()


def interpreter(script: str) -> list[str]:
    """A command that runs `script` in a fresh interpreter with this one's import path, and without the user's main file.

    Garbage is not collected until `script` says so: while torch is imported, a sixth of the time would go into that.
    """
    path = [each for each in sys.path if isinstance(each, str)]  # Python itself passes over all others
    return [sys.executable, "-P", "-c", f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; {script}"]


class _Fork:
    """Forks this very process: at once, and with everything that it has loaded, held and locked."""

    def start(self, line: socket.socket, grace_s: float) -> Started:
        pid = os.fork()
        if pid == 0:
            _become_rank(line)
        return Started(pid, status_pipe_of(lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))

    def load(self, names: Iterable[str]) -> None:
        pass


def _become_rank(line: socket.socket) -> NoReturn:
    """In a fork of this process, which is never to go on as the program that was forked."""
    try:
        atexit._clear()  # what the parent does at its end is the parent's affair
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork, and it would wait for them
        run_rank(line.dup())
    finally:
        traceback.print_exc()
        os._exit(1)


class _Spawn:
    """Starts a fresh interpreter for each rank."""

    def start(self, line: socket.socket, grace_s: float) -> Started:
        script = (
            "from parawrap.launch.parcels._wire import line_at_standard_input; "
            "from parawrap.launch.ranks._worker import run_rank; run_rank(line_at_standard_input())"
        )
        process = subprocess.Popen(interpreter(script), stdin=line.fileno(), start_new_session=True)
        return Started(process.pid, status_pipe_of(lambda: _end_of(process)))

    def load(self, names: Iterable[str]) -> None:
        pass


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """How it ended. Where the parent ignores its children nobody can know, though Popen says 0.

    Raises:
        ChildProcessError: nobody can know.
    """
    process.returncode = 0
    process.returncode = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    return process.returncode


def status_pipe_of(wait: Callable[[], int]) -> int:
    """A pipe into which a thread writes how a child of this process ended, as soon as it did."""
    reader, writer = os.pipe()

    def report() -> None:
        with contextlib.suppress(ChildProcessError, BrokenPipeError):  # somebody else waited for it; nobody wants to know
            os.write(writer, STATUS.pack(wait()))
        os.close(writer)

    threading.Thread(target=report, name="parawrap-launch-status", daemon=True).start()
    return reader


class _Server:
    """The warm process of this parent, seen from the parent."""

    def __init__(self, kind: object) -> None:
        ours, its = socket.socketpair()
        with its:
            script = "from parawrap.launch.watch._forkserver import serve; serve()"
            self._process = subprocess.Popen(interpreter(script), stdin=its.fileno(), start_new_session=True)
        self.kind = kind
        self._socket = ours
        self._one_at_a_time = threading.Lock()
        self._loaded: set[str] = set()
        close_in_forked_children(self)

    def is_usable(self) -> bool:
        """Whether it lives, in this process."""
        return self._socket.fileno() >= 0 and self._process.poll() is None

    def start(self, line: socket.socket, grace_s: float) -> Started:
        status, written = os.pipe()
        try:
            with self._one_at_a_time:
                pid = self._asked_to_fork(line, written, grace_s)
            if pid < 0:
                msg = f"no process can be forked for a rank: {os.strerror(-pid)}"
                raise LaunchError(msg)
        except BaseException:
            os.close(status)
            raise
        finally:
            os.close(written)
        return Started(pid, status)

    def _asked_to_fork(self, line: socket.socket, status: int, grace_s: float) -> int:
        """The pid of a new rank, or minus the number of an error."""
        try:
            socket.send_fds(self._socket, [REQUEST.pack(FORK, grace_s)], [line.fileno(), status])
            return int(STATUS.unpack(receive_exactly(self._socket, STATUS.size))[0])
        except BaseException as error:
            self.close()  # whatever interrupted this, an answer that is still to come would be taken for the next one's
            if not isinstance(error, (OSError, EOFError)):
                raise
            msg = "the warm process that ranks are forked from has gone; launch again to start another"
            raise LaunchError(msg) from error

    def load(self, names: Iterable[str]) -> None:
        for name in set(names) - self._loaded:
            self._loaded.add(name)
            with self._one_at_a_time, contextlib.suppress(OSError):
                self._socket.sendall(REQUEST.pack(LOAD, PRELOADABLE.index(name)))

    def close(self) -> None:
        """Hang up; the process ends by itself."""
        self._socket.close()

    def retire(self) -> None:
        """Hang up; it ends when the ranks have that it still runs, and is waited for."""
        self.close()
        threading.Thread(target=self._process.wait, name="parawrap-launch-retired", daemon=True).start()

    def stop(self) -> None:
        """Hang up, and wait for the process's end."""
        self.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # it was stopped, or its ranks do not end
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """In a forked child: it is somebody else's child."""
        self._process.returncode = 0


_server: _Server | None = None
_retired: list[_Server] = []
_starting = threading.Lock()


def _server_for_now() -> _Server:
    """The warm process, started at the first use; another one when variables changed that are read at load."""
    global _server
    kind = (sys.executable, tuple(sorted(each for each in os.environ.items() if each[0].startswith(_READ_AT_LOAD))))
    with _starting:
        if _server is not None and not (_server.is_usable() and _server.kind == kind):
            _retired.append(_server)
            _server.retire()
            _server = None
        if _server is None:
            _server = _Server(kind)
        return _server


def stop_server() -> None:
    """End the warm process; the next launch starts another."""
    global _server
    with _starting:
        stopping = [*_retired, *([] if _server is None else [_server])]
        _server = None
        _retired.clear()
    for server in stopping:
        server.stop()


def _forget_servers() -> None:
    """In a forked child: they belong to the parent."""
    global _server, _starting
    for server in (*_retired, *([] if _server is None else [_server])):
        server.forget()
    _server = None
    _retired.clear()
    _starting = threading.Lock()  # another thread may have held it


atexit.register(stop_server)
os.register_at_fork(after_in_child=_forget_servers)

"""The three ways to start a rank's process on this machine: ``forkserver``, ``spawn``, and ``fork``.

In each of them a process of `_forkserver` forks the rank, watches it, and ends what it leaves behind. The ways differ in
where that process comes from: a warm one that serves every launch, a fresh interpreter per rank, or a fork of this process
per rank.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from parawrap.errors import LaunchError, PlatformError
from parawrap.launch._limits import explained
from parawrap.launch.parcels._outcomes import exit_text
from parawrap.launch.parcels._wire import close_in_forked_children
from parawrap.launch.ranks._control import PRELOADABLE
from parawrap.launch.watch._forkserver import FORK, LOAD, REQUEST, serve

__all__ = ["Starter", "starter_named", "stop_server"]

# Variables that libraries read when they are loaded. A warm process that was started with other values is not reused.
_READ_AT_LOAD = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "ATEN_", "TORCH_", "PYTORCH_", "MALLOC_", "GLIBC_", "LD_",
    "DYLD_", "PYTHON",
)  # fmt: skip

_Around = Callable[[], AbstractContextManager[None]]

_SEND_S = 10.0
_EXIT_S = 1.0
_LOOK_S = 0.02
_STOP_S = 60.0


class Starter(Protocol):
    """Starts ranks. Safe to use from any thread."""

    def start(self, line: socket.socket, grace_s: float) -> int:
        """Request a rank at the other end of `line`. Return the pipe that reports on it, without waiting for the rank.

        The records in the pipe are described in `_forkserver`. The caller closes the pipe, and its copy of `line`.

        Raises:
            LaunchError: If the request cannot be made.
        """
        ...

    def load(self, names: Iterable[str]) -> None:
        """Load these modules for later ranks, if that saves them time."""

    def wake(self) -> None:
        """Let a process that was stopped (SIGSTOP) go on, so that it can report how its ranks ended."""

    def release(self) -> None:
        """Wait for processes that serve one launch only. Called when the launch is over."""

    def fate(self) -> str:
        """Describe the process that forks ranks, and how it ended."""
        ...


def starter_named(method: str, around: _Around = contextlib.nullcontext) -> Starter:
    """Return the starter of a platform's ``spawn_method``.

    Args:
        method: the spawn method.
        around: a context manager for the moment in which a process that forks ranks is started.

    Raises:
        PlatformError: If `method` is fork and CUDA runs in this process.
    """
    if method == "forkserver":
        return _warm_server(around)
    if method == "fork" and torch.cuda.is_initialized():
        msg = (
            "spawn_method='fork': CUDA runs in this process already, and does not work in a fork of it: "
            "give 'forkserver' or 'spawn', or launch before CUDA is used"
        )
        raise PlatformError(msg)
    return _ServerPerRank(around, forks=method == "fork")


class _ServerPerRank:
    """Starts a process of its own for each rank, which forks the rank."""

    def __init__(self, around: _Around, *, forks: bool) -> None:
        self._around = around
        self._forks = forks
        self._servers: list[_Server] = []

    def start(self, line: socket.socket, grace_s: float) -> int:
        server = _Server(None, self._around, forked_with=line if self._forks else None)
        self._servers.append(server)
        try:
            return server.start(line, grace_s)
        finally:
            server.close()

    def load(self, names: Iterable[str]) -> None:
        pass

    def wake(self) -> None:
        for server in self._servers:
            server.wake()

    def release(self) -> None:
        for server in self._servers:
            server.stop()

    def fate(self) -> str:
        ended = [server for server in self._servers if server.has_ended()]
        return ended[0].fate() if ended else "the process that forks it"


class _Server:
    """A process that forks ranks, as the launching process sees it."""

    def __init__(self, kind: object, around: _Around, *, forked_with: socket.socket | None = None) -> None:
        self.kind = kind
        ours, its = socket.socketpair()
        ours.settimeout(_SEND_S)
        self._socket = ours
        close_in_forked_children(self)
        with its, around():
            try:
                self._process = _fresh_server(its) if forked_with is None else _ForkedServer(its, forked_with)
            except OSError as error:
                ours.close()
                msg = f"no process can be started for ranks: {explained(error)}"
                raise LaunchError(msg) from error
        self._sending = threading.Lock()
        self._loaded: set[str] = set()
        self._is_retired = False

    def is_usable(self) -> bool:
        """True if it takes requests of this process."""
        return self._socket.fileno() >= 0 and not self.has_ended()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, line: socket.socket, grace_s: float) -> int:
        status, number = os.pipe()
        written = os.fdopen(number, "wb", buffering=0)
        close_in_forked_children(written)  # its end reports the rank's end
        try:
            with self._sending:
                socket.send_fds(self._socket, [REQUEST.pack(FORK, grace_s)], [line.fileno(), number])
        except OSError as error:
            os.close(status)
            self.retire()
            msg = f"{self.fate()} takes no request for a rank: {explained(error)}. The next launch starts another one"
            raise LaunchError(msg) from error
        finally:
            written.close()
        return status

    def load(self, names: Iterable[str]) -> None:
        for name in set(names) - self._loaded:
            self._loaded.add(name)
            with self._sending, contextlib.suppress(OSError):
                self._socket.sendall(REQUEST.pack(LOAD, PRELOADABLE.index(name)))

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Hang up. The process ends once its ranks have ended."""
        self._socket.close()

    def retire(self) -> None:
        """Hang up, and reap the process when it ends."""
        self.close()
        if not self._is_retired:
            self._is_retired = True
            threading.Thread(target=self._process.wait, name="parawrap-launch-retired", daemon=True).start()

    def release(self) -> None:
        """Keep the process for the next launch."""

    def stop(self) -> None:
        """Hang up, and wait until the process has ended."""
        self.close()
        self.wake()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # its ranks do not end
            self._process.kill()
            self._process.wait()

    def fate(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        name = f"the warm process that forks ranks (process {self._process.pid})"
        return name if code is None else f"{name}, which {exit_text(code)},"

    def forget(self) -> None:
        """Never wait for the process: in a forked child it is not a child."""
        self._process.returncode = 0


def _fresh_server(requests: socket.socket) -> subprocess.Popen[bytes]:
    """Start an interpreter with this one's import path, and without the user's main file.

    It runs in the root folder: libraries cannot be loaded in a working folder that was deleted. Garbage collection is off
    until the server turns it on: it would take a sixth of the time that importing torch takes.
    """
    script = (
        f"import gc, sys; gc.disable(); sys.path[:] = {_import_path()!r}; "
        "from parawrap.launch.watch._forkserver import serve_standard_input; serve_standard_input()"
    )
    command = [sys.executable, "-P", "-c", script]
    return subprocess.Popen(command, stdin=requests.fileno(), start_new_session=True, cwd="/")


def _import_path() -> list[str]:
    """The import path with absolute entries, as the working folder is another one there."""
    path = []
    for each in sys.path:
        with contextlib.suppress(FileNotFoundError):  # a relative entry in a working folder that was deleted
            if isinstance(each, str):  # Python itself ignores all others
                path.append(str(Path(each).absolute()))
    return path


class _ForkedServer:
    """A fork of this process, with the part of Popen's interface that `_Server` uses.

    Args:
        requests: the server's end of the socket for requests.
        line: the rank's end of its line, which the server gets once more with the request.
    """

    def __init__(self, requests: socket.socket, line: socket.socket) -> None:
        self.returncode: int | None = None
        self._polling = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            line.close()
            _serve_in_fork(requests)

    def poll(self) -> int | None:
        with self._polling:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    self.returncode = os.waitstatus_to_exitcode(status) if pid else None
                except ChildProcessError:  # this process ignores SIGCHLD
                    self.returncode = 0
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired([], timeout or 0.0)
            time.sleep(_LOOK_S)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve_in_fork(requests: socket.socket) -> NoReturn:
    """Serve one launch in a fork of the user's process, which must not go on as the user's program."""
    try:
        atexit._clear()  # exit handlers belong to the process that registered them
        os.setsid()
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; waiting for them would never end
        serve(requests)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


_server: _Server | None = None
_retired: list[_Server] = []
_starting = threading.Lock()


def _warm_server(around: _Around) -> _Server:
    """Return the warm process. Start it at the first use, and again when a variable changed that libraries read at load."""
    global _server
    kind = (sys.executable, tuple(sorted(each for each in os.environ.items() if each[0].startswith(_READ_AT_LOAD))))
    with _starting:
        if _server is not None and not (_server.is_usable() and _server.kind == kind):
            _retired.append(_server)
            _server.retire()
            _server = None
        if _server is None:
            _server = _Server(kind, around)
        return _server


def stop_server() -> None:
    """End the warm process. The next launch starts another one."""
    global _server
    with _starting:
        stopping = [*_retired, *([] if _server is None else [_server])]
        _server = None
        _retired.clear()
    for server in stopping:
        server.stop()


def _forget_servers() -> None:
    """Drop the servers in a forked child: they are children of its parent."""
    global _server, _starting
    for server in (*_retired, *([] if _server is None else [_server])):
        server.forget()
    _server = None
    _retired.clear()
    _starting = threading.Lock()  # another thread may have held it


atexit.register(stop_server)
os.register_at_fork(after_in_child=_forget_servers)

"""The three spawn methods on this machine: ``forkserver``, ``spawn``, and ``fork``.

In each of them, a server process (`_forkserver`) forks the rank, watches it, and ends its leftover processes. The server is
a warm process that serves every launch, a fresh interpreter per rank, or a fork of this process per rank.
"""

from __future__ import annotations

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
from parawrap.launch._private_names import forget_exit_handlers, forget_finalizers
from parawrap.launch._system_limits import explain_error
from parawrap.launch.guard._forkserver import FORK, LOAD, REQUEST, serve_forks
from parawrap.launch.messages._channel import close_in_forked_children
from parawrap.launch.messages._first_rank_failure import exit_text
from parawrap.launch.rank._control_thread import PRELOADABLE

__all__ = ["Starter", "starter_named", "stop_server"]

# Prefixes of variables that libraries read at import. A warm process that started with other values is not reused.
_READ_AT_LOAD = (
    "OMP_", "KMP_", "GOMP_", "MKL_", "OPENBLAS_", "BLIS_", "NPY_", "NUMPY_", "ATEN_", "TORCH", "PYTORCH_", "INDUCTOR_",
    "AOT", "MALLOC_", "GLIBC_", "LD_", "DYLD_", "PYTHON",
)  # fmt: skip
# Attributes of sys.flags, and the command line options that set them. `sys._xoptions` has the options of -X.
_FLAGS = {
    "optimize": "O", "bytes_warning": "b", "dont_write_bytecode": "B", "debug": "d", "verbose": "v", "no_site": "S",
    "no_user_site": "s", "ignore_environment": "E", "isolated": "I",
}  # fmt: skip

_Around = Callable[[], AbstractContextManager[None]]

_SEND_S = 10.0  # the process reads at once, unless it was stopped
_EXIT_S = 1.0  # then it is killed
_LOOK_S = 0.02  # a process starts in some tens of milliseconds
_STOP_S = 60.0  # it ends the ranks first; a guess that no test has contradicted


class Starter(Protocol):
    """Starts ranks. Safe to use from any thread."""

    def start(self, line: socket.socket, grace_s: float) -> int:
        """Request a rank that serves `line`. Return its status pipe without waiting for the rank.

        `_forkserver` defines the records in the pipe. The caller closes the pipe and its own copy of `line`.

        Raises:
            LaunchError: If the request fails.
        """
        ...

    def load(self, names: Iterable[str]) -> None:
        """Import modules in advance for later ranks, if the process that forks them stays."""

    def wake(self) -> None:
        """Resume processes that were stopped by SIGSTOP, so that they report how their ranks ended."""

    def release(self) -> None:
        """End the processes that serve only one launch. Called at the end of the launch."""

    def describe(self) -> str:
        """Describe the process that forks ranks and how it ended."""
        ...


def starter_named(method: str, around: _Around = contextlib.nullcontext) -> Starter:
    """Return the starter of a platform's ``spawn_method``.

    Args:
        method: The spawn method.
        around: Returns a context manager to enter while a server process is started.

    Raises:
        PlatformError: If `method` is ``"fork"`` and CUDA is initialized in this process.
    """
    if method == "forkserver":
        return _warm_server(around)
    if method == "fork" and torch.cuda.is_initialized():
        msg = (
            "spawn_method='fork': CUDA is initialized in this process already, and does not work in a forked child: "
            "give 'forkserver' or 'spawn', or launch before the first use of CUDA"
        )
        raise PlatformError(msg)
    return _ServerPerRank(around, forks=method == "fork")


class _ServerPerRank:
    """Starts a separate server process per rank."""

    def __init__(self, around: _Around, *, forks: bool) -> None:
        self._around = around
        self._forks = forks
        self._servers: list[_ServerProcess] = []

    def start(self, line: socket.socket, grace_s: float) -> int:
        server = _ServerProcess(None, self._around, forked_with=line if self._forks else None)
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

    def describe(self) -> str:
        ended = [server for server in self._servers if server.has_ended()]
        return ended[0].describe() if ended else "the process that forks it"


class _ServerProcess:
    """The launching process's handle of a server process."""

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
                msg = f"the process that forks ranks cannot be started: {explain_error(error)}"
                raise LaunchError(msg) from error
        self._sending = threading.Lock()
        self._loaded: set[str] = set()
        self._is_retired = False

    def is_usable(self) -> bool:
        """True if the server accepts requests from this process."""
        return self._socket.fileno() >= 0 and not self.has_ended()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def start(self, line: socket.socket, grace_s: float) -> int:
        status, number = os.pipe()
        written = os.fdopen(number, "wb", buffering=0)
        close_in_forked_children(written)  # the pipe's end of file reports the rank's end
        try:
            with self._sending:
                socket.send_fds(self._socket, [REQUEST.pack(FORK, grace_s)], [line.fileno(), number])
        except OSError as error:
            os.close(status)
            self.retire()
            msg = f"{self.describe()} does not accept requests: {explain_error(error)}. The next launch starts another one"
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
        """Close the connection. The server exits once its ranks have ended."""
        self._socket.close()

    def retire(self) -> None:
        """Close the connection, and reap the server in the background when it exits."""
        self.close()
        if not self._is_retired:
            self._is_retired = True
            threading.Thread(target=self._process.wait, name="parawrap-launch-retired", daemon=True).start()

    def release(self) -> None:
        """Keep the server for the next launch."""

    def stop(self) -> None:
        """Close the connection and wait until the server has exited."""
        self.close()
        self.wake()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # its ranks have not ended
            self._process.kill()
            self._process.wait()

    def describe(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        name = f"the warm process that forks ranks (process {self._process.pid})"
        return name if code is None else f"{name}, which {exit_text(code)},"

    def forget(self) -> None:
        """Never wait for the server: in a forked child it is a process of the parent."""
        self._process.returncode = 0


def _fresh_server(requests: socket.socket) -> subprocess.Popen[bytes]:
    """Start an interpreter with this one's options and import path, but without the user's main file.

    It runs in the root folder, because imports fail in a deleted working folder. The server turns garbage collection on
    after its imports, because collection would take a sixth of the time to import torch.
    """
    script = (
        f"import gc, sys; gc.disable(); sys.path[:] = {_import_path()!r}; "
        "from parawrap.launch.guard._forkserver import serve_standard_input; serve_standard_input()"
    )
    command = [sys.executable, *_interpreter_options(), "-P", "-c", script]
    # Most ranks have one thread, and to lower the number after a fork would start the threads first. Ranks can raise it.
    environ = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | os.environ
    return subprocess.Popen(command, stdin=requests.fileno(), start_new_session=True, cwd="/", env=environ)


def _interpreter_options() -> list[str]:
    """Return the command line options that give an interpreter the flags and warning filters of this one."""
    flags = [f"-{letter}" for name, letter in _FLAGS.items() for _ in range(getattr(sys.flags, name))]
    extra = [name if value is True else f"{name}={value}" for name, value in sys._xoptions.items()]
    return [*flags, *(f"-W{each}" for each in sys.warnoptions), *(f"-X{each}" for each in extra)]


def _import_path() -> list[str]:
    """Return the import path with absolute entries, because the server's working folder differs."""
    path = []
    for each in sys.path:
        with contextlib.suppress(FileNotFoundError):  # a relative entry in a deleted working folder
            if isinstance(each, str):  # Python ignores entries of other types
                path.append(str(Path(each).absolute()))
    return path


class _ForkedServer:
    """A fork of this process, with the part of Popen's interface that `_ServerProcess` uses.

    Args:
        requests: The server's end of the socket for requests.
        line: The rank's end of its connection. The fork closes its copy, because the request brings another one.
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
    """Serve one launch in a fork of the user's process. Never return, so that the user's program does not continue here."""
    try:
        forget_exit_handlers()  # exit handlers belong to the process that registered them
        forget_finalizers()
        os.setsid()
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork; waiting for them would block forever
        serve_forks(requests)
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


_server: _ServerProcess | None = None
_retired: list[_ServerProcess] = []
_starting = threading.Lock()


def _warm_server(around: _Around) -> _ServerProcess:
    """Return the warm server.

    Start it on first use, and again if an option of the interpreter or a variable that libraries read at import has
    changed.
    """
    global _server
    variables = sorted(each for each in os.environ.items() if each[0].startswith(_READ_AT_LOAD))
    kind = (sys.executable, _interpreter_options(), variables)
    with _starting:
        if _server is not None and not (_server.is_usable() and _server.kind == kind):
            _retired.append(_server)
            _server.retire()
            _server = None
        if _server is None:
            _server = _ServerProcess(kind, around)
        return _server


def stop_server() -> None:
    """Stop the warm server. The next launch starts another one."""
    global _server
    with _starting:
        stopping = [*_retired, *([] if _server is None else [_server])]
        _server = None
        _retired.clear()
    for server in stopping:
        server.stop()


def _forget_servers() -> None:
    """Forget the servers in a forked child: they are processes of the parent."""
    global _server, _starting
    for server in (*_retired, *([] if _server is None else [_server])):
        server.forget()
    _server = None
    _retired.clear()
    _starting = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_forget_servers)

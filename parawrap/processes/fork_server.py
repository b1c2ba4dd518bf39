"""The server, a process that forks ranks: it has torch imported, and a single thread.

::

    launching process ── request ──► server ── fork ──► keeper ── fork ──► rank
            ▲                                             │
            └────────────── started, exited ──────────────┘

A keeper is the parent of one rank at a time. It ends the processes that the rank leaves behind. Its
reports travel in the status pipe of the rank.

Two guarantees:

- The status pipe reports the rank's process id and exit code. It is closed once the rank and all
  processes that it started have ended.
- If the launching process dies, the ranks end, and then the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import glob
import importlib
import multiprocessing.spawn
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from parawrap._private_names import (
    interpreter_options,
    keep_finalizers_from_exits,
    tracker_connection,
    use_tracker,
)
from parawrap.errors import LaunchError
from parawrap.processes.forks import close_in_forked_children, handover
from parawrap.processes.outcomes import exit_text
from parawrap.processes.rank_process import leave, run_rank
from parawrap.processes.torch_groups import store_folders

STATUS = struct.Struct("<ci")
"""A record of a status pipe: a word and a number."""

# Words of a status pipe
STARTED = b"s"  # with the process id
FAILED = b"f"  # with the errno of the failed fork
EXITED = b"e"  # with the exit code, or the negative signal number
# Requests to the server
FORK = b"f"  # with the files of a rank
FORK_WITH_TRACKER = b"t"  # also with a connection to the script's resource tracker
CONTINUE = b"c"  # to continue keepers that something has stopped
# Words between the server and a keeper
_KEEP = b"k"  # with the files of a rank: files travel with a byte
_HAS_ENDED = b"i"  # nothing of the rank is left, and the keeper is idle

_PRELOADABLE = ("torch._dynamo", "torch._inductor.config")
"""Modules that many ranks import, at about a second each. The server imports one after a rank has.

All torch optimizers and DistributedDataParallel import the first, and
torch.use_deterministic_algorithms the second.
"""

# Attached to a request: the status pipe, two sockets, standard output, and standard error
_SENT_FILES = 5
_MOST_IDLE = 16  # keepers; each has little memory of its own. A guess

# Seconds
# For a leftover process to end after SIGTERM: a resource tracker frees shared memory then
_TERMINATE_S = 1.0
_CLEAN_UP_S = 30.0  # for ranks to notice the end of the launching process, and to clean up
_POLL_S = 0.02  # between two looks at leftover processes, which end soon after their signals
_EXIT_S = 1.0  # for the server to exit after its connections have closed
_STOP_S = 60.0  # for the server to end its ranks, and exit. A guess that no test has contradicted
# Without a request, after which idle keepers exit: long enough for launches in a loop
_KEEPER_IDLE_S = 0.25
_TAKE_S = 20.0  # for the server to take a request: it forks one rank in milliseconds
# From <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_NEVER = float("inf")


# -- in the server


def serve(modules: Sequence[str], folders: str = "") -> NoReturn:
    """Serve requests from standard input, a socket, until it is closed and no rank is left.

    Args:
        modules: Imported first, so that ranks do not import them.
        folders: A pattern of folders to remove at the end: a killed launching process leaves some.
    """
    for name in modules:
        importlib.import_module(name)
    requests = socket.socket(fileno=fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 3))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    # Python warns about forks if a BLAS has threads. Ranks inherit this filter: it must not hide
    # other warnings.
    warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C
    # The launching thread may have blocked all signals. Others stay blocked, such as SIGUSR2 in a
    # Slurm job, which would end programs that the ranks start.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD))
    _Server(requests).run()
    for folder in glob.glob(folders):  # noqa: PTH207 (an absolute pattern)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)  # a normal exit would spend 0.1 s on unloading torch


class _Server:
    """Hands each request to a keeper, which forks the rank and outlives it. Has a single thread.

    A keeper whose rank has ended waits for the next request: a launch that follows another one
    waits for one fork, not for two.
    """

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._pid = os.getpid()
        adopt_orphans()  # of keepers that something has killed
        self._keepers: dict[int, socket.socket] = {}  # the connection to each, by its process id
        self._idle: list[int] = []  # process ids of keepers that wait for a request
        self._stale: set[int] = set()  # process ids of keepers forked before the last import
        self._wanted: set[int] = set()  # positions in `_PRELOADABLE` of modules to import
        # Bytes of two kinds arrive. Ranks write positions in `_PRELOADABLE`: small numbers. Python
        # writes the number of each signal with a handler: SIGCHLD, which is 17 or more
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        # A handler in Python: without one, nothing is written to the pipe
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        if "numpy" in sys.modules:  # torch imports numpy; each rank seeds this module
            importlib.import_module("numpy.random")
        self._freeze()
        gc.enable()  # `ForkServer` has disabled it for the imports

    def run(self) -> None:
        """Serve requests until the connection is closed and no keeper is left."""
        kill_at = _NEVER  # when keepers that are late are ended
        is_open = True
        while is_open or self._keepers:
            poll = select.poll()  # select() is limited to descriptors below 1024
            poll.register(self._woken, select.POLLIN)
            for connection in self._keepers.values():
                poll.register(connection, select.POLLIN)
            wait_ms: float | None = None  # without a limit
            if is_open:
                poll.register(self._requests, select.POLLIN)
                if self._idle:
                    wait_ms = 1000 * _KEEPER_IDLE_S
            else:
                wait_ms = 1000 * _POLL_S
            ready = {number for number, _ in poll.poll(wait_ms)}
            if not ready:  # no launch has followed the last one
                self._dismiss(self._idle)
            if self._woken in ready:
                self._wanted.update(os.read(self._woken, 4096))
                self._reap()
            # Before a request: the launching process sends one when a rank has ended, and the
            # keeper of this rank has reported that it is idle just before
            has_rank_ended = self._note_idle()
            # Not while the rank exits: an import would take a processor from it
            if has_rank_ended and self._wanted:
                self._load()
            if is_open and self._requests.fileno() in ready:
                is_open = self._take_request()
                # The last request is the end of the connection: before, this time does not count
                kill_at = time.monotonic() + _CLEAN_UP_S
            if not is_open:
                self._dismiss(self._idle)
                if time.monotonic() >= kill_at:
                    for pid in self._keepers:  # they kill their ranks
                        send_signal(os.kill, pid, signal.SIGTERM)
                    kill_at = _NEVER

    def _take_request(self) -> bool:
        """Serve one request. Return False if the launching process has closed the connection."""
        try:
            request, files, _, _ = socket.recv_fds(self._requests, 1, _SENT_FILES + 1)
        except OSError:
            return False
        if not request:
            return False
        if request == CONTINUE:
            for pid in self._keepers:
                send_signal(os.kill, pid, signal.SIGCONT)
        else:
            n_sent = _SENT_FILES + 1 if request == FORK_WITH_TRACKER else _SENT_FILES
            # Otherwise, this process has reached its limit on open files, and the kernel dropped
            # some. The launching process sees the end of the status pipe
            if len(files) == n_sent:
                self._hand_over(files)
        for file in files:
            os.close(file)
        return True

    def _hand_over(self, files: list[int]) -> None:
        """Send the descriptors of a request to a keeper. The caller closes its own ones."""
        while self._idle:
            # If something has killed this keeper, the next one gets the request
            with contextlib.suppress(OSError):
                socket.send_fds(self._keepers[self._idle.pop()], [_KEEP], files)
                return
        try:
            pid = self._fork_keeper(files)
            socket.send_fds(self._keepers[pid], [_KEEP], files)
        except OSError as error:
            # No second try: at a limit of the system, another keeper would fail too
            _report(files[0], FAILED, error.errno or errno.EAGAIN)

    def _fork_keeper(self, files: list[int]) -> int:
        """Fork a keeper. It gets the files of the request later, like any other keeper."""
        ours, its = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            its.close()
            raise
        if pid == 0:
            try:
                signal.set_wakeup_fd(-1)
                # Copies of these ends would keep the other processes from seeing a close
                for each in (self._requests, ours, *self._keepers.values()):
                    each.close()
                for file in (self._woken, *files):
                    os.close(file)
                _Keeper(its, self._waker).run()
            finally:  # also after an error: this process must not go on as a second server
                traceback.print_exc()
                os._exit(1)
        its.close()
        self._keepers[pid] = ours
        return pid

    def _reap(self) -> None:
        """Forget the keepers that have exited, and kill the processes that killed keepers left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:  # the others run
                    break
                if pid in self._keepers:  # otherwise, it is an orphan of a keeper
                    self._keepers.pop(pid).close()
                self._stale.discard(pid)
                if pid in self._idle:
                    self._idle.remove(pid)
        for orphan in children_of(self._pid) - self._keepers.keys():
            send_signal(os.kill, orphan, signal.SIGKILL)

    def _note_idle(self) -> bool:
        """Note the keepers that report the end of their ranks. Return True if there are some."""
        ended = []
        for pid, connection in self._keepers.items():
            with contextlib.suppress(OSError):  # nothing to read, or it has exited
                if connection.recv(1, socket.MSG_DONTWAIT):
                    ended.append(pid)
        for pid in ended:
            if pid in self._stale or len(self._idle) >= _MOST_IDLE:
                self._dismiss([pid])
            else:
                self._idle.append(pid)
        return bool(ended)

    def _dismiss(self, pids: list[int]) -> None:
        """End the connections of idle keepers, which then exit. Empty the list."""
        for pid in pids:
            with contextlib.suppress(OSError):  # it has exited already
                self._keepers[pid].shutdown(socket.SHUT_RDWR)
        pids.clear()

    def _load(self) -> None:
        """Import the modules that ranks have imported, so that later ranks start with them."""
        for number, name in enumerate(_PRELOADABLE):
            if number in self._wanted and name not in sys.modules:
                # A rank that needs the module reports the error itself
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
                self._freeze()
                # Keepers from before lack the module: those with a rank exit after it
                self._dismiss(self._idle)
                self._stale.update(self._keepers)
        self._wanted.clear()

    def _freeze(self) -> None:
        """Keep the collectors and exits of ranks away from the objects of this process.

        A collector would write to them, and so copy their memory. The finalizers of torch's
        libraries would take a third of the time of a launch at the exit of each rank.
        """
        gc.freeze()
        keep_finalizers_from_exits()


class _Keeper:
    """The process between the server and one rank: it reports the rank's end, and ends leftovers.

    It adopts descendants of the rank whose parents have exited. So each process belongs to one
    rank, and the rank has no children that it did not start.
    """

    def __init__(self, requests: socket.socket, waker: int) -> None:
        self._requests = requests
        self._waker = waker  # the rank writes there which modules it has imported
        self._pid = os.getpid()
        self._rank = 0  # the process id of the rank; 0 while none runs
        self._is_ordered = False  # True once it was ordered to end the rank
        self._libc = ctypes.CDLL(None)

    def run(self) -> NoReturn:
        """Keep one rank after the other, until the server closes the connection."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._kill_rank)
        server = os.getppid()
        adopt_orphans()
        if sys.platform == "linux":  # on macOS, the rank ends when its connection closes
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # at the death of the server
            if os.getppid() != server:  # it died before this call
                os._exit(1)
        while not self._is_ordered:
            try:
                _, files, _, _ = socket.recv_fds(self._requests, 1, _SENT_FILES + 1)
            except OSError:  # the server was killed before it had read the last report
                break
            if not files:  # the server has ended, or dismisses this keeper
                break
            for file in files:
                os.set_inheritable(file, False)  # else programs of the rank get copies
            self._keep(files)
        os._exit(0)

    def _keep(self, files: list[int]) -> None:
        """Start a rank, and return once nothing of it is left."""
        status = files[0]
        group = -1  # the process id of the rank, which leads a process group; -1 without a rank
        try:
            if len(files) < _SENT_FILES:  # beyond the limit of this process, the kernel drops files
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            group = self._rank = os.fork()
        except OSError as error:
            _report(status, FAILED, error.errno or errno.EAGAIN)
        if group == 0:
            self._become_rank(files)
        for file in files[1:]:
            os.close(file)
        if group > 0:
            _report(status, STARTED, group)
            if self._is_ordered:  # the order may have come before `_rank` was set
                self._kill_rank()
            code = self._wait_for_rank()
            # Without a report, the launching process says that the rank was lost with the server
            if not self._is_ordered:
                _report(status, EXITED, code)
            self._end_leftovers(group)
        # In this order: once the pipe is closed, the launching process may send a request, for
        # which the server is to find this keeper idle
        with contextlib.suppress(OSError):  # the server has ended
            self._requests.send(_HAS_ENDED)
        os.close(status)

    def _become_rank(self, files: list[int]) -> NoReturn:
        """Run as the rank, in its process, and exit."""
        try:
            self._run_rank(files)
        finally:  # also after an error: this process must not go on as a second keeper
            traceback.print_exc()
            os._exit(1)

    def _run_rank(self, files: list[int]) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._requests.close()
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # at the death of the keeper
        if os.getppid() != self._pid:  # it died before this call
            os._exit(1)
        status, data, control, stdout, stderr, *tracker = files
        os.close(status)
        if tracker:
            use_tracker(tracker[0])
        # In a variable: they stay open until this process exits
        connections = socket.socket(fileno=data), socket.socket(fileno=control)
        code = run_rank(*connections, (stdout, stderr))
        # One byte for each module: its position
        imported = bytes(i for i, name in enumerate(_PRELOADABLE) if name in sys.modules)
        with contextlib.suppress(OSError):  # the server has ended
            os.write(self._waker, imported)
        leave(code)

    def _kill_rank(self, *_: object) -> None:
        """Kill the rank at the order, or the death, of the server. Its leftovers end after it."""
        self._is_ordered = True
        if self._rank:
            send_signal(os.kill, self._rank, signal.SIGKILL)

    def _wait_for_rank(self) -> int:
        """Wait for the exit of the rank, and return its code. Reap its orphans meanwhile."""
        while True:
            pid, status = os.waitpid(-1, 0)
            if pid == self._rank:
                self._rank = 0  # the number may belong to another process later
                return os.waitstatus_to_exitcode(status)

    def _end_leftovers(self, group: int) -> None:
        """End the processes that the rank has left running.

        There are two kinds: members of its process group, and orphans that had left the group,
        which are children of this process.
        """
        # A group keeps its number while it has members. Later, another group may get the number. So
        # a group that was seen to be gone gets no more signals. The time between two looks is too
        # short for this: kernels give all other numbers first
        is_group_left = send_signal(os.killpg, group, signal.SIGTERM)
        kill_at = time.monotonic() + _TERMINATE_S
        while True:
            has_children = self._has_children()
            is_group_left = is_group_left and send_signal(os.killpg, group, 0)
            if not (has_children or is_group_left):
                return
            if time.monotonic() >= kill_at:
                if is_group_left:
                    send_signal(os.killpg, group, signal.SIGKILL)
                for pid in children_of(self._pid):
                    send_signal(os.kill, pid, signal.SIGKILL)
            time.sleep(_POLL_S)

    def _has_children(self) -> bool:
        """Reap the children that have exited. Return True if there are others."""
        pid = -1
        while pid != 0:  # 0: all that are left run
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there are none
                return False
        return True


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants. Without this, init does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> set[int]:
    """Return the children of a process with a single thread."""
    with contextlib.suppress(OSError):  # macOS offers no way to find them
        return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


def _report(status: int, word: bytes, number: int) -> None:
    """Write a record to a status pipe."""
    with contextlib.suppress(BrokenPipeError):  # the launch no longer reads it
        os.write(status, STATUS.pack(word, number))


def send_signal(send: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Signal a process, or a process group. Return True if it exists. Zombies count.

    `send` is `os.kill` or `os.killpg`. The signal 0 has no effect.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)
        return True
    return False


# -- in the launching process


class Connections(NamedTuple):
    """The ends of a rank's connections that the launching process keeps."""

    place: str  # the node and host of the rank, such as ``"node 0, worker-17"``
    data: socket.socket
    control: socket.socket
    status: int  # the reading end of the status pipe
    streams: tuple[int, ...]  # standard output and standard error; empty if they go elsewhere

    def close(self) -> None:
        """Close all of them: the rank exits then."""
        self.data.close()
        self.control.close()
        for file in (self.status, *self.streams):
            os.close(file)


def _pipe(ours: contextlib.ExitStack, its: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe that a rank writes. Each stack gets one end, and closes it later."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    its.callback(os.close, writing)
    return reading, writing


def _socket_pair(
    ours: contextlib.ExitStack, its: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    """Make a pair of sockets. Each stack gets one, and closes it later."""
    one, other = socket.socketpair()
    return ours.enter_context(one), its.enter_context(other)


class ForkServer:
    """The launching process's handle of the server, a `RankStarter`. Any thread may use it."""

    def __init__(self) -> None:
        if getattr(sys, "frozen", False):
            # `sys.executable` is the application itself, which would start again and again
            msg = (
                f"ranks need a Python interpreter to start, and {sys.executable} is a frozen "
                "application (PyInstaller, cx_Freeze). Run the script with Python"
            )
            raise LaunchError(msg)
        path = [str(Path(each).absolute()) for each in sys.path if isinstance(each, str)]
        # Most ranks need the same modules of parawrap as this process
        modules = [name for name in list(sys.modules) if name.partition(".")[0] == "parawrap"]
        script = (
            # garbage collection would take a sixth of the time of the imports
            f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
            f"from parawrap.processes.fork_server import serve; serve({modules!r}, "
            f"{store_folders(os.getpid())!r})"
        )
        # `sys.executable`, unless a program that embeds Python has set another for multiprocessing
        executable = os.fsdecode(multiprocessing.spawn.get_executable())
        command = [executable, *interpreter_options(), "-P", "-c", script]
        # Most ranks compute with one thread. The number is set before the import of numpy: a lower
        # number after a fork would start the threads first. Ranks can raise it
        environ = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | os.environ
        # Also around Popen, which waits for the end of a pipe of its own: a child that another
        # thread forks meanwhile would keep this pipe open
        with handover as in_transit:
            ours, its = socket.socketpair()
            in_transit.append(its.fileno())
            close_in_forked_children(ours)
            ours.settimeout(_TAKE_S)
            self._socket = ours
            with its:
                # In the root folder: imports fail in a working folder that was deleted
                self._process = subprocess.Popen(
                    command, stdin=its.fileno(), start_new_session=True, cwd="/", env=environ
                )
        self._place = f"node 0, {socket.gethostname()}"

    def start(self, rank: int) -> Connections:
        """Start a rank.

        Raises:
            LaunchError: If its process cannot be started.
        """
        # `handover` ends last: no other thread forks before the ends in `its` are closed. The ends
        # in `ours` are closed only after an error
        with handover as in_transit, contextlib.ExitStack() as its, contextlib.ExitStack() as ours:
            try:
                status, status_end = _pipe(ours, its)
                stdout, stdout_end = _pipe(ours, its)
                stderr, stderr_end = _pipe(ours, its)
                data, data_end = _socket_pair(ours, its)
                control, control_end = _socket_pair(ours, its)
                # In the order in which `_run_rank` takes them
                sockets = data_end.fileno(), control_end.fileno()
                files = status_end, *sockets, stdout_end, stderr_end
                in_transit.extend(files)
                # Ranks report shared memory to the script's resource tracker, as children of
                # multiprocessing do. A tracker of their own would remove memory of the script that
                # they have only used
                tracker = tracker_connection()
                if tracker is None:
                    socket.send_fds(self._socket, [FORK], files)
                else:
                    socket.send_fds(self._socket, [FORK_WITH_TRACKER], (*files, tracker))
            except OSError as error:
                raise LaunchError(self._refusal(rank, error)) from error
            connections = Connections(self._place, data, control, status, (stdout, stderr))
            close_in_forked_children(data)
            close_in_forked_children(control)
            ours.pop_all()  # they belong to the caller now
        return connections

    def _refusal(self, rank: int, error: OSError) -> str:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return (
                f"rank {rank} cannot be started: this process has reached its limit on open files "
                f"({error}). A rank needs eight of them here: raise the limit with ulimit -n, or "
                "start fewer ranks"
            )
        return f"the process of rank {rank} cannot be started by {self.describe(rank)}: {error}"

    def kill(self, _rank: int, pid: int) -> None:
        """Kill a rank and its process group. A rank that starts does not lead a group yet."""
        if pid:
            send_signal(os.killpg, pid, signal.SIGKILL)
            send_signal(os.kill, pid, signal.SIGKILL)
        # The keeper reports the end. A signal that stopped the rank may have stopped it too
        with contextlib.suppress(OSError):  # the server has ended
            self._socket.send(CONTINUE)

    def describe(self, _rank: int) -> str:
        """Describe the process with which a rank was lost: the server, or the rank's keeper."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        if code is None:  # the server runs, so only the keeper has ended
            return "its parent process, which was killed"
        return (
            f"the process that forks ranks (process {self._process.pid}), which {exit_text(code)}"
        )

    def stop(self) -> None:
        """Close the connection, and wait until the server has ended."""
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # some of its ranks do not end
            self._process.kill()
            self._process.wait()


_server: ForkServer | None = None
# Guards `_server`: threads that launch at the same time start one server
_starting = threading.Lock()


def fork_server() -> ForkServer:
    """Return the server of this process. Start one at first use, or if the last one has ended.

    Raises:
        LaunchError: If it cannot be started.
    """
    global _server
    with _starting:
        if _server is None or _server._process.poll() is not None:
            if _server is not None:
                _server.stop()
            try:
                _server = ForkServer()
            except OSError as error:
                msg = f"the process that forks ranks cannot be started: {error}"
                raise LaunchError(msg) from error
        return _server


def stop_server() -> None:
    """Stop the server. The next launch starts another one."""
    global _server
    with _starting:
        stopping, _server = _server, None
    # Without the lock: the server waits for its ranks, and a launch meanwhile may start another one
    if stopping is not None:
        stopping.stop()


def _forget_server() -> None:
    """Forget the server in a forked child: it is a process of the parent."""
    global _server, _starting
    if _server is not None:
        _server._process.returncode = 0  # so that Popen does not wait for it
    _server, _starting = None, threading.Lock()  # another thread of the parent may hold the old one


os.register_at_fork(after_in_child=_forget_server)

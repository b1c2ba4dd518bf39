"""The process that forks ranks: it has torch imported, and a single thread.

Its guarantees:

- The status pipe of a request reports the rank's process id and exit code. It is closed once the
  rank and all processes that it started have ended.
- If the launching process dies, the ranks end, and then this process.

::

    launching process ── request ──► server ── fork ──► keeper ── fork ──► rank
            ▲                                             │
            └────────────── started, exited ──────────────┘
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
# Words of a status pipe
STARTED = b"s"  # with the process id
FAILED = b"f"  # with the errno of the failed fork
EXITED = b"e"  # with the exit code, or the negative signal number
# Requests to the server
FORK = b"f"  # with the files of a rank
FORK_WITH_TRACKER = b"t"  # also with a connection to the script's resource tracker
CONTINUE = b"c"  # to continue keepers that something has stopped
# Between the server and a keeper: files need a byte with which they travel
_KEEP = b"k"  # with the files of a rank
_HAS_ENDED = b"i"  # nothing of the rank is left, and the keeper is idle

_PRELOADABLE = ("torch._dynamo", "torch._inductor.config")
"""Modules that many ranks import, at about a second each. The server imports them once a rank has.

All torch optimizers and DistributedDataParallel import the first, and
torch.use_deterministic_algorithms the second.
"""

# Attached to a request: the status pipe, two sockets, standard output, and standard error
_SENT_FILES = 5
# For a leftover process to end after SIGTERM: a resource tracker frees shared memory then
_TERMINATE_S = 1.0
_CLEAN_UP_S = 30.0  # for ranks to notice the end of the launching process, and to clean up
_POLL_S = 0.02  # a leftover process ends soon after its signal
_EXIT_S = 1.0  # between the end of the server's connections and its exit
_STOP_S = 60.0  # the server ends its ranks first; a guess that no test has contradicted
_MOST_IDLE = 16  # keepers; each has little memory of its own. A guess
# That they wait: for launches in a loop, and so that nothing stays after a launch
_KEEPER_IDLE_S = 0.25
_TAKE_S = 20.0  # for the server to take a request: it forks one rank in milliseconds
# From <linux/prctl.h>
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
NEVER = float("inf")


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
    # The launching thread may have blocked all signals. SIGUSR2 stays blocked in a Slurm job, where
    # it would end programs that the ranks start.
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
        self._keepers: dict[int, socket.socket] = {}  # by process id, with the connection to it
        self._idle: list[int] = []  # process ids of keepers that wait for a request
        self._stale: set[int] = set()  # keepers that lack modules which were imported since
        self._wanted: set[int] = set()  # numbers of modules that ranks have imported
        # Numbers of two kinds arrive: ranks write those of modules, of which there are few, and
        # Python writes SIGCHLD, the only signal with a handler, which is 17 or more on Linux
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        # A handler of Python, so that the number of the signal is written to the pipe
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        if "numpy" in sys.modules:  # torch imports numpy; each rank seeds this module
            importlib.import_module("numpy.random")
        self._freeze()
        gc.enable()  # `ForkServer` has disabled it for the imports

    def run(self) -> None:
        kill_at = NEVER
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
            if not ready:  # no launch follows the last one at once
                self._dismiss(self._idle)
            if self._woken in ready:
                self._wanted.update(os.read(self._woken, 4096))
                self._reap()
            # Before a request: a keeper says that it is idle before the end of its rank is known
            has_rank_ended = self._note_idle()
            # Not before: while the rank exits, an import would take a processor from it
            if has_rank_ended and self._wanted:
                self._load()
            if is_open and self._requests.fileno() in ready:
                is_open = self._take_request()
                # Counts once the connection is closed, which is the last request
                kill_at = time.monotonic() + _CLEAN_UP_S
            if not is_open:
                self._dismiss(self._idle)
                if time.monotonic() >= kill_at:
                    for pid in self._keepers:  # which kill their ranks
                        send_signal(os.kill, pid, signal.SIGTERM)
                    kill_at = NEVER

    def _take_request(self) -> bool:
        """Serve one request.

        Return False if the launching process closed the connection, or died.
        """
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
            # Else the kernel dropped descriptors: this process has reached its limit on open files.
            # The launching process sees that the pipes are closed
            if len(files) == n_sent:
                self._hand_over(files)
        for file in files:
            os.close(file)
        return True

    def _hand_over(self, files: list[int]) -> None:
        """Give the descriptors of a request to a keeper. They belong to it and to its rank."""
        while self._idle:
            # Something may have killed this keeper: then the next one gets the request
            with contextlib.suppress(OSError):
                socket.send_fds(self._keepers[self._idle.pop()], [_KEEP], files)
                return
        try:
            pid = self._fork_keeper(files)
            socket.send_fds(self._keepers[pid], [_KEEP], files)
        except OSError as error:
            # Not again: at a limit of the system, another keeper would fail too
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
                # The ends of others in this process would keep the others from seeing their end
                for each in (self._requests, ours, *self._keepers.values()):
                    each.close()
                for file in (self._woken, *files):
                    os.close(file)
                _Keeper(its, self._waker).run()
            finally:  # this process must not go on as a second server
                traceback.print_exc()
                os._exit(1)
        its.close()
        self._keepers[pid] = ours
        return pid

    def _reap(self) -> None:
        """Forget the keepers that have exited, and end what killed ones have left."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid == 0:  # the others run
                    break
                if pid in self._keepers:  # else an orphan of one
                    self._keepers.pop(pid).close()
                self._stale.discard(pid)
                if pid in self._idle:
                    self._idle.remove(pid)
        for orphan in children_of(self._pid) - self._keepers.keys():
            send_signal(os.kill, orphan, signal.SIGKILL)

    def _note_idle(self) -> bool:
        """Note the keepers whose ranks have ended. Return True if there are some."""
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
        """Let idle keepers exit: the end of their connection."""
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
                self._dismiss(self._idle)
                self._stale.update(self._keepers)
        self._wanted.clear()

    def _freeze(self) -> None:
        """Have ranks ignore the objects of this process: their collectors then do not copy pages.

        The finalizers of torch's libraries would take a third of the time of a launch at the exit
        of each rank.
        """
        gc.freeze()
        keep_finalizers_from_exits()


class _Keeper:
    """The process between the server and one rank: it reports the rank's end, and ends leftovers.

    It adopts what the rank leaves: its descendants whose parents have exited. So each process has
    one rank that it belongs to, and the rank never has to wait for processes that it did not start.
    """

    def __init__(self, requests: socket.socket, waker: int) -> None:
        self._requests = requests
        self._waker = waker  # the rank writes there which modules it has imported
        self._pid = os.getpid()
        self._rank = 0  # the process id, while it runs
        self._is_ordered = False  # to end the rank
        self._libc = ctypes.CDLL(None)

    def run(self) -> NoReturn:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, self._kill_rank)
        server = os.getppid()
        adopt_orphans()
        if sys.platform == "linux":  # on macOS, the rank ends when its connection closes
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != server:  # it has ended before the call
                os._exit(1)
        while not self._is_ordered:
            try:
                _, files, _, _ = socket.recv_fds(self._requests, 1, _SENT_FILES + 1)
            except OSError:  # the server was killed before it had read the last answer
                break
            if not files:  # the server has ended, or lets this keeper go
                break
            self._keep(files)
        os._exit(0)

    def _keep(self, files: list[int]) -> None:
        """Start a rank, and return once nothing of it is left."""
        status = files[0]
        group = -1  # the process id of the rank, which leads a process group; -1 without a rank
        try:
            group = self._rank = os.fork()
        except OSError as error:
            _report(status, FAILED, error.errno or errno.EAGAIN)
        if group == 0:
            self._become_rank(files)
        for file in files[1:]:
            os.close(file)
        if group > 0:
            _report(status, STARTED, group)
            if self._is_ordered:  # maybe before `_rank` was known
                self._kill_rank()
            code = self._wait_for_rank()
            if not self._is_ordered:  # else it was lost with the server, which says how it ended
                _report(status, EXITED, code)
            self._end_leftovers(group)
        # In this order: the launching process may send a request once the pipe is closed, and the
        # server finds this keeper idle then
        with contextlib.suppress(OSError):  # the server has ended
            self._requests.send(_HAS_ENDED)
        os.close(status)

    def _become_rank(self, files: list[int]) -> NoReturn:
        try:
            self._be_rank(files)
        finally:  # this process must not go on as a second keeper
            traceback.print_exc()
            os._exit(1)

    def _be_rank(self, files: list[int]) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._requests.close()
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)
        status, data, control, stdout, stderr, *tracker = files
        os.close(status)
        if tracker:
            use_tracker(tracker[0])
        # Open until this process exits
        connections = socket.socket(fileno=data), socket.socket(fileno=control)
        code = run_rank(*connections, (stdout, stderr))
        # Each number is one byte
        imported = bytes(i for i, name in enumerate(_PRELOADABLE) if name in sys.modules)
        with contextlib.suppress(OSError):  # the server has ended
            os.write(self._waker, imported)
        leave(code)

    def _kill_rank(self, *_: object) -> None:
        """End the rank at the order, or the death, of the server. What it leaves ends after it."""
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
        """End what the rank has left running.

        There are two kinds: members of its process group, and orphans that had left the group,
        which are children of this process.
        """
        # The number of the reaped rank stays with its group while that has members. Later, another
        # group may get it, so a group that was seen to be gone gets no more signals. Not within a
        # poll, nor before the first signal: kernels give all other numbers first
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
        while pid != 0:  # 0: the others run
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:  # there are none
                return False
        return True


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants. Otherwise they become children of init."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children_of(pid: int) -> set[int]:
    """Return the children of a process with a single thread."""
    with contextlib.suppress(OSError):  # macOS offers no way to find them
        return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}
    return set()


def _report(status: int, word: bytes, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launch no longer reads it
        os.write(status, STATUS.pack(word, number))


def send_signal(send: Callable[[int, int], None], pid: int, number: int) -> bool:
    """Signal a process, or a process group. Return True if it exists; zombies count."""
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
    status: int
    streams: tuple[int, ...]  # standard output and standard error; empty if they go elsewhere

    def close(self) -> None:
        """Close all of them: the rank exits then."""
        self.data.close()
        self.control.close()
        for file in (self.status, *self.streams):
            os.close(file)


def _pipe(ours: contextlib.ExitStack, its: contextlib.ExitStack) -> tuple[int, int]:
    """Make a pipe that a rank writes. The stacks close the ends."""
    reading, writing = os.pipe()
    ours.callback(os.close, reading)
    its.callback(os.close, writing)
    return reading, writing


def _socket_pair(
    ours: contextlib.ExitStack, its: contextlib.ExitStack
) -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    return ours.enter_context(one), its.enter_context(other)


class ForkServer:
    """The launching process's handle of the server. Any thread may use it.

    Implements `RankStarter` of the pool.
    """

    def __init__(self) -> None:
        if getattr(sys, "frozen", False):
            # Such an executable is the application itself, which would start again and again
            msg = (
                f"ranks need a Python interpreter to start, and {sys.executable} is a frozen "
                "application (PyInstaller, cx_Freeze). Run the script with Python"
            )
            raise LaunchError(msg)
        path = [str(Path(each).absolute()) for each in sys.path if isinstance(each, str)]
        # Most ranks need them
        modules = [name for name in list(sys.modules) if name.partition(".")[0] == "parawrap"]
        script = (
            # collection would take a sixth of the time to import
            f"import gc, sys; gc.disable(); sys.path[:] = {path!r}; "
            f"from parawrap.processes.fork_server import serve; serve({modules!r}, "
            f"{store_folders(os.getpid())!r})"
        )
        # An embedding program sets this executable, as for multiprocessing
        executable = os.fsdecode(multiprocessing.spawn.get_executable())
        command = [executable, *interpreter_options(), "-P", "-c", script]
        # Most ranks have one thread. To lower the number after a fork would start the threads
        # first; ranks can raise it.
        environ = {"OPENBLAS_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")} | os.environ
        # Also around Popen: a child that another thread forks would keep a pipe of it open, whose
        # end it waits for
        with handover as in_transit:
            ours, its = socket.socketpair()
            in_transit.append(its.fileno())
            close_in_forked_children(ours)
            ours.settimeout(_TAKE_S)
            self._socket = ours
            with its:
                # It runs in the root folder, because imports fail in a deleted working folder.
                self._process = subprocess.Popen(
                    command, stdin=its.fileno(), start_new_session=True, cwd="/", env=environ
                )
        self._place = f"node 0, {socket.gethostname()}"

    def start(self, rank: int) -> Connections:
        """Start a rank.

        Raises:
            LaunchError: If its process cannot be started.
        """
        # In this order: `its` ends are closed before other threads may fork, `ours` after an error
        with handover as in_transit, contextlib.ExitStack() as its, contextlib.ExitStack() as ours:
            try:
                status, status_end = _pipe(ours, its)
                stdout, stdout_end = _pipe(ours, its)
                stderr, stderr_end = _pipe(ours, its)
                data, data_end = _socket_pair(ours, its)
                control, control_end = _socket_pair(ours, its)
                # In the order in which `_be_rank` takes them
                sockets = data_end.fileno(), control_end.fileno()
                files = status_end, *sockets, stdout_end, stderr_end
                in_transit.extend(files)
                # Shared memory that the script has made stays until the script removes it: ranks
                # report to its resource tracker, as children of multiprocessing do. One of their
                # own would remove what they have only used
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
        """Kill a rank: its group and its process, which does not lead a group at first."""
        if pid:
            send_signal(os.killpg, pid, signal.SIGKILL)
            send_signal(os.kill, pid, signal.SIGKILL)
        # A signal that stopped the rank may have stopped its keeper too, which reports its end
        with contextlib.suppress(OSError):  # the server has ended
            self._socket.send(CONTINUE)

    def describe(self, _rank: int) -> str:
        """Describe the process with which a rank was lost: the server, or the rank's keeper."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        code = self._process.poll()
        if code is None:
            return "its parent process, which was killed"
        return (
            f"the process that forks ranks (process {self._process.pid}), which {exit_text(code)}"
        )

    def stop(self) -> None:
        """Close the connection, and wait until the server has ended."""
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:  # its ranks have not ended
            self._process.kill()
            self._process.wait()


_server: ForkServer | None = None
# Of `_server`: threads that launch at the same time start one server
_starting = threading.Lock()


def fork_server() -> ForkServer:
    """Return the server of this process. Start it at first use, and again if it has ended.

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
    # Without the lock: the server may wait for its ranks, and a launch meanwhile starts another one
    if stopping is not None:
        stopping.stop()


def _forget_server() -> None:
    """Forget the server in a forked child: it is a process of the parent."""
    global _server, _starting
    if _server is not None:
        _server._process.returncode = 0  # so that nothing waits for it
    _server, _starting = None, threading.Lock()  # another thread may have held the lock


os.register_at_fork(after_in_child=_forget_server)

"""The process that forks ranks. It has torch imported, has a single thread, and forks one rank per request.

`_starters` starts it. Its guarantees:

* The status pipe of a request reports the rank's process id and exit code. The pipe is closed once the rank and all
  processes that it started have ended.
* If the launching process dies, the ranks end, and then this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from typing import NamedTuple, NoReturn

from parawrap.launch._private_names import keep_finalizers_from_exits
from parawrap.launch.guard._orphan_processes import LOOK_S, Orphans, kill_group
from parawrap.launch.messages._channel import receive_exactly, socket_at_standard_input
from parawrap.launch.rank._cluster_signals import heed_signals
from parawrap.launch.rank._control_thread import PRELOADABLE
from parawrap.launch.rank._rank_process import run_rank

__all__ = ["ENDED", "FAILED", "FORK", "LOAD", "REQUEST", "STARTED", "STATUS", "serve_forks", "serve_standard_input"]

REQUEST = struct.Struct("<cd")  # FORK with the rank's grace_s, or LOAD with an index into PRELOADABLE
FORK, LOAD = b"f", b"l"
_FILES = 2  # attached to FORK: the rank's end of its connection, and the status pipe

STATUS = struct.Struct("<ci")
STARTED = b"s"  # with the process id
FAILED = b"f"  # with the errno of the failed fork
ENDED = b"e"  # with the exit code, or the negative signal number

_LOOK_FOR_PARENT_S = 0.5  # the kernel reports a dead parent on Linux only
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


class _Rank(NamedTuple):
    """A rank that this process forked: its status pipe, and its time to clean up."""

    status: int
    grace_s: float


def serve_standard_input() -> NoReturn:
    """Serve requests from standard input, which is a socket. The entry point of a fresh interpreter."""
    serve_forks(socket_at_standard_input())
    os._exit(0)  # a normal exit would spend 0.1 s on unloading torch


def serve_forks(requests: socket.socket) -> None:
    """Serve requests until the launching process closes the connection and the last rank has ended."""
    with requests:
        # Python warns about forks if a BLAS has threads. Ranks inherit this filter: it must not hide other warnings.
        warnings.filterwarnings("ignore", ".* is multi-threaded, use of fork", DeprecationWarning)
        heed_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process handles Ctrl-C
        _ForkServer(requests).run()


class _ForkServer:
    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._ranks: dict[int, _Rank] = {}
        self._ended: dict[int, _Rank] = {}
        self._leftovers = Orphans()
        self._to_load: list[str] = []
        self._parent, self._pid = os.getppid(), os.getpid()
        self._libc = ctypes.CDLL(None)
        self._adopt_orphans()
        if sys.platform == "linux":  # a stopped process must continue to notice its parent's death
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        if "numpy" in sys.modules:  # torch imports numpy; each rank seeds this module
            importlib.import_module("numpy.random")
        self._freeze()
        gc.enable()

    def run(self) -> None:
        watched: list[socket.socket | int] = [self._woken, self._requests]
        while self._requests in watched or self._ranks or self._leftovers:
            readable = self._wait(watched)
            if os.getppid() != self._parent:
                self._end_ranks()
                return
            if self._requests in readable and not self._take_request():
                watched.remove(self._requests)
            if not readable:
                self._load()

    def _wait(self, watched: list[socket.socket | int]) -> list[socket.socket | int]:
        """Wait for a watched file to become readable, and reap ended processes. Return the readable files."""
        patience_s = 0.0 if self._to_load else LOOK_S if self._leftovers else _LOOK_FOR_PARENT_S
        poll = select.poll()  # select() is limited to descriptors below 1024
        for file in watched:
            poll.register(file, select.POLLIN)
        ready = {number for number, _ in poll.poll(1000 * patience_s)}
        readable = [file for file in watched if (file if isinstance(file, int) else file.fileno()) in ready]
        if self._woken in readable:
            os.read(self._woken, 4096)
            self._reap()
        if self._leftovers:
            self._close_status(self._leftovers.gone(self._ranks))
        return readable

    # -- requests

    def _take_request(self) -> bool:
        """Serve one request. Return False if the launching process closed the connection."""
        try:
            head, files, _, _ = socket.recv_fds(self._requests, REQUEST.size, _FILES)
            if not head:
                return False
            word, number = REQUEST.unpack(head + receive_exactly(self._requests, REQUEST.size - len(head)))
        except (OSError, EOFError):
            return False
        if word == LOAD:
            self._to_load.append(PRELOADABLE[int(number)])
        elif len(files) == _FILES:
            self._fork(files[0], _Rank(files[1], number))
        else:  # the kernel dropped descriptors: this process has reached its limit on open files
            for file in files:
                _report(file, FAILED, errno.EMFILE)
                os.close(file)
        return True

    def _fork(self, line: int, rank: _Rank) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            _report(rank.status, FAILED, error.errno or errno.EAGAIN)
            os.close(rank.status)
        else:
            if pid == 0:
                self._become_rank(line, rank)
            self._ranks[pid] = rank
            _report(rank.status, STARTED, pid)
        os.close(line)

    def _become_rank(self, line: int, rank: _Rank) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._die_with_server()
            self._adopt_orphans()  # when this rank ends, its orphans become children of the server
            self._requests.close()
            others = (*self._ranks.values(), *self._ended.values())
            for file in (self._woken, self._waker, rank.status, *(each.status for each in others)):
                os.close(file)
            run_rank(socket.socket(fileno=line))
        finally:  # this process must not go on as a second server
            traceback.print_exc()
            os._exit(1)

    def _die_with_server(self) -> None:
        """Have the kernel kill this rank when the server ends. On macOS, the rank ends when its connection closes."""
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)

    def _adopt_orphans(self) -> None:
        """Become the parent of orphaned descendants. Otherwise they become children of init and survive the launch."""
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def _load(self) -> None:
        """Import the modules that earlier ranks imported, so that later ranks start with them."""
        for name in self._to_load:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # a rank that needs the module reports the error itself
                    importlib.import_module(name)
                self._freeze()
        self._to_load.clear()

    def _freeze(self) -> None:
        """Have ranks ignore the objects of this process: their collectors then do not copy pages.

        The finalizers of torch's libraries would take a third of the time of a launch at the exit of each rank.
        """
        gc.freeze()
        keep_finalizers_from_exits()

    # -- the end of ranks

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            rank = self._ranks.pop(pid, None)
            if rank is not None:  # else an orphan
                _report(rank.status, ENDED, os.waitstatus_to_exitcode(status))
                self._ended[pid] = rank
                self._leftovers.end(pid)

    def _close_status(self, gone: list[int]) -> None:
        for pid in gone:
            os.close(self._ended.pop(pid).status)

    def _end_ranks(self) -> None:
        """Wait until the ranks of a dead launching process have ended. Kill those left after the longest ``grace_s``."""
        deadline = time.monotonic() + max((rank.grace_s for rank in self._ranks.values()), default=0)
        while (self._ranks or self._leftovers) and time.monotonic() < deadline:
            self._wait([self._woken])
        for pid in self._ranks:
            kill_group(pid)
        while self._ranks or self._leftovers:
            self._wait([self._woken])


def _report(status: int, word: bytes, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launch no longer reads it
        os.write(status, STATUS.pack(word, number))

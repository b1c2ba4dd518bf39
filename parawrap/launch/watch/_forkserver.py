"""The warm process: torch loaded, no thread running, forking a rank whenever the parent asks.

Runs in a process of its own, started by `_starters`. What it guarantees: every rank it forked is reaped, and how it
ended is written into the status pipe that came with the request; when the parent is gone it ends its ranks and itself.
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

from parawrap.launch._leftovers import end_groups, kill_group
from parawrap.launch.parcels._wire import line_at_standard_input, receive_exactly
from parawrap.launch.ranks._signals import heed_signals
from parawrap.launch.ranks._worker import PRELOADABLE, run_rank

__all__ = ["FORK", "LOAD", "REQUEST", "STATUS", "serve"]

STATUS = struct.Struct("<i")  # as subprocess has it: an exit code, or minus a signal's number
REQUEST = struct.Struct("<cd")  # FORK with the rank's grace in seconds, or LOAD with an index into PRELOADABLE
FORK, LOAD = b"f", b"l"
_FILES = 2  # with FORK: the line and the status pipe

_LOOK_S = 0.5
_PR_SET_PDEATHSIG = 1


class _Child(NamedTuple):
    """A rank that runs: where its status goes, and how long it may take to clean up."""

    status: int
    grace_s: float


def serve() -> None:
    """Serve the requests that arrive at standard input, a socket, until the parent hangs up."""
    with line_at_standard_input() as requests:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forking beside the threads of a BLAS
        heed_signals()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's affair
        _Server(requests).run()


class _Server:
    """One per parent; single-threaded, as a process that forks should be."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._children: dict[int, _Child] = {}
        self._wanted: list[str] = []
        self._parent, self._pid = os.getppid(), os.getpid()
        self._libc = ctypes.CDLL(None)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        gc.freeze()  # what is here now is never collected in a rank, and so never copied for it
        gc.enable()

    def run(self) -> None:
        """Until the parent has hung up and the last rank has ended, or the parent is gone."""
        watched: list[socket.socket | int] = [self._woken, self._requests]
        while self._requests in watched or self._children:
            readable, _, _ = select.select(watched, [], [], _LOOK_S)
            if os.getppid() != self._parent:
                self._end_ranks()
                return
            if self._woken in readable:
                os.read(self._woken, 4096)
                self._reap()
            if self._requests in readable and not self._take_request():
                watched.remove(self._requests)
            if not readable and not self._children:
                self._load_wanted()

    def _take_request(self) -> bool:
        """With FORK come the rank's end of its line and the pipe for its status. False when the parent hung up."""
        try:
            head, files, _, _ = socket.recv_fds(self._requests, REQUEST.size, _FILES)
            if not head:
                return False
            word, number = REQUEST.unpack(head + receive_exactly(self._requests, REQUEST.size - len(head)))
            if word == FORK and len(files) != _FILES:  # they were lost: this process may open no more
                self._refuse(errno.EMFILE, files)
            elif word == FORK:
                self._fork(files[0], _Child(files[1], number))
            else:
                self._wanted.append(PRELOADABLE[int(number)])
        except (OSError, EOFError):
            return False
        return True

    def _fork(self, line: int, child: _Child) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(error.errno or errno.EAGAIN, [line, child.status])
            return
        if pid == 0:
            self._become_rank(line, child)
        os.close(line)
        self._children[pid] = child
        self._requests.sendall(STATUS.pack(pid))

    def _refuse(self, number: int, files: list[int]) -> None:
        """Answer that no rank was forked, by minus the number of the error."""
        for file in files:
            os.close(file)
        self._requests.sendall(STATUS.pack(-number))

    def _become_rank(self, line: int, child: _Child) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._die_with_server()
            self._requests.close()
            for file in (self._woken, self._waker, child.status, *(each.status for each in self._children.values())):
                os.close(file)
            run_rank(socket.socket(fileno=line), has_guardian=True)
        finally:  # whatever happens, this process never goes on as a second server
            traceback.print_exc()
            os._exit(1)

    def _die_with_server(self) -> None:
        """Have the kernel kill this rank when the server ends; where it cannot (macOS), the line's end tells the rank."""
        if sys.platform == "linux":
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os._exit(1)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:  # not a rank of ours
                continue
            with contextlib.suppress(BrokenPipeError):
                os.write(child.status, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(child.status)

    def _load_wanted(self) -> None:
        """With nothing else to do, import what the last ranks had to import for themselves."""
        for name in self._wanted:
            if name not in sys.modules:
                with contextlib.suppress(Exception):  # then the ranks find out why for themselves
                    importlib.import_module(name)
                gc.freeze()
        self._wanted.clear()

    def _end_ranks(self) -> None:
        """The parent is gone. Ranks see that too and end themselves; one that cannot within its grace is killed."""
        ranks = list(self._children)
        deadline = time.monotonic() + max((child.grace_s for child in self._children.values()), default=0)
        while self._children and time.monotonic() < deadline:
            select.select([self._woken], [], [], 0.05)
            self._reap()
        for pid in self._children:
            kill_group(pid)
        end_groups(ranks)

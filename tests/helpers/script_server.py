"""Run scripts in forks of a process that has torch and parawrap loaded, because a new interpreter needs two seconds.

Tests use `Scripts`; its server process runs this file. A forked script behaves like ``python script.py``: it has its own
``__main__``, an uncaught exception gives a traceback and exit code 1, and the interpreter exits as usual.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path

_NUMBER = struct.Struct("<i")
_LONGEST = 1 << 20


class Script:
    """A running script, with the subset of the subprocess.Popen interface that tests use."""

    def __init__(self, args, pid, status, streams):
        self.args, self.pid, self.returncode = args, pid, None
        self._status, self._streams = status, streams

    def poll(self):
        """Return the exit code, the negative signal number, or None while the script runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            (self.returncode,) = _NUMBER.unpack(os.read(self._status, _NUMBER.size))
        return self.returncode

    def communicate(self, timeout=None):
        until = None if timeout is None else time.monotonic() + timeout
        written = dict.fromkeys(self._streams, b"")
        reading = set(written)
        while reading:
            left = None if until is None else max(0.0, until - time.monotonic())
            ready = select.select(list(reading), [], [], left)[0]
            if not ready:
                raise subprocess.TimeoutExpired(self.args, timeout, b"".join(written.values()))
            for stream in ready:
                data = os.read(stream, 1 << 16)
                written[stream] += data
                if not data:
                    reading.remove(stream)
        self.wait(None if until is None else max(0.0, until - time.monotonic()))
        out, err = (*(data.decode() for data in written.values()), None)[:2]
        return out, err

    def kill(self):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def close(self):
        for file in (self._status, *self._streams):
            os.close(file)


class Scripts:
    """A server process, with its `pid`, that forks scripts. It starts with the first script. Not thread-safe."""

    def __init__(self):
        self._line = self.pid = None

    def start(self, path, args, cwd, *, streams=0, environ=os.environ):
        """Run a script. `communicate` reads that many pipes: 2 for stdout and stderr, 1 for both together, 0 for none."""
        if self._line is None:
            self._line, server_end = socket.socketpair()
            with server_end:
                process = subprocess.Popen([sys.executable, __file__], stdin=server_end, start_new_session=True)
            self.pid = process.pid
            atexit.register(process.wait)
            atexit.register(self._line.close)
        pipes = [os.pipe() for _ in range(streams)]
        status, writer = os.pipe()
        request = {"path": str(path), "args": list(map(str, args)), "cwd": str(cwd), "environ": dict(environ)}
        socket.send_fds(self._line, [json.dumps(request).encode()], [writer, *(each for _, each in pipes)])
        for file in (writer, *(each for _, each in pipes)):
            os.close(file)
        (pid,) = _NUMBER.unpack(os.read(status, _NUMBER.size))
        return Script([str(path), *request["args"]], pid, status, [each for each, _ in pipes])


# -- in the server process


def serve(line):
    """Fork once per request; return the request in the fork, and exit when the tests have ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the processes that wait for scripts
    while True:
        data, files, *_ = socket.recv_fds(line, _LONGEST, 3)
        if not data:
            sys.exit()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            line.close()
            if fork_script(*files):
                return json.loads(data)
        for file in files:
            os.close(file)


def fork_script(status, *streams):
    """Fork the script and return True in its process; this process reports the exit code and exits."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
        for number, stream in zip((1, 2), (*streams, *streams), strict=False):
            os.dup2(stream, number)
        for file in (status, *streams):
            os.close(file)
        return True
    for file in streams:
        os.close(file)
    os.write(status, _NUMBER.pack(pid))
    os.write(status, _NUMBER.pack(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    os._exit(0)


def become(request):
    """Set up this process like a new interpreter, and return the compiled script and its namespace."""
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 (the server's streams are not the script's)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    path = Path(request["path"])
    sys.argv[:] = [str(path), *request["args"]]
    added = request["environ"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [str(path.parent), *(each for each in added if each and each not in sys.path)]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    main.__file__ = str(path)
    main.__builtins__ = __builtins__
    return compile(path.read_text(), str(path), "exec"), vars(main)


if __name__ == "__main__":
    import psutil  # noqa: F401 (scripts import it)
    import torch.distributed  # noqa: F401 (importing parawrap does not load it)

    from parawrap import Platform  # noqa: F401

    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    exec(*become(serve(requests)))

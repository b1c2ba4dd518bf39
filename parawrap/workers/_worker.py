"""One worker: the only rank of a launch, and the connection to it."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from parawrap.errors import LaunchError, RankDiedError, SessionError
from parawrap.launch import Job, Platform, add_note, launch, unpack
from parawrap.workers._line import Line, Message
from parawrap.workers._serve import serve

__all__ = ["Worker", "WorkerDiedError"]

_SECRET_BYTES = 32
_LOOK_S = 0.05  # between two looks whether a worker that has not connected yet has ended
_LAST_S = 5.0  # for the end of a process that closed its connection
_PLATFORM = Platform(device="cpu", n_cpus=1, launcher="local", ipc_groups=None, seed=None, print_ranks=None)


class WorkerDiedError(Exception):
    """The process of a worker ended before it answered."""


class Worker:
    """A process with a copy of the model. Starts at once; `connect` waits for it. Thread-safe: requests run in turn."""

    def __init__(self, index: int, device: torch.device, threads: int, seed: int) -> None:
        self.device = device
        self.label = f"worker {index} on {device}"
        self._asking = threading.Lock()
        self._line: Line | None = None
        self.pid: int | None = None
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._folder = tempfile.mkdtemp(prefix="parawrap-")  # only this user can open it
        self._listener = socket.socket(socket.AF_UNIX)
        try:
            path = str(Path(self._folder, "line"))
            self._listener.bind(path)
            self._listener.listen(1)
            self._listener.settimeout(_LOOK_S)
            self._launch = launch(Job(_PLATFORM, serve, (path, self._secret, str(device), threads, seed)))
        except BaseException:
            self._end_listening()
            raise

    def connect(self) -> None:
        """Wait until the process is ready.

        Raises:
            LaunchError: If it ended before.
        """
        try:
            sock = self._accepted()
            sock.settimeout(None)
            if sock.recv(_SECRET_BYTES, socket.MSG_WAITALL) != self._secret:
                sock.close()
                msg = f"{self.label}: another process connected in its place"
                raise LaunchError(msg)
            self._line = Line(sock, copies_small=True)
            hello = self._line.receive()
            self.pid = None if hello is None else hello.value
        except BaseException:
            self.close()
            raise
        finally:
            self._end_listening()

    def ask(self, word: str, value: Any, address: str, file: int | None = None) -> Any:
        """Send a request, and return the answer.

        Raises:
            WorkerDiedError: If the process ends, or has ended, before it answers.
            BaseException: If the request raised: the exception, with its traceback in the worker as a note.
        """
        with self._asking:
            answer = self._exchange(word, value, address, file)
        if answer.word == "raised":
            raise self._raised(answer)
        return answer.value

    def death(self, times: int) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended."""
        known = self._ending()
        self.close()
        signal, code = (known.signal, known.exit_code) if isinstance(known, RankDiedError) else (None, None)
        how = f"was killed by {getattr(signal, 'name', signal)}" if signal is not None else f"exited with code {code or 0}"
        msg = f"{self.label} {how} while it ran this call; {times} workers ended so. Other calls continue on new workers"
        error = RankDiedError(msg, signal=signal, exit_code=code)
        for note in getattr(known, "__notes__", ()):
            add_note(error, note)
        return error

    def close(self) -> None:
        """End the process, and wait for its end. A request that it runs is not finished."""
        if self._line is not None:
            self._line.close()
        self._launch.cancel()

    def _accepted(self) -> socket.socket:
        while True:
            try:
                return self._listener.accept()[0]
            except TimeoutError:
                if self._launch.done():
                    self._launch.results()
                    msg = f"{self.label} ended before it was ready"
                    raise LaunchError(msg) from None

    def _exchange(self, word: str, value: Any, address: str, file: int | None) -> Message:
        if self._line is None:
            raise WorkerDiedError
        try:
            self._line.send(word, value, address, file)
            answer = self._line.receive()
        except (LaunchError, SessionError):  # nothing was sent
            raise
        except OSError as error:
            raise WorkerDiedError from error
        except BaseException:  # Ctrl-C: the answer would be taken for the next one's
            self._line.close()
            raise
        if answer is None:
            raise WorkerDiedError
        return answer

    def _raised(self, answer: Message) -> BaseException:
        assert answer.file is not None
        try:
            error: BaseException = unpack(answer.file)
        finally:
            os.close(answer.file)
        add_note(error, f"raised in {self.label}, with this traceback:\n{answer.value}")
        return error

    def _ending(self) -> BaseException | None:
        """Return how the launch ended. A process that closed its connection and still runs is not waited for."""
        try:
            self._launch.results(_LAST_S)
        except Exception as error:  # noqa: BLE001 (each kind is described)
            return error
        return None

    def _end_listening(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

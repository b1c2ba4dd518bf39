"""One worker process on this machine: the only rank of a launch, and the connection to it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import RankDiedError, add_note
from parawrap.launch import Job, Platform, launch
from parawrap.workers._line import Line, Message
from parawrap.workers._serve import serve_lane
from parawrap.workers._worker_lane import Answer, ModelFile, raise_from_worker

__all__ = ["LocalWorkers"]

_LAST_S = 5.0  # for the end of a process that closed its connection


class LocalWorkers:
    """Starts the workers of one session on this machine. They share its cores."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = devices
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices)) or 1

    def start(self, lane: int, seed: int) -> LocalWorker:
        """Start the worker of a lane."""
        return LocalWorker(lane, self.devices[lane], self._threads, seed)

    def end(self) -> None:
        """Do nothing: local workers share nothing."""


class LocalWorker:
    """A process that answers requests in the order of sending. One thread sends at a time, and one thread receives."""

    def __init__(self, index: int, device: torch.device, threads: int, seed: int) -> None:
        self.label = f"worker {index} on {device}"
        self.function = -1
        platform = Platform(
            device="cpu", n_cpus=1, launcher="local", ipc_groups=None, seed=None, print_ranks=None, name=f"worker-{index}"
        )
        ours, its = socket.socketpair()
        self._line = Line(ours, copies_small=True)
        with its:
            try:
                self._launch = launch(Job(platform, serve_lane, (str(device), threads, seed), line=its.fileno()))
            except BaseException:
                self._line.close()
                raise

    def send(self, number: int, word: str, value: Any, address: str) -> None:
        """Send a request.

        Raises:
            UnsendableError: If the value cannot be pickled. Nothing is sent then.
            ConnectionError: If the process has ended.
        """
        self._line.send(Message(word, value, number), address)

    def send_model(self, number: int, file: ModelFile) -> None:
        """Send a pickled model."""
        self._line.send(Message("model", None, number, file=file.number), "")

    def receive(self) -> Answer | None:
        """Wait for the next answer; None if the process has ended."""
        arrival = self._line.receive()
        if arrival is None:
            return None
        read = arrival.load
        if arrival.word == "raised":
            packed, traceback = arrival.load()
            read = partial(raise_from_worker, packed, traceback, self.label)
        return Answer(arrival.number, arrival.start, arrival.end, read)

    def death(self) -> RankDiedError:
        """Wait for the end of the process, and return the error that says how it ended."""
        known = self._find_ending()
        self.close()
        signal, code = (known.signal, known.exit_code) if isinstance(known, RankDiedError) else (None, None)
        how = f"was killed by {getattr(signal, 'name', signal)}" if signal is not None else f"exited with code {code or 0}"
        error = RankDiedError(f"{self.label} {how}", signal=signal, exit_code=code)
        for note in getattr(known, "__notes__", ()):
            add_note(error, note)
        return error

    def interrupt(self) -> None:
        """Close the connection. The process ends after the request that it runs."""
        self._line.close()

    def close(self, *, at_once: bool = True) -> None:
        """End the process, and wait for its end. Unless `at_once`, an idle process gets time to exit on its own."""
        self._line.close()
        if not at_once:
            self._find_ending()
        self._launch.cancel()

    def _find_ending(self) -> BaseException | None:
        """Return how the launch ended. A process that closed its connection and still runs is not waited for."""
        try:
            self._launch.results(_LAST_S)
        except Exception as error:  # noqa: BLE001 (each kind is described)
            return error.with_traceback(None)  # its frames refer to this worker, and the launch keeps the error
        return None

"""Workers on a Ray cluster: actors in a placement group. Batches and the model travel through Ray's object store."""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from time import monotonic, perf_counter_ns
from typing import Any

import torch

from parawrap.errors import LaunchError, ParawrapError, PlatformError, RankDiedError
from parawrap.launch import Device, Platform
from parawrap.launch.ray.reservation import Reservation, join_cluster
from parawrap.workers._ray_actor import Actor, loaded, pack_apart
from parawrap.workers._worker_lane import Answer, ModelFile, raise_from_worker

__all__ = ["RayWorkers", "devices_of"]

_PLACING_S = 60.0  # for the start of an actor
_FIELDS = ("name", "device", "launcher", "n_nodes", "n_gpus", "n_cpus", "ram")  # the fields that a block uses
_REMEDIES = {
    "seed": "seed torch before the block",
    "max_restarts": "use parallel(..., retries=...)",
    "timeout_min": "use future.result(timeout)",
}


def devices_of(platform: Platform) -> list[torch.device]:
    """Return the device of each lane of a platform.

    Raises:
        PlatformError: If the platform is not for Ray, or sets a field that has no meaning for a block.
    """
    if platform.launcher != "ray":
        msg = (
            f"launcher={platform.launcher!r}: the only platform of a block is Platform(device='ray', ...). On one machine, "
            "use workers='process'. On Slurm, start Ray in the allocation, or call the model in a function under @wrapper"
        )
        raise PlatformError(msg)
    if platform.device not in (Device.CPU, Device.GPU):
        msg = f"device={str(platform.device)!r}: workers on Ray use CPUs or GPUs. Give Platform(device='ray', n_gpus=...)"
        raise PlatformError(msg)
    default = Platform(device="ray")
    for name, value in vars(platform).items():
        if name not in _FIELDS and value != getattr(default, name):
            msg = f"{name}={value!r}: this field has no meaning for a parallel block; {_REMEDIES.get(name, 'leave it out')}"
            raise PlatformError(msg)
    kind = "cuda:0" if platform.device == Device.GPU else "cpu"  # each actor sees its own GPU alone
    return [torch.device(kind)] * platform.world_size


class RayWorkers:
    """Starts the workers of one session, each with the share of one rank. Thread-safe."""

    def __init__(self, platform: Platform) -> None:
        self.devices: Sequence[torch.device] = devices_of(platform)
        self._platform = platform
        self._changing = threading.Lock()
        self._ray: Any = None
        self._reservation: Reservation | None = None
        self._has_ended = False
        self._model: tuple[ModelFile | None, Any] = None, None

    def start(self, lane: int, seed: int) -> RayWorker:
        """Start the worker of a lane.

        Raises:
            LaunchError: If the cluster has too few resources.
        """
        with self._changing:
            if self._reservation is None:
                self._reserve()
            assert self._reservation is not None
            options = self._reservation.options_of_rank(lane)
        until = monotonic() + _PLACING_S
        while True:
            self._check_open()
            worker = RayWorker(self._ray, lane, self.devices[lane], options, seed, self._store)
            try:
                self._ray.get(worker.started(), timeout=max(0.0, until - monotonic()))
            except Exception as error:
                worker.close()
                if isinstance(error, self._ray.exceptions.RayActorError) and monotonic() < until:
                    continue  # its node was lost: Ray finds another one
                msg = (
                    f"{self._platform.name}: worker {lane} did not start in {_PLACING_S:g} s: {error}. Free resources of "
                    "the cluster, or add a node"
                )
                raise LaunchError(msg) from error
            return worker

    def end(self) -> None:
        """Release the resources. A thread that waits for them raises LaunchError."""
        self._has_ended = True
        with self._changing:
            reservation, self._reservation, self._model = self._reservation, None, (None, None)
        if reservation is not None:
            reservation.end()

    def _reserve(self) -> None:
        self._ray = join_cluster(self._platform)
        self._reservation = Reservation(self._ray, self._platform)
        self._reservation.request()
        while not self._reservation.is_ready():  # the cluster is large enough when it is idle
            self._check_open()

    def _check_open(self) -> None:
        if self._has_ended or not self._ray.is_initialized():
            why = "the block ended" if self._has_ended else "ray.shutdown() was called"
            msg = f"{self._platform.name}: {why} while workers started"
            raise LaunchError(msg)

    def _store(self, file: ModelFile) -> Any:
        """Return the reference of a packed model in the object store. All workers share it."""
        with self._changing:
            if self._model[0] is not file:
                import numpy as np

                with mmap.mmap(file.number, 0, prot=mmap.PROT_READ) as packed:
                    array = np.frombuffer(packed, dtype=np.uint8)
                    self._model = file, self._ray.put(array)
                    del array  # it refers to the mapping
            return self._model[1]


class RayWorker:
    """An actor that answers requests in the order of sending. One thread sends at a time, and one thread receives."""

    def __init__(
        self,
        ray: Any,
        lane: int,
        device: torch.device,
        options: dict[str, Any],
        seed: int,
        stored: Callable[[ModelFile], Any],
    ) -> None:
        self.label = f"worker {lane} on {device}"
        self.function = -1
        self._ray = ray
        self._store = stored
        self._sent: SimpleQueue[tuple[int, Any] | None] = SimpleQueue()
        self._death: Exception | None = None
        self._given = self._answered = 0  # requests; the sending thread counts the first, the receiving one the second
        threads = max(1, int(options["num_cpus"]))
        actor = ray.remote(Actor).options(name=None, max_restarts=0, max_task_retries=0, **options)
        self._actor = actor.remote(str(device), threads, seed, sys.path)

    def started(self) -> Any:
        """Return a reference that is ready when the actor runs."""
        return self._actor.started.remote()

    def send(self, number: int, word: str, value: Any, address: str) -> None:
        """Send a request.

        Raises:
            UnsendableError: If the value cannot be pickled. Nothing is sent then.
            ConnectionError: If Ray was shut down.
        """
        parcel = pack_apart(value, address)
        self._check_ray()
        if self._given == self._answered:
            self._check_alive()
        self._given += 1
        self._sent.put((number, self._actor.answer.remote(word, parcel)))

    def send_model(self, number: int, file: ModelFile) -> None:
        """Send a pickled model."""
        self._check_ray()
        self._given += 1
        self._sent.put((number, self._actor.take_model.remote(self._store(file))))

    def receive(self) -> Answer | None:
        """Wait for the next answer; None if the actor has ended."""
        sent = self._sent.get()
        if sent is None:
            return None
        number, reference = sent
        try:
            has_raised, took_ns, parcel = self._ray.get(reference)
        except Exception as error:  # noqa: BLE001 (Ray raises many types for a lost actor, and after a shutdown)
            self._death = error
            return None
        self._answered += 1
        read = partial(loaded, parcel)
        if has_raised:
            packed, (traceback,) = parcel
            read = partial(raise_from_worker, packed, traceback, self.label)
        end = perf_counter_ns()  # the clock of another machine cannot be compared
        return Answer(number, end - took_ns, end, read)

    def death(self) -> ParawrapError:
        """Return the error that says how the actor ended."""
        self.close()
        why = str(self._death).strip().splitlines()
        return RankDiedError(f"{self.label} died: {' '.join(line.strip() for line in why)}")

    def interrupt(self) -> None:
        """End the actor, and the thread that receives."""
        self.close()

    def close(self, *, at_once: bool = True) -> None:
        """End the actor. A request that it runs is not finished."""
        self._sent.put(None)
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it has ended
                self._ray.kill(self._actor)

    def _check_alive(self) -> None:
        """Raise ConnectionError if the actor has ended while it had nothing to do: no call may count that."""
        try:
            self._ray.get(self.started())
        except Exception as error:
            self._death = error
            self._sent.put(None)
            raise ConnectionError from error

    def _check_ray(self) -> None:
        if not self._ray.is_initialized():  # otherwise the next call would start Ray again
            raise ConnectionError

"""Workers on a Ray cluster: actors in a placement group. Batches and the model travel through Ray's object store."""

from __future__ import annotations

import contextlib
import pickle
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import count
from time import monotonic, perf_counter_ns
from typing import Any

import torch

from parawrap.errors import LaunchError, ParawrapError, PlatformError, RankDiedError
from parawrap.launch import Device, Platform
from parawrap.launch.ray.reservation import Reservation
from parawrap.processes.pickling import Packed
from parawrap.workers.lanes import Reply, error_from_worker
from parawrap.workers.model import SEEDS
from parawrap.workers.packing import NOWHERE, Packer
from parawrap.workers.ray_actor import Actor, block_of, parcel_of

_LOOK_S = 0.2  # between two looks for messages that other threads have sent meanwhile
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
        self._model: tuple[Packed | None, Any] = None, None
        self._numbers = count(1)

    def start(self, lane: int) -> RayWorker:
        """Start the worker of a lane.

        Raises:
            LaunchError: If the cluster has too few resources.
        """
        with self._changing:
            if self._reservation is None:
                self._reserve()
            assert self._reservation is not None
            options = self._reservation.options_of_rank(lane)
        seed = (torch.initial_seed() + next(self._numbers)) % SEEDS
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

    def poll(self, workers: Sequence[Any], timeout_s: float | None) -> Collection[int]:
        """Wait until a worker has answered or ended, for a moment at most. Return the positions of such workers."""
        ended = [position for position, worker in enumerate(workers) if worker.has_ended]
        if ended:
            return ended
        waiting = {worker.oldest: position for position, worker in enumerate(workers) if worker.oldest is not None}
        patience_s = _LOOK_S if timeout_s is None else timeout_s
        if not self._ray.is_initialized():  # its actors are gone
            return list(waiting.values())
        if not waiting:
            time.sleep(patience_s)
            return []
        ready, _ = self._ray.wait([*waiting], num_returns=1, timeout=patience_s)
        return [waiting[each] for each in ready]

    def end(self) -> None:
        """Release the resources. A thread that waits for them raises LaunchError."""
        self._has_ended = True
        with self._changing:
            reservation, self._reservation, self._model = self._reservation, None, (None, None)
        if reservation is not None:
            reservation.end()

    def _reserve(self) -> None:
        self._reservation = Reservation(self._platform)
        self._ray = self._reservation.ray
        while not self._reservation.is_ready():  # the cluster is large enough when it is idle
            self._check_open()

    def _check_open(self) -> None:
        if self._has_ended or not self._ray.is_initialized():
            why = "the block ended" if self._has_ended else "ray.shutdown() was called"
            msg = f"{self._platform.name}: {why} while workers started"
            raise LaunchError(msg)

    def _store(self, packed: Packed) -> Any:
        """Return the reference of a packed model in the object store. All workers share it."""
        with self._changing:
            if self._model[0] is not packed:
                import numpy as np

                self._model = packed, self._ray.put(np.frombuffer(b"".join(packed.parts), dtype=np.uint8))
            return self._model[1]


class RayWorker:
    """An actor that answers messages in the order of sending. One thread at a time uses it."""

    has_more = False

    def __init__(
        self, ray: Any, lane: int, device: torch.device, options: dict[str, Any], seed: int, stored: Callable[[Packed], Any]
    ) -> None:
        self.label = f"worker {lane} on {device}"
        self.function = -1
        self._ray = ray
        self._store = stored
        self._sent: deque[Any] = deque()
        self._death: Exception | None = None
        threads = max(1, int(options["num_cpus"]))
        actor = ray.remote(Actor).options(name=None, max_restarts=0, max_task_retries=0, **options)
        self._actor = actor.remote(str(device), threads, seed, sys.path)

    @property
    def oldest(self) -> Any:
        """The reference of the next answer; None if nothing was sent."""
        return self._sent[0] if self._sent else None

    @property
    def has_ended(self) -> bool:
        """True if the actor was found dead."""
        return self._death is not None

    def started(self) -> Any:
        """Return a reference that is ready when the actor runs."""
        return self._actor.started.remote()

    def send(self, body: tuple[Any, ...], packer: Packer) -> None:
        """Send calls.

        Raises:
            ConnectionError: If the actor has ended while it had nothing to do, or if Ray was shut down.
        """
        self._check_ray()
        if not self._sent:
            self._check_alive()
        self._sent.append(self._actor.call.remote(parcel_of(body, packer)))

    def send_model(self, model: Packed | bytes) -> None:
        """Send a model, or a pickled call that builds it."""
        self._check_ray()
        if isinstance(model, bytes):
            self._sent.append(self._actor.build_model.remote(model))
        else:
            self._sent.append(self._actor.take_model.remote(self._store(model)))

    def receive(self) -> Reply | BaseException | None:
        """Wait for the next reply, or the exception of a model that cannot be made; None if the actor has ended."""
        if not self._sent:
            return None
        try:
            has_failed, took_ns, parcel = self._ray.get(self._sent.popleft())
        except Exception as error:  # noqa: BLE001 (Ray raises many types for a lost actor, and after a shutdown)
            self._death = error
            return None
        body, end = pickle.loads(parcel[0]), perf_counter_ns()  # the clock of another machine cannot be compared
        if has_failed:
            packed, traceback = body
            return error_from_worker(packed, traceback, self.label)
        return Reply(body, block_of(parcel), NOWHERE, end - took_ns, end)

    def death(self) -> ParawrapError:
        """Return the error that says how the actor ended."""
        self.close()
        why = str(self._death).strip().splitlines()
        return RankDiedError(f"{self.label} died: {' '.join(line.strip() for line in why)}")

    def close(self, *, at_once: bool = True) -> None:
        """End the actor. A message that it works on is not finished."""
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):  # it has ended
                self._ray.kill(self._actor)

    def _check_alive(self) -> None:
        """Raise ConnectionError if the actor has ended while it had nothing to do: no call may count that."""
        try:
            self._ray.get(self.started())
        except Exception as error:
            self._death = error
            raise ConnectionError from error

    def _check_ray(self) -> None:
        if not self._ray.is_initialized():  # otherwise the next call would start Ray again
            raise ConnectionError

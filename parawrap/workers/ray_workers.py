"""Workers on a Ray cluster: actors in a placement group.

Batches and the model travel through Ray's object store.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import Any, NamedTuple

import torch

from parawrap.errors import LaunchError, PlatformError, RankDiedError
from parawrap.launch import Device, Platform
from parawrap.launch.ray.reservation import Reservation
from parawrap.processes.packing import Packer
from parawrap.processes.pickling import Packed
from parawrap.processes.shared_memory import aligned_copy
from parawrap.workers.worker import Form, ModelServer, ReceivedAnswers

# For the start of an actor on reserved resources. It imports torch. A guess that no test has
# contradicted
_PLACING_S = 60.0
# Fields of `Platform` that a block uses. All others must have their defaults
_FIELDS_OF_BLOCK = ("name", "device", "launcher", "n_nodes", "n_gpus", "n_cpus", "ram")


def devices_of(platform: Platform) -> list[torch.device]:
    """Return the device of each lane of a platform.

    Raises:
        PlatformError: If the platform is not for Ray, or sets a field that has no meaning for a
            block.
    """
    if platform.launcher != "ray":
        msg = (
            f"launcher={platform.launcher!r}: the only platform of a block is "
            "Platform(device='ray', ...). On one machine, "
            "use workers='process'. On Slurm, start Ray in the allocation, or call the model in "
            "a function under @wrapper"
        )
        raise PlatformError(msg)
    if platform.device not in (Device.CPU, Device.GPU):
        msg = (
            f"device={str(platform.device)!r}: workers on Ray use CPUs or GPUs. Give "
            "Platform(device='ray', n_gpus=...)"
        )
        raise PlatformError(msg)
    default = Platform(device="ray")
    for name, value in vars(platform).items():
        if name not in _FIELDS_OF_BLOCK and value != getattr(default, name):
            msg = f"{name}={value!r}: this field has no meaning for a parallel block. Leave it out"
            raise PlatformError(msg)
    kind = "cuda:0" if platform.device == Device.GPU else "cpu"  # each actor sees its own GPU alone
    return [torch.device(kind)] * platform.world_size


# -- in this process


class _StoredModel(NamedTuple):
    """A packed model, and its reference in the object store."""

    packed: Packed
    reference: Any


class RayWorkers:
    """Starts the workers of one session, each with the resources of one rank.

    One thread at a time starts workers. Any thread may call `end`.
    """

    def __init__(self, platform: Platform) -> None:
        self.devices: Sequence[torch.device] = devices_of(platform)
        self._platform = platform
        self._ray: Any = None  # the package, once the resources are reserved
        self._reservation: Reservation | None = None
        self._has_ended = False
        self._last_model: _StoredModel | None = None  # the model that was sent last

    def start(self, lane: int, seed: int) -> RayWorker:
        """Start the worker of a lane. Its random generators get the seed.

        Raises:
            LaunchError: If the cluster has too few resources, or the block ends meanwhile.
        """
        if self._reservation is None:
            self._reservation = Reservation(self._platform)
            self._ray = self._reservation.ray
        # Without a time limit: `Reservation` has checked that the cluster is large enough, so the
        # wait ends when other users of the cluster leave. Also for later workers, and at once then:
        # Ctrl-C may have ended the wait of the first one
        while not self._reservation.request_and_wait():
            self._check_open()
        actor_options = self._reservation.options_of_rank(lane)
        until = monotonic() + _PLACING_S
        while True:
            self._check_open()
            worker = RayWorker(
                self._ray,
                lane,
                self.devices[lane],
                actor_options=actor_options,
                seed=seed,
                store_model=self._store_model,
            )
            try:
                self._ray.get(worker.ping(), timeout=max(0.0, until - monotonic()))
                return worker
            except Exception as error:
                worker.stop(at_once=True)
                # An actor that is lost with its node may start on another one
                is_lost = isinstance(error, self._ray.exceptions.RayActorError)
                if not is_lost or monotonic() >= until:
                    msg = (
                        f"{self._platform.name}: worker {lane} did not start in {_PLACING_S:g} "
                        f"s: {error}. Free resources "
                        "of the cluster, or add a node"
                    )
                    raise LaunchError(msg) from error

    def poll(self, workers: Sequence[Any], timeout_s: float) -> Collection[int]:
        """Wait until a worker has answered or ended, or until the time is over.

        Return the positions of such workers.
        """
        if not self._ray.is_initialized():  # all actors are gone, also idle ones
            return range(len(workers))
        waiting = {}  # the position of each worker by the reference of its next answers
        for position, worker in enumerate(workers):
            if worker.oldest is not None:
                waiting[worker.oldest] = position
        if not waiting:
            time.sleep(timeout_s)
            return []
        ready, _ = self._ray.wait([*waiting], num_returns=1, timeout=timeout_s)
        return [waiting[each] for each in ready]

    def end(self) -> None:
        """Release the resources. A thread that waits for them raises LaunchError.

        May be called again.
        """
        # First: `start` in another thread then raises in `_check_open`. What it has reserved until
        # then, `close` releases
        self._has_ended = True
        self._last_model = None
        # It stays: a thread in `start` may request the resources after this line, and before
        # `close` releases them
        if self._reservation is not None:
            self._reservation.end()

    def close(self) -> None:
        """Release the resources that a thread has reserved since `end`."""
        self.end()

    def _check_open(self) -> None:
        if self._has_ended or not self._ray.is_initialized():
            why = "the block ended" if self._has_ended else "ray.shutdown() was called"
            msg = f"{self._platform.name}: {why} while workers started"
            raise LaunchError(msg)

    def _store_model(self, packed: Packed) -> Any:
        """Return the reference of a packed model in the object store. All workers share it."""
        last = self._last_model
        if last is None or last.packed is not packed:
            import numpy as np

            reference = self._ray.put(np.frombuffer(packed.to_bytes(), dtype=np.uint8))
            last = self._last_model = _StoredModel(packed, reference)
        return last.reference


class RayWorker:
    """An actor that answers messages in the order of sending. One thread at a time uses it."""

    def __init__(
        self,
        ray: Any,
        lane: int,
        device: torch.device,
        *,
        actor_options: dict[str, Any],
        seed: int,
        store_model: Callable[[Packed], Any],
    ) -> None:
        self._label = f"worker {lane} on {device}"
        self._ray = ray
        self._store_model = store_model
        self._sent: deque[Any] = deque()  # references of answers, oldest first
        self._death: Exception | None = None  # raised by Ray, which says why the actor ended
        threads = max(1, int(actor_options["num_cpus"]))
        actor = ray.remote(Actor).options(
            name=None, max_restarts=0, max_task_retries=0, **actor_options
        )
        self._actor = actor.remote(str(device), threads, seed, sys.path)

    @property
    def oldest(self) -> Any:
        """The reference of the next answers; None if nothing was sent."""
        return self._sent[0] if self._sent else None

    def ping(self) -> Any:
        """Return the reference of an answer that is ready once the actor runs."""
        return self._actor.ping.remote()

    def send(self, body: tuple[Any, ...], packer: Packer, model: Packed | None) -> None:
        """Send calls, and their model, unless it is None: the actor has it already.

        Raises:
            ConnectionError: If Ray was shut down.
        """
        if not self._ray.is_initialized():  # otherwise `remote` would start Ray again
            raise ConnectionError
        stored = None if model is None else self._store_model(model)
        self._sent.append(self._actor.answer.remote(_make_message(body, packer), stored))

    def receive(self) -> list[ReceivedAnswers] | None:
        """Wait for the next answers, and return them; None if the actor has ended."""
        # `get` would start Ray again. Without Ray, `poll` returns workers that were sent nothing
        if not (self._sent and self._ray.is_initialized()):
            return None
        try:
            # It stays in `_sent` meanwhile: `poll` finds the worker again after Ctrl-C, or after it
            # has ended
            (number, answers), block = _open_message(self._ray.get(self._sent[0]))
        except Exception as error:  # noqa: BLE001 (Ray raises many types for a lost actor)
            self._death = error
            return None
        self._sent.popleft()
        return [(number, answers, block, None)]

    def death(self) -> RankDiedError:
        """Return the error that says how the actor ended."""
        why = "ray.shutdown() was called" if self._death is None else self._death
        return RankDiedError(f"{self._label} died: {' '.join(str(why).split())}")

    def stop(self, *, at_once: bool) -> None:
        """End the actor at once, also within a call."""
        if self._ray.is_initialized():
            with contextlib.suppress(Exception):  # the actor has ended
                self._ray.kill(self._actor)

    def join(self) -> None:
        """Do nothing: Ray ends the process."""


RayMessage = tuple[bytes, Any]
"""The pickled body of a message, and its block as an array, which Ray moves without pickling."""


def _make_message(body: Any, packer: Packer) -> RayMessage:
    import numpy as np

    return pickle.dumps(body, 5), np.frombuffer(b"".join(packer.parts), dtype=np.uint8)


def _open_message(message: RayMessage) -> tuple[Any, memoryview]:
    """Return the body of a message, and a copy of its block.

    Arrays from Ray's object store are read-only, and the model may write into its arguments.
    """
    body, block = message
    return pickle.loads(body), aligned_copy(memoryview(block))


# -- in the worker


class Actor:
    """Answers messages, one after another. Runs as a Ray actor."""

    def __init__(self, device: str, threads: int, seed: int, path: list[str]) -> None:
        # The driver's import path, for the modules of its model
        missing = [folder for folder in path if folder not in sys.path]
        sys.path[:0] = missing
        torch.set_num_threads(threads)
        torch.manual_seed(seed)
        self._server = ModelServer(torch.device(device))

    def ping(self) -> None:
        """Do nothing: an answer shows that the actor runs."""

    def answer(self, message: RayMessage, model: Any) -> RayMessage:
        """Run the calls of a message. Take their packed model before, unless it is None."""
        if model is not None:
            # A copy: arrays from Ray's object store are read-only
            self._server.take_model(memoryview(bytearray(model)))
        (number, form, items), block = _open_message(message)
        answers, packer = self._server.answer(Form(*form), items, block)
        return _make_message((number, answers), packer)

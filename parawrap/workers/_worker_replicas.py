"""The model as its workers get it: what to send, and when it changed."""

from __future__ import annotations

import os
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from parawrap.errors import SessionError, UnsendableError
from parawrap.lanes import Lane, Modes
from parawrap.launch import packed
from parawrap.replicas import (
    Freshness,
    Ledger,
    Snapshot,
    Survey,
    buffers_of,
    buffers_written_unseen,
    home_of,
    lasting,
    with_other_buffers,
)
from parawrap.tree import flatten, unflatten
from parawrap.workers._build import Build
from parawrap.workers._requests import CallRequest, ChangeRequest, ModelRequest, PackedModes, warn_again
from parawrap.workers._server import Call, ModelTensor, Returned, WrittenBuffer, pickled_function
from parawrap.workers._worker_lane import Backlog, ModelFile, Request, Worker, WorkerLane
from parawrap.workers._worker_pool import post

__all__ = ["WorkerReplicas", "Workers", "landed"]

_SEEDS = 1 << 63


class Workers(Protocol):
    """Starts the workers of one session."""

    devices: Sequence[torch.device]

    @abstractmethod
    def start(self, lane: int, seed: int) -> Worker:
        """Start the worker of a lane."""

    @abstractmethod
    def end(self) -> None:
        """Release what the workers shared. They have ended."""


class WorkerReplicas:
    """The model for one worker per lane. Workers start at the first `refresh`, and end with the pool.

    The caller ensures that no request is unanswered during `refresh`.
    """

    has_model = True
    learns = False  # workers compute no gradients
    is_ready = False
    generators: tuple[torch.Generator, ...] = ()

    def __init__(self, target: Any, workers: Workers, retries: int) -> None:
        devices = workers.devices
        self.target = target
        self.freshness = Freshness()
        self.home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self.packed_modes = PackedModes(devices[0].type)
        self.backlog = Backlog()
        self.lanes = [
            WorkerLane(index, device, self._new_worker, self._install, retries, self.backlog)
            for index, device in enumerate(devices)
        ]
        self.current = [WorkerReplica(lane, self) for lane in self.lanes]
        self._workers = workers
        self.end_workers = weakref.finalize(self, workers.end)
        self._started = 0
        self._changing = threading.Lock()
        self._file: ModelFile | None = None
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._unseen: dict[int, torch.Tensor] = {}  # tensors that may be written without a new version, as sent
        self._function: bytes | None = None
        self._watch = Snapshot(())
        self._ledger = Ledger((), ())
        self._is_unsent = True

    def ready(self) -> bool:
        """False while a parameter waits for its first call, which runs plainly."""
        tensors = () if not isinstance(self.target, torch.nn.Module) else self.target.parameters()
        self.is_ready = not any(map(is_lazy, tensors))
        return self.is_ready

    def stale(self) -> bool:
        """True if the target changed since the last `refresh`, or a lane has no worker."""
        if self._is_unsent or None in [lane.thread for lane in self.lanes]:
            return True
        return not (
            self._watch.intact()
            and self._ledger.same_form()
            and self._ledger.unwritten()
            and not self._ledger.has_seen_steps
            and (self._function is None or self._function == self._pickled_function())
            and (not self._unseen or not self._written_unseen())
        )

    def refresh(self) -> None:
        """Start the workers that do not run, and send the others what changed."""
        was_unsent = self._is_unsent
        is_new = was_unsent or self._function is not None or not (self._watch.intact() and self._ledger.same_form())
        changed: list[tuple[int, torch.Tensor]] = []
        if is_new:
            self._survey_target()
        else:
            changed = self._take_changes()
        self._drop_file()
        self._is_unsent = True  # if a worker does not get the changes, all get the model at the next refresh
        new = [lane for lane in self.lanes if lane.thread is None]
        started = [lane.begin() for lane in new]
        if is_new or changed:
            make = partial(ModelRequest, self.send_model) if is_new else partial(ChangeRequest, changed)
            started += [post(lane, make()) for lane in self.lanes if lane not in new]
        for future in started:
            future.result()
        self._is_unsent = False

    def ran_plainly(self) -> None:
        """Note a call in the caller's thread. The workers need the buffers that it may have written unseen."""
        self._ledger.suspect(buffers_written_unseen(self._modules))

    def for_later(self) -> list[WorkerReplica]:
        """Return the replicas: workers have copies of the model."""
        return self.current

    def warn(self) -> None:
        """Do nothing: each worker warns of what a call set in its model."""

    def renew(self) -> None:
        """Send the whole model at the next refresh."""
        self._is_unsent = True

    def forget(self) -> None:
        """Free the memory of the model. The pool is closed."""
        self._is_unsent = True
        self.end_workers()
        self._drop_file()
        self._watch, self._ledger, self._tensors, self._modules, self._unseen = Snapshot(()), Ledger((), ()), [], [], {}

    def is_on(self, device: torch.device) -> bool:
        """True if the model lies on that device."""
        return self.home == device

    def take_buffers(self, written: Sequence[WrittenBuffer]) -> None:
        """Write buffers that came from a worker into the target."""
        for index, name, value in written:
            buffers = buffers_of(self._modules[index])
            buffer = buffers.get(name)
            with lasting():
                if buffer is not None and buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    buffers[name] = value.clone()

    def of_model(self, output: Any) -> Any:
        """Return an output with tensors of the model in the places of their stand-ins."""
        leaves, spec = flatten(output)
        return unflatten(spec, [self._tensors[leaf.position] if isinstance(leaf, ModelTensor) else leaf for leaf in leaves])

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor if it is one of the model's."""
        return tensor if any(tensor is each for each in self._tensors) else None

    def send_model(self, worker: Worker, number: int) -> None:
        """Send the whole model to a worker.

        Raises:
            UnsendableError: If it cannot be pickled.
        """
        if isinstance(self.target, Build):
            worker.send(number, "build", tuple(self.target), "")
            return
        with self._changing:
            if self._file is None:
                model = {"model": self.target, "tensors": self._tensors, "modules": self._modules}
                try:
                    self._file = ModelFile(packed(model, "model", ""))
                except UnsendableError as error:
                    msg = f"{error}. Let each worker build its own model: parallel(build(load_model, ...), ...)"
                    raise UnsendableError(msg) from error.__cause__
            worker.send_model(number, self._file)

    def _install(self, worker: Worker) -> int:
        """Give a new worker the model, and return its process id."""
        self.send_model(worker, 0)
        answer = worker.receive()
        if answer is None:
            raise ConnectionError
        pid: int = answer.read()
        return pid

    def _new_worker(self, lane: int) -> Worker:
        """Start a worker for a lane. Each one has its own random numbers."""
        with self._changing:
            self._started += 1
            seed = (torch.initial_seed() + self._started) % _SEEDS
        return self._workers.start(lane, seed)

    def _survey_target(self) -> None:
        if isinstance(self.target, Build):
            return
        survey = Survey(self.target)
        if survey.generators:
            msg = "the model holds a torch.Generator, which cannot be shared with workers. Use torch's default generator"
            raise SessionError(msg)
        self._tensors = [node.value for node in survey.tensors]
        self._watch = Snapshot((node, node.value) for node in survey.copied)
        self._ledger = Ledger(self._tensors, [tensor for tensor in self._tensors if not tensor.is_inference()])
        self._modules = [node.value for node in survey.modules]
        self._function = self._pickled_function()
        self._note_unseen()

    def _pickled_function(self) -> bytes | None:
        """Return the pickle of a function without a model. The containers that it refers to are not watched."""
        if self._modules or self._tensors:
            return None
        return pickled_function(self.target, "target")

    def _written_unseen(self) -> list[torch.Tensor]:
        """Return the tensors that were written without a new version."""
        return [self._tensors[index] for index, sent in self._unseen.items() if not torch.equal(self._tensors[index], sent)]

    def _take_changes(self) -> list[tuple[int, torch.Tensor]]:
        """Return the tensors that changed, by their positions, and take their values for those that were sent."""
        if self._ledger.has_seen_steps:
            written = set(map(id, self._tensors))
        else:
            versioned = with_other_buffers(self._ledger.written(), self._modules)
            written = set(map(id, (*versioned, *self._written_unseen())))
        changed = [(index, tensor.detach()) for index, tensor in enumerate(self._tensors) if id(tensor) in written]
        self._ledger.enter_versions()
        self._note_unseen()
        self.freshness.refreshes += bool(changed)
        self.freshness.copied_bytes += sum(tensor.nbytes for _, tensor in changed)
        return changed

    def _note_unseen(self) -> None:
        """Copy the tensors that a write leaves without a new version: some buffers, and tensors of inference mode."""
        buffers = set(map(id, buffers_written_unseen(self._modules)))
        unseen = [index for index, each in enumerate(self._tensors) if id(each) in buffers or each.is_inference()]
        with lasting():
            self._unseen = {index: self._tensors[index].clone() for index in unseen}

    def _drop_file(self) -> None:
        with self._changing:
            if self._file is not None:
                os.close(self._file.number)
                self._file = None


class WorkerReplica:
    """The model of one worker, as a session uses a replica.

    As with lanes in threads, the buffers that lane 0 wrote in a cut call go to the model.
    """

    def __init__(self, lane: Lane, owner: WorkerReplicas) -> None:
        self.lane = lane.index
        self.module = _Remote()
        self.write_back: Callable[[], None] | None = None  # of the last cut call
        self._owner = owner

    def prepared(self, function: _Remote) -> Callable[..., Any]:
        """Return a function of the arguments of a shard. It returns the lane's part of the call."""
        return partial(_Shard, self, self._owner, function._name)

    whole = prepared  # the four verbs alone; whole calls of `map` and `submit` are requests

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor if it is one of the model's. Copies that came from a worker are not."""
        return self._owner.original_of(tensor)

    def keep(self, buffers: Sequence[WrittenBuffer]) -> None:
        """Keep buffers that came from the worker for `write_back`."""
        self.write_back = partial(self._owner.take_buffers, buffers) if buffers else None


class _Shard:
    """A lane's part of a cut call."""

    def __init__(
        self, replica: WorkerReplica, owner: WorkerReplicas, method: str | None, /, *args: Any, **kwargs: Any
    ) -> None:
        self._replica = replica
        self._owner = owner
        self._method = method
        self._args = args
        self._kwargs = kwargs
        self.record: Callable[[int, int, int, BaseException | None], None] | None = None  # as in `Request`

    def request(self, modes: Modes, rng_state: torch.Tensor | None = None) -> Request:
        """Return the request for the worker. With `rng_state`, it continues these random numbers."""
        is_first = self._replica.lane == 0
        sent = self._owner.packed_modes(modes)
        call = Call(self._method, None, sent, rng_state, is_first, self._args, self._kwargs)
        request = CallRequest(call, is_inference=modes.inference)
        request.record = self.record
        return request

    def land(self, returned: Returned) -> Any:
        """Take what the call left, and return its output."""
        if returned.rng_state is not None:
            torch.set_rng_state(returned.rng_state)
        if self._replica.lane == 0:
            self._replica.keep(returned.buffers)
        return landed(self._owner, returned, self._args, self._kwargs)


def landed(owner: WorkerReplicas, returned: Returned, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the output of a call. Repeat its warnings here, and what it wrote into its arguments."""
    warn_again(returned.warned)
    if returned.written:
        leaves = flatten((args, kwargs))[0]
        for index, value in returned.written:
            with torch.inference_mode(leaves[index].is_inference()), torch.no_grad():
                leaves[index].copy_(value)
    return owner.of_model(returned.output) if returned.has_model_tensors else returned.output


class _Remote:
    """The model in the worker, as far as a session uses a replica: itself, and its methods by name."""

    __slots__ = ("_name",)

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(name)

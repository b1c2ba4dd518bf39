"""The replicas of a session with worker processes: one worker per lane, and how they stay up to date."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import SessionError
from parawrap.launch import packed
from parawrap.replicas import Freshness, Ledger, Survey, Watch, home_of, lasting, may_be_written_unseen
from parawrap.workers._build import Build
from parawrap.workers._serve import Call, SentModes, WrittenBuffer
from parawrap.workers._worker import Worker, WorkerDiedError

__all__ = ["WorkerReplicas"]

_SEEDS = 1 << 63


class WorkerReplicas:
    """One worker per lane. Workers start at the first `refresh`, and end with `forget`.

    The caller ensures that no lane runs during `refresh`. A worker that dies is replaced by the lane that uses it.
    """

    has_model = True
    is_ready = True
    generators: tuple[torch.Generator, ...] = ()
    structure = 0

    def __init__(self, target: Any, devices: Sequence[torch.device], retries: int) -> None:
        self.target = target
        self.freshness = Freshness()
        self.current: list[WorkerReplica] = []
        self.training: tuple[Any, ...] = ()
        self.home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self.labels = [f"{device} (worker {index})" for index, device in enumerate(devices)]
        self._devices = list(devices)
        self._retries = retries
        self._threads = backend_of(devices[0].type).intra_op_threads(len(devices)) or 1
        self._started = 0
        self._counting = threading.Lock()
        self._file: int | None = None
        self._file_is_old = False
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._unseen: dict[int, torch.Tensor] = {}  # tensors that may be written without a new version, as sent
        self._watch = Watch(())
        self._ledger = Ledger((), ())
        self._is_unsent = True
        self.is_over = False

    def ready(self) -> bool:
        """True: a lazy module is sent after its first, plain call like any other change."""
        return True

    def stale(self) -> bool:
        """True if the target changed since the last `refresh`."""
        if self._is_unsent:
            return True
        return not (
            self._watch.intact()
            and self._ledger.same_form()
            and self._ledger.unwritten()
            and all(torch.equal(self._tensors[index], sent) for index, sent in self._unseen.items())
        )

    def refresh(self) -> None:
        """Start the workers if they do not run, and send them what changed."""
        self._start()
        if not self._is_unsent and self._watch.intact() and self._ledger.same_form():
            self._send_changed_tensors()
        else:
            self.structure += not self._is_unsent
            self._survey_target()
            self._in_all(WorkerReplica.send_model)
        self._is_unsent = False

    def renew(self) -> None:
        """Send the whole model at the next refresh."""
        self._is_unsent = True

    def end(self) -> None:
        """End the workers, also in the middle of a request, which then raises SessionError. They are not replaced."""
        self.is_over = True
        _in_threads([replica.worker.close for replica in self.current])

    def forget(self) -> None:
        """End the workers, and free the memory of the model."""
        self.end()
        self.current = []
        self._is_unsent = True
        self._close_file()
        self._watch, self._ledger, self._tensors, self._modules, self._unseen = Watch(()), Ledger((), ()), [], [], {}

    def refuse_grown(self, *, warn: bool = True) -> None:
        """Do nothing: a layer that a call makes stays in the worker, and is dropped before the next call."""

    def scratch(self) -> Any:
        """Return a copy of the target for a run that must leave no trace."""
        return copy.deepcopy(self.target)

    def is_on(self, device: torch.device) -> bool:
        """True if the model lies on that device."""
        return self.home == device

    def new_worker(self, lane: int) -> Worker:
        """Start a worker for a lane. Each one has its own random numbers."""
        with self._counting:
            self._started += 1
            seed = (torch.initial_seed() + self._started) % _SEEDS
        return Worker(lane, self._devices[lane], self._threads, seed)

    def take_buffers(self, written: Sequence[WrittenBuffer]) -> None:
        """Write buffers that came from a worker into the target."""
        for index, name, value in written:
            buffers = self._modules[index]._buffers
            buffer = buffers.get(name)
            with lasting():
                if buffer is not None and buffer.shape == value.shape:
                    buffer.copy_(value)
                else:
                    buffers[name] = value.clone()

    def send_model(self, worker: Worker) -> None:
        """Send the whole model to a worker."""
        if isinstance(self.target, Build):
            worker.ask("build", tuple(self.target), "")
            return
        with self._counting:
            if self._file is None or self._file_is_old:
                self._close_file()
                self._file = packed((self.target, self._tensors, self._modules), "model", "model")
                self._file_is_old = False
        worker.ask("model", None, "", self._file)

    def _start(self) -> None:
        if self.current:
            return
        workers: list[Worker] = []
        try:
            for lane in range(len(self._devices)):
                workers.append(self.new_worker(lane))  # noqa: PERF401 (those that started end if one does not start)
            for worker in workers:
                worker.connect()
        except BaseException:
            for worker in workers:
                worker.close()
            raise
        self.current = [WorkerReplica(lane, worker, self, self._retries) for lane, worker in enumerate(workers)]

    def _survey_target(self) -> None:
        if isinstance(self.target, Build):
            return
        survey = Survey(self.target)
        self._tensors = [node.value for node in survey.tensors]
        self._watch = Watch(survey.copied)
        self._ledger = Ledger(self._tensors, self._tensors)
        self._modules = [node.value for node in survey.modules]
        self.training = tuple(getattr(module, "training", None) for module in self._modules)
        self._note_unseen()
        self._file_is_old = True

    def _send_changed_tensors(self) -> None:
        unseen = [
            self._tensors[index] for index, sent in self._unseen.items() if not torch.equal(self._tensors[index], sent)
        ]
        written = {id(tensor) for tensor in (*self._ledger.written(), *unseen)}
        changed = [(index, tensor.detach()) for index, tensor in enumerate(self._tensors) if id(tensor) in written]
        self._file_is_old = True
        self._in_all(partial(WorkerReplica.send_tensors, changed=changed))
        self._ledger.enter_versions()
        self._note_unseen()
        self.freshness.refreshes += 1
        self.freshness.copied_bytes += sum(tensor.nbytes for _, tensor in changed)

    def _note_unseen(self) -> None:
        """Copy the tensors that a model may write without a new version."""
        buffers = [
            id(buffer)
            for module in self._modules
            for buffer in module._buffers.values()
            if buffer is not None and may_be_written_unseen(module, buffer)
        ]
        with lasting():
            self._unseen = {index: each.clone() for index, each in enumerate(self._tensors) if id(each) in buffers}

    def _in_all(self, send: Callable[[WorkerReplica], None]) -> None:
        _in_threads([partial(send, replica) for replica in self.current])

    def _close_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class WorkerReplica:
    """The lane's end of one worker, in the place of a replica. Used by one lane at a time.

    As with lanes in threads, the buffers that lane 0 wrote in a cut call go to the model.
    """

    def __init__(self, lane: int, worker: Worker, owner: WorkerReplicas, retries: int) -> None:
        self.lane = lane
        self.worker = worker
        self.module = _Remote()
        self.write_back: Callable[[], None] | None = None  # of the last cut call
        self._owner = owner
        self._retries = retries
        self._modes: tuple[SentModes | None, bytes] = None, b""

    def prepared(self, way: _Remote) -> Callable[..., Any]:
        """Return the function that runs a shard of a cut call."""
        return partial(self._run, way._name, None, is_cut=True)

    def whole(self, way: _Remote) -> Callable[..., Any]:
        """Return the function that runs a whole call."""
        return self.whole_prepared(way._name, None)

    def whole_prepared(self, method: str | None, prepare: Callable[..., Any] | None) -> Callable[..., Any]:
        """Return the function that runs a whole call. With `prepare`, its arguments are those of ``prepare(*args)``."""
        return partial(self._run, method, prepare, is_cut=False)

    def original_of(self, tensor: torch.Tensor) -> None:
        """Return None: a tensor from another process is never a view of a tensor of the model here."""

    def send_model(self) -> None:
        """Send the whole model; to a new worker if this one died."""
        self._retried(lambda: self._owner.send_model(self.worker), is_complete=True)

    def send_tensors(self, changed: list[tuple[int, torch.Tensor]]) -> None:
        """Send tensors of the model. A new worker gets the whole model instead."""
        self._retried(lambda: self.worker.ask("tensors_changed", changed, "the model"), is_complete=False)

    def _run(
        self, method: str | None, prepare: Callable[..., Any] | None, /, *args: Any, is_cut: bool, **kwargs: Any
    ) -> Any:
        rng_state = torch.get_rng_state() if is_cut else None
        returns_buffers = is_cut and self.lane == 0
        call = Call(method, prepare, self._packed_modes(), rng_state, returns_buffers, args, kwargs)
        output, rng_state, buffers = self._retried(lambda: self.worker.ask("call", call._asdict(), ""), is_complete=False)
        if rng_state is not None:
            torch.set_rng_state(rng_state)
        if returns_buffers:
            self.write_back = partial(self._owner.take_buffers, buffers) if buffers else None
        return output

    def _packed_modes(self) -> bytes:
        """Return the pickled modes of the calling thread. They rarely change between calls."""
        modes = SentModes.here(self.worker.device.type)
        if modes != self._modes[0]:
            self._modes = modes, pickle.dumps(modes)
        return self._modes[1]

    def _retried(self, request: Callable[[], Any], *, is_complete: bool) -> Any:
        """Make a request. If the worker dies, replace it and try again, at most `retries` times."""
        deaths = 0
        while True:
            try:
                return request()
            except WorkerDiedError:
                deaths += 1
                died = self.worker
            self._refuse_if_over()
            error = died.death(deaths)
            self.worker = self._owner.new_worker(self.lane)
            self.worker.connect()
            self._refuse_if_over()
            if not is_complete:
                self._owner.send_model(self.worker)
            if deaths > self._retries:
                raise error

    def _refuse_if_over(self) -> None:
        """Raise if the session has ended, also if it ended while a worker was being replaced."""
        if self._owner.is_over:
            self.worker.close()
            msg = "the block ended before this call: its workers are gone"
            raise SessionError(msg)


class _Remote:
    """The model in the worker, as far as a session uses a replica: itself, and its methods by name."""

    __slots__ = ("_name",)

    def __init__(self, name: str | None = None) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(name)


def _in_threads(tasks: Sequence[Callable[[], None]]) -> None:
    """Run tasks at the same time, and raise the first error after all have ended."""
    errors: list[BaseException] = []

    def run(task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks[1:]]
    for thread in threads:
        thread.start()
    for task in tasks[:1]:
        run(task)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

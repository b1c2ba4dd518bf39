"""The model as its workers get it: what to send, and when it changed."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from parawrap.engine.away import count_optimizer_steps, optimizer_steps
from parawrap.engine.batched_copies import lasting
from parawrap.engine.holdings import Holdings
from parawrap.engine.replicas import buffers_of, home_of, is_written_unseen, version_of
from parawrap.engine.survey import Survey
from parawrap.errors import SessionError, UnsendableError
from parawrap.processes.pickling import Packed, ValuePickler, pack
from parawrap.tree import flatten, unflatten
from parawrap.workers._build import Build
from parawrap.workers._captured_values import CapturedValues
from parawrap.workers._server import ModelTensor, WrittenBuffer, pickle_function
from parawrap.workers._worker_lane import ModelFile, Worker

__all__ = ["SEEDS", "SentModel"]

SEEDS = 1 << 63  # torch takes 64 bits, and a sum of two must not overflow


class SentModel:
    """The target of a block with workers. `install` and `send` run in any thread; one thread at a time reads the target.

    `is_unsent` is True if the workers do not have the model as it was read last. A changed model is sent whole.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self.refreshes = self.copied_bytes = 0
        self.is_unsent = True
        self._changing = threading.Lock()
        self._packed: Packed | None = None
        self._file: ModelFile | None = None
        self._built: bytes | None = None
        self._tensors: list[torch.Tensor] = []
        self._by_id: dict[int, torch.Tensor] = {}
        self._modules: list[torch.nn.Module] = []
        self._unseen: list[tuple[torch.Tensor, torch.Tensor]] = []  # that may be written without a new version, as sent
        self._function: bytes | None = None
        self._captured: CapturedValues | None = None  # of the functions that were sent with the model
        self._holdings = Holdings((), lambda owner: None)
        self._state: tuple[Any, ...] = ()
        self._is_ready = False
        self._was_read = False
        self._must_renew = False
        self._seed = torch.initial_seed() % SEEDS  # every worker builds the same model, also one that takes another's place
        count_optimizer_steps()

    def is_ready(self) -> bool:
        """False while a parameter waits for its first call, which runs plainly."""
        if not self._is_ready:
            tensors = () if not isinstance(self.target, torch.nn.Module) else self.target.parameters()
            self._is_ready = not any(map(is_lazy, tensors))
        return self._is_ready

    def is_current(self) -> bool:
        """True if the target is what it was when it was read last."""
        if isinstance(self.target, Build):
            return self._was_read and not self._must_renew
        return (
            self._was_read
            and not self._must_renew
            and self._holdings.is_same()
            and (self._captured is None or self._captured.intact())
            and self._state == self._read_state()
            and (self._function is None or self._function == self._pickle_function())
            and all(torch.equal(tensor, sent) for tensor, sent in self._unseen)
        )

    def read_target(self) -> None:
        """Read the target as it is now. Until `sent`, all workers need it."""
        if self._was_read:
            self.refreshes += 1
            self.copied_bytes += sum(tensor.nbytes for tensor in self._tensors if tensor.layout is torch.strided)
        self._must_renew = False
        self._survey_target()
        self._drop_file()
        self._was_read = self.is_unsent = True

    def sent(self) -> None:
        """Note that all workers have the target."""
        self.is_unsent = False

    def renew(self) -> None:
        """Send the whole model at the next refresh."""
        self._must_renew = True

    def ran_plainly(self) -> None:
        """Note a call in the caller's thread, which may have written buffers unseen."""
        trains = any(module.training for module in self._modules)
        self._must_renew = self._must_renew or (trains and any(map(is_written_unseen, self._by_id.values())))

    def forget(self) -> None:
        """Free the memory of the model."""
        self.is_unsent, self._was_read = True, False
        self._drop_file()
        self._holdings, self._state = Holdings((), lambda owner: None), ()
        self._tensors, self._modules, self._unseen = [], [], []
        self._by_id, self._captured = {}, None

    def send(self, worker: Worker, number: int) -> None:
        """Send the whole model to a worker.

        Raises:
            UnsendableError: If it cannot be pickled.
        """
        if isinstance(self.target, Build):
            with self._changing:
                if self._built is None:  # once: a worker that takes another's place builds the same
                    self._built = pickle_function((*self.target, self._seed, torch.get_default_dtype()), "")
            worker.send(number, "build", self._built, "")
            return
        with self._changing:
            if self._file is None:
                model = {"model": self.target, "tensors": self._tensors, "modules": self._modules}
                sent: list[FunctionType | type] = []
                try:
                    self._packed = pack(model, "", partial(_NotingPickler, sent))
                    self._file = ModelFile(self._packed.file())
                except UnsendableError as error:
                    msg = f"{error}. Let each worker build its own model: parallel(build(load_model, ...), ...)"
                    raise UnsendableError(msg) from error.__cause__
                self._captured = self._captured or CapturedValues(sent)
            worker.send_model(number, self._file)

    def install(self, worker: Worker) -> int:
        """Give a new worker the model as the others have it, and return its process id."""
        self.send(worker, 0)
        pid: int = _answer_of(worker)
        return pid

    # Outputs and buffers that come from workers

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
        """Return the tensor if it is one of the model's. Copies that came from a worker are not."""
        return self._by_id.get(id(tensor))

    def _read_state(self) -> tuple[Any, ...]:
        """Return what a write into a tensor of the target changes."""
        versions = [None if tensor.is_inference() else version_of(tensor) for tensor in self._tensors]
        addresses = [tensor.data_ptr() if tensor.layout is torch.strided else id(tensor) for tensor in self._tensors]
        forms = [(tensor.dtype, tensor.requires_grad) for tensor in self._tensors]
        return optimizer_steps(), versions, addresses, forms

    def _survey_target(self) -> None:
        if isinstance(self.target, Build):
            return
        survey = Survey(self.target)
        if survey.generators:
            msg = "the model holds a torch.Generator, which cannot be shared with workers. Use torch's default generator"
            raise SessionError(msg)
        self._tensors = [*survey.params, *survey.tensors]
        self._by_id = {id(tensor): tensor for tensor in self._tensors}
        self._holdings = Holdings(survey.places, lambda owner: owner)
        self._state = self._read_state()
        self._modules = survey.modules
        self._function = self._pickle_function()
        self._captured = None
        written = survey.tensors if survey.trains else ()
        unseen = [*(each for each in self._tensors if each.is_inference()), *filter(is_written_unseen, written)]
        with lasting():
            self._unseen = [(tensor, tensor.clone()) for tensor in unseen]

    def _pickle_function(self) -> bytes | None:
        """Return the pickle of a function without a model. The containers that it refers to are not watched."""
        if self._modules or self._tensors:
            return None
        return pickle_function(self.target, "target")

    def _drop_file(self) -> None:
        with self._changing:
            if self._file is not None:
                self._file = self._packed = None
            self._built = None


class _NotingPickler(ValuePickler):
    """Notes the functions and classes that it pickles with their code, closures, and globals."""

    def __init__(self, sent: list[FunctionType | type], stream: io.BytesIO, buffers: list[memoryview]) -> None:
        super().__init__(stream, buffers)
        self._sent = sent

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, (FunctionType, type)) and reduced is not NotImplemented:
            self._sent.append(obj)
        return reduced


def _answer_of(worker: Worker) -> Any:
    answer = worker.receive()
    if answer is None:
        raise ConnectionError
    return answer.read()

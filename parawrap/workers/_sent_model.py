"""The model as its workers get it: what to send, and when it changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from parawrap.errors import SessionError, UnsendableError
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
from parawrap.workers._captured_values import CapturedValues
from parawrap.workers._server import ModelTensor, WrittenBuffer, pickle_function
from parawrap.workers._worker_lane import ModelFile, Worker

__all__ = ["SEEDS", "SentModel"]

SEEDS = 1 << 63  # torch takes 64 bits, and a sum of two must not overflow


class SentModel:
    """The target of a block with workers. `install` and `send` run in any thread; one thread at a time takes changes."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.freshness = Freshness()
        self.home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self._changing = threading.Lock()
        self._file: ModelFile | None = None
        self._built: bytes | None = None
        self._tensors: list[torch.Tensor] = []
        self._by_id: dict[int, torch.Tensor] = {}
        self._modules: list[torch.nn.Module] = []
        self._unseen: dict[int, torch.Tensor] = {}  # tensors that may be written without a new version, as sent
        self._function: bytes | None = None
        self._captured: CapturedValues | None = None  # of the functions that were sent with the model
        self._watch = Snapshot(())
        self._ledger = Ledger((), ())
        self._is_ready = False
        self._is_unsent = True
        self._must_renew = False
        self._since: dict[int, torch.Tensor] = {}  # what was sent after the file, for a worker that takes another's place
        self._seed = torch.initial_seed() % SEEDS  # every worker builds the same model, also one that takes another's place

    def is_ready(self) -> bool:
        """False while a parameter waits for its first call, which runs plainly."""
        if not self._is_ready:
            tensors = () if not isinstance(self.target, torch.nn.Module) else self.target.parameters()
            self._is_ready = not any(map(is_lazy, tensors))
        return self._is_ready

    def is_current(self) -> bool:
        """True if all workers have the model as it is."""
        return (
            not (self._is_unsent or self._must_renew)
            and self._has_same_structure()
            and self._ledger.unwritten()
            and not self._ledger.has_seen_steps
            and (self._function is None or self._function == self._pickle_function())
            and (not self._unseen or not self._written_unseen())
        )

    def take_changes(self) -> list[tuple[int, torch.Tensor]] | None:
        """Return new values of tensors, by their positions; None if workers need the whole model.

        Until `sent`, all workers need it.
        """
        is_new = self._is_unsent or self._must_renew or self._function is not None or not self._has_same_structure()
        self._must_renew = False
        changes = None if is_new else self._written_tensors()
        if changes is None:
            self._survey_target()
            self._drop_file()
        else:
            with self._changing, lasting():
                self._since.update((index, tensor.clone()) for index, tensor in changes)
        self._is_unsent = True
        return changes

    def sent(self) -> None:
        """Note that all workers have the changes."""
        self._is_unsent = False

    def renew(self) -> None:
        """Send the whole model at the next refresh."""
        self._must_renew = True

    def ran_plainly(self) -> None:
        """Note a call in the caller's thread. The workers need the buffers that it may have written unseen."""
        self._ledger.suspect(buffers_written_unseen(self._modules))

    def forget(self) -> None:
        """Free the memory of the model."""
        self._is_unsent = True
        self._drop_file()
        self._watch, self._ledger, self._tensors, self._modules, self._unseen = Snapshot(()), Ledger((), ()), [], [], {}
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
                    self._file = ModelFile(packed(model, "model", "", sent))
                except UnsendableError as error:
                    msg = f"{error}. Let each worker build its own model: parallel(build(load_model, ...), ...)"
                    raise UnsendableError(msg) from error.__cause__
                self._captured = self._captured or CapturedValues(sent)
            worker.send_model(number, self._file)

    def install(self, worker: Worker) -> int:
        """Give a new worker the model as the others have it, and return its process id."""
        self.send(worker, 0)
        pid: int = _answer_of(worker)
        with self._changing:
            since = [*self._since.items()]
        if since:
            worker.send(0, "tensors_changed", since, "the model")
            _answer_of(worker)
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

    def _has_same_structure(self) -> bool:
        return self._watch.intact() and self._ledger.same_form() and (self._captured is None or self._captured.intact())

    def _survey_target(self) -> None:
        if isinstance(self.target, Build):
            return
        survey = Survey(self.target)
        if survey.generators:
            msg = "the model holds a torch.Generator, which cannot be shared with workers. Use torch's default generator"
            raise SessionError(msg)
        self._tensors = [node.value for node in survey.tensors]
        self._by_id = {id(tensor): tensor for tensor in self._tensors}
        self._watch = Snapshot((node, node.value) for node in survey.copied)
        self._ledger = Ledger(self._tensors, [tensor for tensor in self._tensors if not tensor.is_inference()])
        self._modules = [node.value for node in survey.modules]
        self._function = self._pickle_function()
        self._captured = None
        self._note_unseen()

    def _pickle_function(self) -> bytes | None:
        """Return the pickle of a function without a model. The containers that it refers to are not watched."""
        if self._modules or self._tensors:
            return None
        return pickle_function(self.target, "target")

    def _written_unseen(self) -> list[torch.Tensor]:
        """Return the tensors that were written without a new version."""
        return [self._tensors[index] for index, sent in self._unseen.items() if not torch.equal(self._tensors[index], sent)]

    def _written_tensors(self) -> list[tuple[int, torch.Tensor]]:
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
            self._since, self._built = {}, None


def _answer_of(worker: Worker) -> Any:
    answer = worker.receive()
    if answer is None:
        raise ConnectionError
    return answer.read()

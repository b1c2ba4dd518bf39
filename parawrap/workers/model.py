"""The model as its workers get it: what to send, and when it changed."""

from __future__ import annotations

import io
import threading
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from parawrap.engine.away import last_optimizer_step, note_optimizer_steps
from parawrap.engine.batched_copies import lasting
from parawrap.engine.holdings import Holdings
from parawrap.engine.replicas import home_of, is_written_unseen, version_of
from parawrap.engine.survey import Survey
from parawrap.errors import SessionError, UnsendableError
from parawrap.processes.pickling import Packed, ValuePickler, pack
from parawrap.workers.built_model import Build
from parawrap.workers.captured import CapturedValues
from parawrap.workers.worker import pickle_function

SEEDS = 1 << 63  # torch takes 64 bits, and a sum of two must not overflow


class SentModel:
    """The target of a block with workers. One thread at a time reads the target; a changed model is sent whole.

    Attributes:
        home: The device of the model.
        refreshes: How often a changed model was read.
        copied_bytes: The size of the changed models.
        parameters: Those that may require gradients.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self.home = home_of(target) if isinstance(target, torch.nn.Module) else None
        self.refreshes = self.copied_bytes = 0
        self.parameters = [*target.parameters()] if isinstance(target, torch.nn.Module) else []
        self._packing = threading.Lock()
        self._packed: Packed | bytes | None = None
        self._tensors: list[torch.Tensor] = []
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
        note_optimizer_steps()

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
        """Read the target as it is now. All workers need it."""
        if self._was_read:
            self.refreshes += 1
            self.copied_bytes += sum(tensor.nbytes for tensor in self._tensors if tensor.layout is torch.strided)
        self._must_renew = False
        self._survey_target()
        self._packed = None
        self._was_read = True

    def renew(self) -> None:
        """Send the whole model at the next refresh."""
        self._must_renew = True

    def ran_plainly(self) -> None:
        """Note a call in the caller's thread, which may have written buffers unseen."""
        trains = any(module.training for module in self._modules)
        if trains and any(map(is_written_unseen, self._tensors)):
            self._must_renew = True

    def forget(self) -> None:
        """Free the memory of the model."""
        self._was_read, self._packed, self._captured = False, None, None
        self._holdings, self._state = Holdings((), lambda owner: None), ()
        self._tensors, self._modules, self._unseen = [], [], []

    def pack(self) -> Packed | bytes:
        """Return the target as it was read last: packed, or a pickled call that builds it.

        Raises:
            UnsendableError: If it cannot be pickled.
        """
        with self._packing:
            if self._packed is not None:
                return self._packed
            if isinstance(self.target, Build):
                self._packed = pickle_function((*self.target, self._seed, torch.get_default_dtype()), "")
                return self._packed
            sent: list[FunctionType | type] = []
            try:
                self._packed = pack({"model": self.target}, "", partial(_NotingPickler, sent))
                self._packed.detach()  # a worker that takes another's place gets the same
            except UnsendableError as error:
                msg = f"{error}. Let each worker build its own model: parallel(build(load_model, ...), ...)"
                raise UnsendableError(msg) from error.__cause__
            self._captured = self._captured or CapturedValues(sent)
            return self._packed

    def _read_state(self) -> tuple[Any, ...]:
        """Return what a write into a tensor of the target changes."""
        versions = [None if tensor.is_inference() else version_of(tensor) for tensor in self._tensors]
        addresses = [tensor.data_ptr() if tensor.layout is torch.strided else id(tensor) for tensor in self._tensors]
        forms = [(tensor.dtype, tensor.requires_grad) for tensor in self._tensors]
        return last_optimizer_step(), versions, addresses, forms

    def _survey_target(self) -> None:
        if isinstance(self.target, Build):
            return
        survey = Survey(self.target)
        if survey.generators:
            msg = "the model holds a torch.Generator, which cannot be shared with workers. Use torch's default generator"
            raise SessionError(msg)
        self._tensors = [*survey.params, *survey.tensors]
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

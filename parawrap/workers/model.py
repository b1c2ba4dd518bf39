"""The model as its workers get it: what to send, and when it changed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.nn.parameter import is_lazy

from parawrap._public import public
from parawrap.engine.batched_copies import bytes_of_all, lasting
from parawrap.engine.called_code import list_captured, names_of_globals
from parawrap.engine.copy_checks import was_disturbed
from parawrap.engine.model_state import Doubts, ModelState, Snapshot
from parawrap.engine.parameter_copies import Sources, note_optimizer_steps
from parawrap.engine.places import MOST_COPIES
from parawrap.engine.possible_writes import PossibleWrites, is_written_unseen
from parawrap.engine.refused_models import home_of
from parawrap.engine.survey import Survey
from parawrap.errors import SessionError, UnsendableError
from parawrap.processes.pickling import Packed, ValuePickler, pack
from parawrap.tree import ABSENT

SEEDS = 1 << 63
"""The number of seeds. torch takes 64 bits, and the sum of two seeds must not overflow."""

GENERATOR_STAYS = (
    "a random generator, which cannot be shared with workers. Use a default generator, "
    "such as torch's"
)
"""The end of a message of SessionError, after the place of the generator."""


class _SentCode(NamedTuple):
    """A function or class that was sent with the model, and the names of globals that it reads."""

    code: FunctionType | type
    names: set[str]


class _UnseenTensor(NamedTuple):
    """A tensor that may be written without a new version, and its values as they were sent."""

    tensor: torch.Tensor
    sent: torch.Tensor


class Build(NamedTuple):
    """A function that returns the model, and its arguments."""

    load_model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse a plain call: this process has no model."""
        msg = (
            'only worker processes have this model: give parallel(..., workers="process"), and '
            "call the block"
        )
        raise SessionError(msg)


@public
def build(load_model: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Build:
    """Let each worker of a parallel block build its own model: ``load_model(*args, **kwargs)``.

    For models that cannot be sent, that take long to send, or that are compiled or quantized in the
    process that uses them.

    Example:
        >>> import torch
        >>> from parawrap import build, parallel
        >>> model = build(torch.nn.Linear, 3, 2)
        >>> with torch.no_grad(), parallel(model, ["cpu", "cpu"], workers="process") as p:
        ...     tuple(p(torch.ones(9, 3)).shape)
        (9, 2)
    """
    return Build(load_model, args, kwargs)


class SentModel:
    """The target of a block, as its workers get it. A changed model is packed whole.

    It borrows the target. One thread at a time calls `read` and `forget`.

    Attributes:
        target: The target of the block.
        home: The device of the model; None for a target that is not a module.
        refreshes: The number of times that the target was packed again after a change.
        copied_bytes: The size of the tensors that were packed again.
        parameters: The parameters of the model, which may require gradients.
    """

    def __init__(self, target: Any) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self.target = target
        self._is_build = isinstance(target, Build)  # then this process has no model
        self.home = home_of(target) if is_module else None
        self.refreshes = self.copied_bytes = 0
        self.parameters: list[torch.Tensor] = [*target.parameters()] if is_module else []
        self._is_lazy = any(map(is_lazy, self.parameters))
        self._doubts = Doubts()  # changed by `renew`
        # All workers build the same model, also one that replaces a dead worker
        self._seed = torch.initial_seed() % SEEDS
        self.forget()
        note_optimizer_steps()

    def forget(self) -> None:
        """Free the memory of the packed model. The next call packs the target again."""
        self._packed: Packed | None = None
        self._tensors: list[torch.Tensor] = []  # all tensors of the model
        self._unseen: list[_UnseenTensor] = []
        self._function: bytes | None = None  # a target without a model, packed
        self._sent: list[_SentCode] = []
        self._captured: list[Any] = []  # from `_read_captured`, when the target was packed
        self._state: ModelState[Any] | None = None  # None also after a failed attempt to pack

    def is_ready(self) -> bool:
        """False while a parameter gets its shape from the first call, which runs plainly."""
        # Parameters keep their shapes, so they are not looked at again once all have one
        self._is_lazy = self._is_lazy and any(map(is_lazy, self.target.parameters()))
        return not self._is_lazy

    def read(self) -> Packed:
        """Return the packed target as it is now. It is packed again if it changed.

        Raises:
            UnsendableError: If it cannot be pickled.
            SessionError: If it holds a random generator.
        """
        if self._packed is None or not self._is_current():
            if self._packed is not None:
                self.refreshes += 1
                self.copied_bytes += bytes_of_all(self._tensors)
            # After an error or Ctrl-C below, the next call must pack the target again
            self._state = None
            # Before the target is read: a `renew` from here on counts for the next call
            known_doubts = copy(self._doubts)
            self._state, self._packed = self._pack_target(known_doubts)
        return self._packed

    def _pack_target(self, known_doubts: Doubts) -> tuple[ModelState[Any], Packed]:
        """Return the state of the target, and the packed target."""
        attempts = 0
        while True:
            attempts += 1
            state = None
            try:
                # The state first: it shows changes that come while the target is packed
                state = self._survey_target(known_doubts)
                return state, self._pack()
            except Exception as error:
                # Another thread may be changing the dicts that pickle walks: pack once more
                snapshot = None if state is None else state.snapshot
                if attempts == MOST_COPIES or not was_disturbed(error, snapshot, attempts):
                    raise

    def renew(self) -> None:
        """Have the next `read` pack the target again. Any thread may call this at any time."""
        self._doubts.everything = object()  # a new object, in one step: see `Doubts`

    def _is_current(self) -> bool:
        """True if the target, and the code that was sent with it, are the same as at the last read.

        A target of `build` has no model here, so only `renew`, and its code, make it another one.
        """
        if self._state is None or not self._state.is_current():
            return False
        now = self._read_captured()
        # `_captured` keeps its objects alive, so no new object has the identity of one of them
        has_same_code = len(now) == len(self._captured) and all(map(is_, now, self._captured))
        if not has_same_code:
            return False
        if self._function is not None and self._function != self._pack_function():
            return False
        return all(torch.equal(tensor, sent) for tensor, sent in self._unseen)

    def _pack(self) -> Packed:
        """Return the packed target. Note the code in it, and what this code refers to."""
        sent: list[FunctionType | type] = []
        value = {
            "model": self.target,
            # Not for the worker to find out: it may get the class `Build` by value
            "is_build": self._is_build,
            "seed": self._seed,
            "dtype": torch.get_default_dtype(),
        }
        try:
            packed = pack(value, make_pickler=partial(_NotingPickler, sent))
        except UnsendableError as error:
            cure = "Let each worker build its own model: parallel(build(load_model, ...), ...)"
            msg = f"{error}. {cure}"
            raise UnsendableError(msg) from error.__cause__
        packed.copy_bytes()  # later messages send the same bytes, also after the model has changed
        self._sent = []
        for code in sent:
            names: set[str] = set()
            if isinstance(code, FunctionType):
                names = names_of_globals(code.__code__)
            self._sent.append(_SentCode(code, names))
        self._captured = self._read_captured()
        return packed

    def _survey_target(self, known_doubts: Doubts) -> ModelState[Any]:
        """Return the state of the target. Note the tensors that the state does not watch."""
        survey = Survey(None if self._is_build else self.target)
        refuse_generators(survey, "the model")
        # The second argument returns the copy of an object in a replica: here the object itself
        snapshot = Snapshot(survey.places, lambda owner: owner, is_model=True)
        # After the snapshot, which shows if a training flag changes from here on
        possible_writes = PossibleWrites(survey)
        self._tensors = [*survey.params, *survey.tensors]
        # All tensors are sources, since workers have copies of all: a write into any of them makes
        # the state stale
        state: ModelState[Any] = ModelState(
            possible_writes, snapshot, self._doubts, known_doubts, sources=Sources(self._tensors)
        )
        self._function = None
        has_model = self._is_build or survey.modules or self._tensors
        if not has_model:
            self._function = self._pack_function()
        # Writes into these give no new versions, so their values are compared
        unseen = [tensor for tensor in self._tensors if tensor.is_inference()]
        if possible_writes.trains:  # statistics of norms, for example
            unseen += filter(is_written_unseen, survey.tensors)
        # Without a graph, and usable in every mode: later calls compare the clones
        with lasting():
            self._unseen = [_UnseenTensor(tensor, tensor.clone()) for tensor in unseen]
        return state

    def _pack_function(self) -> bytes:
        """Pack a function without a model. The containers that it refers to are not watched."""
        return pack(self.target, "target").to_bytes()

    def _read_captured(self) -> list[Any]:
        """Return code, closures, and globals of sent functions, and attributes of sent classes.

        Each object is that of now, for a comparison by identity.
        """
        found: list[Any] = []
        for each, names in self._sent:
            if isinstance(each, type):
                found += vars(each).values()
                continue
            found.append(each.__code__)
            found += [part for _, part in list_captured(each)]
            found += [each.__globals__.get(name, ABSENT) for name in names]
        return found


def refuse_generators(survey: Survey, who: str) -> None:
    """Refuse a callable that draws from a generator: each worker would draw the same numbers."""
    if survey.generators:
        msg = f"{who} uses {GENERATOR_STAYS}"
        raise SessionError(msg)


class _NotingPickler(ValuePickler):
    """Notes the functions and classes that it pickles with their code, closures, and globals."""

    def __init__(
        self, sent: list[FunctionType | type], stream: Any, buffers: list[memoryview]
    ) -> None:
        super().__init__(stream, buffers)
        self._sent = sent

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if isinstance(obj, (FunctionType, type)) and reduced is not NotImplemented:
            self._sent.append(obj)
        return reduced

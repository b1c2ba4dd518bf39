"""The model of a worker, and its answers to messages. Runs in the process of the worker."""

from __future__ import annotations

import contextvars
import functools
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap._private_names import version_of
from parawrap.engine.borrowed import NOTHING, Loan, lend
from parawrap.engine.called_code import is_generator
from parawrap.engine.given_arguments import mark_arguments, read_changes
from parawrap.engine.lanes import Modes
from parawrap.engine.lent_containers import paths_of_containers
from parawrap.engine.output_handover import hand_over
from parawrap.engine.possible_writes import is_written_unseen
from parawrap.engine.replicas import Replicas
from parawrap.engine.streams import as_call
from parawrap.engine.survey import Survey, home_of_survey, home_of_target
from parawrap.errors import SessionError
from parawrap.launch import seed_all
from parawrap.processes.outcomes import pack_exception, traceback_of
from parawrap.processes.packing import Packer, restore
from parawrap.processes.pickling import Packed, pack, unpack
from parawrap.tree import WholeLeaf, flatten, unflatten
from parawrap.workers.model import GENERATOR_STAYS
from parawrap.workers.writes import PickledContents, Written

_CPU = torch.device("cpu")
_NO_CONTEXT: Any = None  # in place of context variables, which cannot be pickled
GRADIENTS = (
    "{} requires a gradient, and gradients do not travel between processes. For inference, call "
    "inside torch.no_grad(). To "
    "train on several processes, use @wrapper with DistributedDataParallel"
)
_TRAINS = (
    "the model is in training mode, and a cut call would write statistics in a worker that the "
    "model here does not get. "
    "Call model.eval(), run it in threads, or train with @wrapper and DistributedDataParallel"
)
_DRAWS = (
    "the model draws random numbers in a cut call under "
    "torch.use_deterministic_algorithms(True), and a worker cannot "
    "continue the caller's numbers. Use map or submit, or run the model in threads"
)


class _ProcessMode(NamedTuple):
    """A setting of a whole process that changes what a model computes."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


_PROCESS_MODES = (
    _ProcessMode(torch.get_default_dtype, torch.set_default_dtype),
    _ProcessMode(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    _ProcessMode(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)


def pack_modes(modes: Modes) -> bytes:
    """Pickle the modes of the calling thread and process, without context variables."""
    of_process = [mode.read() for mode in _PROCESS_MODES]
    return pickle.dumps((modes._replace(context=_NO_CONTEXT), of_process))


@functools.lru_cache(maxsize=8)
def _unpack_modes(packed: bytes) -> tuple[Modes, list[Any]]:
    """Return pickled modes of the launching process. They rarely change between calls."""
    modes: tuple[Modes, list[Any]] = pickle.loads(packed)
    return modes


class Form(NamedTuple):
    """The common part of the calls of a message.

    Attributes:
        modes: From `pack_modes`.
        has_grad: True if gradients are enabled.
        is_inference: True in inference mode.
        method: The name of the method; None for the model itself.
        is_whole: False for one part of a cut call.
        prepare: The packed function that computes the arguments from a batch, in the worker. Empty
            if an earlier message has brought it, None if there is none.
        model: The packed model. It travels next to the message, once.
    """

    modes: bytes
    has_grad: bool
    is_inference: bool
    method: str | None
    is_whole: bool
    prepare: bytes | None
    model: Packed | None


class WorkerAnswer(NamedTuple):
    """The answer to one call.

    Attributes:
        output: The packed output, with its tensors in the block of the message.
        written: The packed `Written`; None if it has written nothing.
        error: The packed exception, and its traceback as text; None without an exception.
        warned: The packed warnings: text, category, file, and line of each. None without any.
        unkept: The names of what it wrote into the model, which does not stay.
        start: The time when the call began, as ``perf_counter_ns``.
        end: The time when it ended.
    """

    output: Any
    written: Any
    error: tuple[bytes, str] | None
    warned: bytes | None
    unkept: Sequence[str]
    start: int
    end: int


Answers = tuple[list[tuple[Any, ...]], Packer]
"""The fields of the `WorkerAnswer` to each call of a message, and the block of their items."""

ReceivedAnswers = tuple[int, list[tuple[Any, ...]], memoryview, OSError | None]
"""The number of a message, its `Answers`, and why this process could not take their block."""


class ModelServer:
    """The model of one worker, for as long as its process lives. For one thread.

    It replaces the handling of warnings in the process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._packed_model: memoryview | None = None  # from a message until the next call
        self._replicas: Replicas
        self._is_changed = False  # True until the first call of a new model
        self._prepare: Any = None  # the packed function until the first call, then the function
        self._warned: list[tuple[str, type[Warning], str, int]] = []  # of the call that runs
        warnings.simplefilter("always")  # the filters of the launching process decide
        warnings.showwarning = self._note_warning

    def take_model(self, packed: memoryview) -> None:
        """Take a packed model for the next call and later ones."""
        self._packed_model = packed

    def take_prepare(self, packed: bytes) -> None:
        """Take the packed `prepare` of this message. Later messages do not bring it again."""
        self._prepare = packed

    def answer(self, form: Form, items: list[Any], block: memoryview) -> Answers:
        """Run the calls of a message, one after another, in its modes.

        If the model cannot be made, every call fails.
        """
        if form.prepare:  # empty if an earlier message has brought it
            self.take_prepare(form.prepare)
        try:
            if self._packed_model is not None:
                self._make_model(unpack(self._packed_model))
                self._packed_model = None  # after an error it stays, and later calls fail too
            home = self._replicas.state.home
            if self._is_changed:  # its state is made by the call below
                home = home_of_target(self._replicas.target)
                if home is None:  # no module, or one without tensors
                    home = home_of_survey(Survey(self._replicas.target))
            modes, of_process = _unpack_modes(form.modes)
            for mode, value in zip(_PROCESS_MODES, of_process, strict=True):
                # The first write of the deterministic mode takes a second
                if mode.read() != value:
                    mode.write(value)
            # A new context: a call must not see variables that an earlier message has set
            modes = modes._replace(context=contextvars.copy_context())
            answer_all = functools.partial(self._answer_all, form, items, block)
            answers: Answers = modes.run(answer_all, self._device, home)
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
            return self.fail(items, error)
        return answers

    def fail(self, items: list[Any], error: BaseException) -> Answers:
        """Answer each call of a message with an error."""
        now = perf_counter_ns()
        failed = WorkerAnswer(None, None, _pack_error(error), None, (), now, now)
        return [tuple(failed)] * len(items), Packer()

    def _make_model(self, sent: dict[str, Any]) -> None:
        """Take the model that was sent, or build it, with the same seed in every worker."""
        target = sent["model"]
        if sent["is_build"]:
            own = torch.initial_seed()
            # Workers have different seeds, for their random numbers, but the same weights
            seed_all(sent["seed"])
            torch.set_default_dtype(sent["dtype"])  # `answer` sets that of the calls afterwards
            try:
                target = target.load_model(*target.args, **target.kwargs)
            finally:
                seed_all(own)
        self._replicas = Replicas(target, [self._device])
        self._is_changed = True

    def _answer_all(self, form: Form, items: list[Any], block: memoryview) -> Answers:
        """Run the calls of a message."""
        # An output is copied before the next call, which may write into it
        packer = Packer(copies_up_to=math.inf if len(items) > 1 else 0)
        answers = [tuple(self._answer(form, item, block, packer)) for item in items]
        return answers, packer

    def _answer(self, form: Form, item: Any, block: memoryview, packer: Packer) -> WorkerAnswer:
        """Run one call. Pack its output, or its exception."""
        start = perf_counter_ns()
        output_item = written_item = failure = None
        try:
            # Not inference tensors, in which no version shows a write
            with torch.inference_mode(mode=False):
                given = restore(item, block)
            args, kwargs = given, {}
            if type(given) is dict:  # as `Request.add` packs a call with keywords
                args, kwargs = given["args"], given["kwargs"]
            are_tensors = type(item) is list  # as `Packer.add` describes a tuple of tensors
            output, written = self._call(form, args, kwargs, are_tensors=are_tensors)
            output_item = packer.add(output, "the output")
            written_item = None if written is None else packer.add(written, "args")
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
            failure = _pack_error(error)
        warned = pack(self._warned, "a warning").to_bytes() if self._warned else None
        self._warned.clear()
        unkept = self._replicas.unkept.take()
        return WorkerAnswer(
            output_item, written_item, failure, warned, unkept, start, perf_counter_ns()
        )

    def _call(
        self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any], *, are_tensors: bool
    ) -> tuple[Any, Written | None]:
        """Return the output of a call, and its writes into its arguments; None without any.

        `are_tensors`: the arguments are tensors alone. They need no walk through containers, and no
        copies of contents.
        """
        if form.prepare is None:
            args, kwargs = self._place(args, kwargs)
        leaves = args if are_tensors else flatten((args, kwargs))[0]
        if not are_tensors and any(map(is_generator, leaves)):  # its new state would stay here
            msg = f"an argument is {GENERATOR_STAYS}"
            raise SessionError(msg)
        # Three ways to see writes: entries of containers, pickles of objects, versions of tensors
        loan, contents = NOTHING, None
        if form.prepare is None:  # with it, forward gets other arguments, and its writes stay here
            loan = Loan(leaves) if are_tensors else _lend_all((args, kwargs), leaves)
            contents = None if are_tensors else PickledContents(leaves)
        versions = [*map(_version_of, leaves)]
        returned = self._run(form, args, kwargs)
        output = mark_arguments(returned, loan)
        has_marks = output is not returned
        if contents is not None:
            contents.check()
        changes = read_changes(loan)
        now = [*map(_version_of, leaves)]
        if now == versions and changes is None and not has_marks:
            return output, None
        tensors = [
            leaf if version != before else None
            for leaf, before, version in zip(leaves, versions, now, strict=True)
        ]
        return output, Written(tensors, changes, has_marks)

    def _run(self, form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one call from the model's state. Its writes into the model do not stay.

        Raises:
            SessionError: If the output requires a gradient; if a part of a cut call wrote buffers
                in training mode, or drew random numbers under deterministic algorithms.
        """
        if form.prepare is not None:
            if isinstance(self._prepare, bytes):  # its first call
                self._prepare = unpack(self._prepare)
            args, kwargs = self._place(*as_call(self._prepare(*args)))
        replicas = self._replicas
        # On the CPU, only a message changes the model: without one, nothing is compared
        if self._is_changed or self._device != _CPU:
            if not replicas.state.is_current():
                replicas.refresh()
            self._is_changed = False
        state = replicas.state
        replica = state.replicas[0]
        replicas.prepare(replica)
        versions = [*map(version_of, state.params)]
        # Writes through ``.data`` give no versions. The contents are compared around the first call
        # of a new survey
        contents = None if state.possible_writes.watched_whole_call else replicas.read_contents()
        state.possible_writes.watched_whole_call = True
        checks_draws = not form.is_whole and torch.are_deterministic_algorithms_enabled()
        numbers = torch.get_rng_state() if checks_draws else None
        try:
            function = replica.target
            if form.method is not None:
                function = getattr(function, form.method)
            output = function(*args, **kwargs)
        except BaseException:
            replica.is_dirty = True  # forward may have stopped between two writes
            raise
        # Refuse outputs and writes that workers cannot return
        leaves, _ = flatten(output)
        if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
            raise SessionError(GRADIENTS.format("the output"))
        output = hand_over(output, replica)
        replicas.settle_whole(replica, versions)
        if contents is not None:
            replicas.check_contents(contents)
        # Such as statistics of batch norm. A whole call gives nothing back, so it may write them
        may_write_statistics = state.possible_writes.trains and not form.is_whole
        if may_write_statistics and _has_written_buffer(replicas):
            raise SessionError(_TRAINS)
        if numbers is not None and not torch.equal(numbers, torch.get_rng_state()):
            raise SessionError(_DRAWS)
        return output

    def _place(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments on the device of the worker."""
        if self._device == _CPU:
            return args, kwargs
        leaves, spec = flatten((args, kwargs))
        # Not inference tensors, in which no version shows a write
        with torch.inference_mode(mode=False):
            placed = [
                leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
            ]
        return unflatten(spec, placed)

    def _note_warning(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *_: object,
        **__: object,
    ) -> None:
        """Keep a warning for the launching process. Takes the place of ``warnings.showwarning``."""
        self._warned.append((str(message), category, filename, lineno))


def _has_written_buffer(replicas: Replicas) -> bool:
    """True if the last call wrote a buffer, perhaps without a new version, as batch norm does."""
    state = replicas.state
    replica = state.replicas[0]
    if replica.is_written():
        return True
    for own, copied in zip(state.survey.tensors, replica.tensors, strict=True):
        if is_written_unseen(own) and not torch.equal(own, copied):
            return True
    return False


def _lend_all(call: Any, leaves: Sequence[Any]) -> Loan:
    """Note the contents of containers, and of objects with rules, in the arguments before a call.

    `PickledContents` notes those of objects without rules.
    """
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, WholeLeaf)]
    values = [leaf.value if isinstance(leaf, WholeLeaf) else leaf for leaf in leaves]
    _, spec = flatten(call)
    return lend(call, paths_of_containers(spec), values, objects=indices)


def _version_of(leaf: Any) -> int | None:
    """Return the version of a tensor. None for other leaves, and for tensors without versions."""
    has_version = isinstance(leaf, torch.Tensor) and not leaf.is_inference()
    return version_of(leaf) if has_version else None


def _pack_error(error: BaseException) -> tuple[bytes, str]:
    """Return the pickled exception, and its traceback as text, as in `WorkerAnswer.error`."""
    return pack_exception(error).to_bytes(), traceback_of(error)

"""The model of a worker, in its process, and the requests that it answers."""

from __future__ import annotations

import contextvars
import functools
import os
import pickle
import sys
import warnings
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap.engine.call import Modes
from parawrap.engine.replicas import Replica, Replicas, buffers_of, is_written_unseen, version_of
from parawrap.engine.streams import as_call
from parawrap.errors import SessionError
from parawrap.launch import seed_all
from parawrap.processes.outcomes import pack_exception, traceback_of
from parawrap.processes.pickling import pickle_apart
from parawrap.tree import flatten, flatten_call, unflatten
from parawrap.workers._given_arguments import Changed, Contents, Written, find_written
from parawrap.workers._line import pickle_value

__all__ = [
    "Answered",
    "CallOutput",
    "ModelTensor",
    "SentModes",
    "SentWarning",
    "Server",
    "WorkerCall",
    "WrittenBuffer",
    "pack_error",
    "pickle_function",
    "unpickle",
]

_CPU = torch.device("cpu")
_NO_CONTEXT: Any = None

WrittenBuffer = tuple[int, str, torch.Tensor]
"""The number of a module in the list that came with the model, and a buffer's name and value."""


class _GlobalModes(NamedTuple):
    """The modes of a whole process that change what a model computes."""

    dtype: torch.dtype
    precision: str  # of products of float32
    deterministic: bool
    warns_only: bool

    def enter(self) -> None:
        here = _GlobalModes.here()
        if self.dtype != here.dtype:
            torch.set_default_dtype(self.dtype)
        if self.precision != here.precision:
            torch.set_float32_matmul_precision(self.precision)
        if self[2:] != here[2:]:  # the first call takes a second
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)

    @classmethod
    def here(cls) -> _GlobalModes:
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )


class SentModes(NamedTuple):
    """The modes of the calling thread, without its context variables, which cannot be sent."""

    of_thread: Modes
    of_process: _GlobalModes

    @classmethod
    def of(cls, modes: Modes) -> SentModes:
        return cls(modes._replace(context=_NO_CONTEXT), _GlobalModes.here())

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` under these modes."""
        self.of_process.enter()
        modes = self.of_thread._replace(context=contextvars.copy_context())
        return modes.run(work, device, home)


class WorkerCall(NamedTuple):
    """A call of the model.

    `modes` are pickled `SentModes`. `prepare` is a number, and the pickled function if the worker does not have it yet.
    `is_whole` is False for a part of a cut call. With `rng_state`, the call draws the numbers of the caller, and returns
    the state that they leave.
    """

    method: str | None
    prepare: tuple[int, bytes | None] | None
    modes: bytes
    rng_state: torch.Tensor | None
    is_whole: bool
    returns_buffers: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ModelTensor:
    """Stands for a tensor of the model in an output: its position in the list that came with the model."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class SentWarning(NamedTuple):
    """A warning, as ``warnings.warn_explicit`` takes it."""

    text: str
    category: type[Warning]
    filename: str
    line: int


class CallOutput(NamedTuple):
    """Output and side effects of a call of the model.

    Attributes:
        output: The output. If `has_model_tensors`, some leaves are of class `ModelTensor`.
        rng_state: The random state if the call changed it.
        buffers: The buffers that the call wrote.
        written: The leaves of the arguments that the call wrote in place.
        changed: The containers among the arguments of a whole call that it changed.
        warned: The warnings of the call.
    """

    output: Any
    has_model_tensors: bool = False
    rng_state: torch.Tensor | None = None
    buffers: tuple[WrittenBuffer, ...] = ()
    written: tuple[Written, ...] = ()
    changed: tuple[Changed, ...] = ()
    warned: tuple[SentWarning, ...] = ()


class Answered(NamedTuple):
    """The answer to one call of a chunk. `start` and `end` are nanoseconds since the worker began the chunk.

    `value` is pickled: the fields of `CallOutput`, or a packed exception if the call raised, and its traceback as text.
    """

    start: int
    end: int
    value: bytes
    traceback: str | None = None


class Server:
    """The model of one worker, and its answers to requests. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replicas: Replicas
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._versions: list[int] = []
        self._is_changed = False  # by a message; a call changes the replica alone
        self._last_function: tuple[int, Any] = (-1, None)
        self._warned: list[SentWarning] = []
        warnings.simplefilter("always")  # the filters of the launching process decide
        warnings.showwarning = self._note_warning

    def answer(self, word: str, value: Any) -> Any:
        """Return the answer to one request. Raises what the model raises."""
        return getattr(self, f"_{word}")(value)

    def _model(self, value: dict[str, Any]) -> int:
        """Take a model, and the lists of its tensors and modules. Return the process id."""
        self._tensors, self._modules = value["tensors"], value["modules"]
        return self._take(value["model"])

    def _build(self, value: bytes) -> int:
        """Build the model here, with the same seed and default dtype as in every worker. Return the process id."""
        load_model, args, kwargs, seed, dtype = unpickle(value)
        own = torch.initial_seed()
        seed_all(seed)
        torch.set_default_dtype(dtype)
        model = load_model(*args, **kwargs)
        seed_all(own)
        return self._take(model)

    def _take(self, target: Any) -> int:
        self._target = target
        self._replicas = Replicas(target, [self._device])
        self._is_changed = True
        return os.getpid()

    def _call(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call the model, and return the fields of `CallOutput`; the output alone if the call left nothing else."""
        call = WorkerCall(*fields)
        if self._device != _CPU and call.prepare is None:
            call = call._replace(args=self._place(call.args), kwargs=self._place(call.kwargs))
        given, spec = flatten_call(call.args, call.kwargs)
        contents = Contents(call.args, call.kwargs) if call.is_whole else None
        versions = [*map(_version_of, given)]
        kept = torch.get_rng_state() if call.rng_state is not None else None
        if call.rng_state is not None:
            torch.set_rng_state(call.rng_state)
        try:
            output, has_model_tensors = _unpack_modes(call.modes).run(
                partial(self._output, call), self._device, self._replicas.home
            )
            rng_state = _if_changed(call.rng_state)
        finally:
            if kept is not None:
                torch.set_rng_state(kept)
        buffers = self._settle(call)
        is_written = [_version_of(leaf) != before for leaf, before in zip(given, versions, strict=True)]
        written = find_written(given, spec, is_written)
        changed = () if contents is None else tuple(contents.find_changes())
        self._replicas.warn()
        warned = self._take_warnings()
        if not (has_model_tensors or buffers or written or changed or warned) and rng_state is None:
            return (output,)
        return output, has_model_tensors, rng_state, buffers, written, changed, warned

    def _calls(self, chunk: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Answer several calls, one after another. An output is pickled before the next call, which may write into it."""
        began = perf_counter_ns()
        return [tuple(self._answer_one(fields, began)) for fields in chunk]

    def _answer_one(self, fields: tuple[Any, ...], began: int) -> Answered:
        start = perf_counter_ns() - began
        try:
            returned = self._call(fields)  # alive until the memory of its tensors is copied
            value = _pickle_together(*pickle_value(returned, "the output"))
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
            return Answered(start, perf_counter_ns() - began, pack_error(error), traceback_of(error))
        return Answered(start, perf_counter_ns() - began, value)

    def _output(self, call: WorkerCall) -> tuple[Any, bool]:
        """Return the output, and True if it has stand-ins for tensors of the model."""
        args, kwargs = call.args, call.kwargs
        if call.prepare is not None:
            args, kwargs = as_call(self._function(*call.prepare)(*args))
            if self._device != _CPU:
                args, kwargs = self._place((args, kwargs))
        if self._is_changed or self._device != _CPU:
            if self._replicas.is_stale():
                self._replicas.refresh()
            self._is_changed = False
        replica = self._replicas.all[0]
        self._replicas.prepare(replica)
        self._versions = [*map(version_of, self._replicas.params)]
        function = replica.target if call.method is None else getattr(replica.target, call.method)
        try:
            output = function(*args, **kwargs)
        except BaseException:
            replica.is_dirty = True
            raise
        return self._sendable(output, replica.original_of)

    def _sendable(
        self, output: Any, original_of: Callable[[torch.Tensor], torch.Tensor | None] = lambda _: None
    ) -> tuple[Any, bool]:
        """Return an output with stand-ins for tensors of the model, and True if it has any.

        Raises:
            SessionError: If the output has a gradient graph, which cannot leave the process.
        """
        leaves, spec = flatten(output)
        has_stand_ins = False
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            original = original_of(leaf)
            if original is not None:
                leaves[index] = self._stand_in(original)
                has_stand_ins = True
            elif leaf.grad_fn is not None:
                msg = (
                    "the output requires a gradient, and gradients do not travel between processes. For inference, call "
                    "inside torch.no_grad(). To train on several processes, use @wrapper with DistributedDataParallel"
                )
                raise SessionError(msg)
        return (unflatten(spec, leaves), True) if has_stand_ins else (output, False)

    def _stand_in(self, original: torch.Tensor) -> ModelTensor | torch.Tensor:
        """Return what is sent for a tensor of the model: its position, or the tensor if the worker built the model."""
        index = next((index for index, tensor in enumerate(self._tensors) if tensor is original), None)
        return original.detach() if index is None else ModelTensor(index)

    def _take_warnings(self) -> tuple[SentWarning, ...]:
        if not self._warned:
            return ()
        warned = tuple(self._warned)
        self._warned.clear()
        return warned

    def _note_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        """Keep a warning for the launching process. Takes the place of ``warnings.showwarning``."""
        self._warned.append(SentWarning(str(message), category, filename, lineno))

    def _function(self, number: int, pickled: bytes | None) -> Callable[..., Any]:
        """Return a function that came with this call or with an earlier one. Only the last one is kept."""
        if pickled is not None:
            self._last_function = number, unpickle(pickled)
        assert self._last_function[0] == number
        return self._last_function[1]  # type: ignore[no-any-return]

    def _settle(self, call: WorkerCall) -> tuple[WrittenBuffer, ...]:
        """Judge what a call wrote; return the buffers that the model of the launching process gets."""
        replicas = self._replicas
        replica: Replica = replicas.all[0]
        if call.is_whole:
            replicas.settle_whole(replica, self._versions)
            return ()
        if not call.returns_buffers:  # another lane's part of a cut call: what lane 0 wrote is judged
            replica.is_dirty = not replica.holdings.is_same()
            return ()
        before = [{name: _state_of(each) for name, each in buffers_of(module).items()} for module in self._modules]
        replica.is_dirty = not replica.holdings.is_same()
        replicas.settle_call([replica], self._versions)
        written = tuple(
            (index, name, buffer)
            for index, (module, states) in enumerate(zip(self._modules, before, strict=True))
            for name, buffer in buffers_of(module).items()
            if buffer is not None
            and (states.get(name) != _state_of(buffer) or (module.training and is_written_unseen(buffer)))
        )
        self._is_changed = self._is_changed or bool(written)
        return written

    def _place(self, value: Any) -> Any:
        leaves, spec = flatten(value)
        return unflatten(spec, [leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _version_of(leaf: Any) -> Any:
    """Return what a write into an argument changes. Refuse a generator, because its new state would stay here."""
    if isinstance(leaf, torch.Generator):
        msg = "an argument is a torch.Generator, which cannot be shared with workers. Use torch's default generator"
        raise SessionError(msg)
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else version_of(leaf)
    if isinstance(leaf, bytearray | set | array):
        return leaf[:] if isinstance(leaf, array) else leaf.copy()
    numpy = sys.modules.get("numpy")
    return leaf.tobytes() if numpy is not None and isinstance(leaf, numpy.ndarray) else None


def _state_of(buffer: torch.Tensor | None) -> tuple[int, int | None]:
    """Return what a write into a buffer changes, unless `is_written_unseen`."""
    return id(buffer), None if buffer is None or buffer.is_inference() else version_of(buffer)


@functools.lru_cache(maxsize=8)
def _unpack_modes(packed: bytes) -> SentModes:
    """Return pickled modes of the launching process. They rarely change between calls."""
    modes: SentModes = pickle.loads(packed)
    return modes


def pickle_function(function: Any, address: str) -> bytes:
    """Return the pickle of a function, or of a tuple that holds one. Raises UnsendableError with that address."""
    return _pickle_together(*pickle_apart(function, address))


def unpickle(data: bytes) -> Any:
    """Return what `pickle_function` pickled, or the value of an `Answered`."""
    pickled, buffers = pickle.loads(data)
    return pickle.loads(pickled, buffers=buffers)


def pack_error(error: BaseException) -> bytes:
    """Return a packed exception."""
    return pack_exception(error).to_bytes()


def _pickle_together(pickled: memoryview, buffers: Sequence[memoryview]) -> bytes:
    return pickle.dumps((bytes(pickled), [bytearray(buffer) for buffer in buffers]))


def _if_changed(before: torch.Tensor | None) -> torch.Tensor | None:
    if before is None:
        return None
    after = torch.get_rng_state()
    return None if torch.equal(before, after) else after

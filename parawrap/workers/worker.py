"""The model of a worker, in its process, and the messages that it answers."""

from __future__ import annotations

import contextvars
import functools
import math
import os
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import torch

from parawrap.engine.call import Modes
from parawrap.engine.replicas import Replicas, is_written_unseen, version_of
from parawrap.engine.streams import as_call
from parawrap.errors import SessionError
from parawrap.launch import seed_all
from parawrap.processes.outcomes import pack_exception, traceback_of
from parawrap.processes.pickling import pack, pickle_apart
from parawrap.tree import flatten, flatten_call, unflatten
from parawrap.workers.packing import Block, Packer, restore
from parawrap.workers.writes import Fingerprint, Written, find_written

_CPU = torch.device("cpu")
_NO_CONTEXT: Any = None
_TRAINS = (
    "the model is in training mode, and a cut call would write statistics in a worker that the model here does not get. "
    "Call model.eval(), run it in threads, or train with @wrapper and DistributedDataParallel"
)
_DRAWS = (
    "the model draws random numbers in a cut call under torch.use_deterministic_algorithms(True), and a worker cannot "
    "continue the caller's numbers. Use map or submit, or run the model in threads"
)
_GRAPH = (
    "the output requires a gradient, and gradients do not travel between processes. For inference, call inside "
    "torch.no_grad(). To train on several processes, use @wrapper with DistributedDataParallel"
)


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
    def pack(cls, modes: Modes) -> bytes:
        """Return the pickled modes of a thread of this process."""
        return pickle.dumps(cls(modes._replace(context=_NO_CONTEXT), _GlobalModes.here()))

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` under these modes."""
        self.of_process.enter()
        modes = self.of_thread._replace(context=contextvars.copy_context())
        return modes.run(work, device, home)


@functools.lru_cache(maxsize=8)
def _unpack_modes(packed: bytes) -> SentModes:
    """Return pickled modes of the launching process. They rarely change between calls."""
    modes: SentModes = pickle.loads(packed)
    return modes


class Calls(NamedTuple):
    """The body of a message with calls.

    Attributes:
        modes: Pickled `SentModes`.
        method: The method; None for the model itself.
        prepare: A number, and the pickled function if it did not come with an earlier message.
        is_whole: False for one part of a cut call.
        items: For each call the item of its arguments, and True if there are keyword arguments among them.
    """

    modes: bytes
    method: str | None
    prepare: tuple[int, bytes | None] | None
    is_whole: bool
    items: list[tuple[Any, bool]]


class SentWarning(NamedTuple):
    """A warning, as ``warnings.warn_explicit`` takes it."""

    text: str
    category: type[Warning]
    filename: str
    line: int


class Answer(NamedTuple):
    """The answer to one call.

    Attributes:
        output: The item of its output.
        written: The item of what it wrote into its arguments.
        error: Its packed exception, with the traceback as text.
        warned: Its warnings, packed.
        start: When it began, as ``perf_counter_ns``.
        end: When it ended.
    """

    output: Any
    written: Any
    error: tuple[bytes, str] | None
    warned: bytes | None
    start: int
    end: int


class Server:
    """The model of one worker. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replicas: Replicas
        self._is_changed = False  # by a message
        self._sent_prepare = b""
        self._prepare: Any = None
        self._warned: list[SentWarning] = []
        warnings.simplefilter("always")  # the filters of the launching process decide
        warnings.showwarning = self._note_warning

    def take_model(self, target: Any) -> int:
        """Take a model, and return the process id."""
        self._replicas = Replicas(target, [self._device])
        self._is_changed = True
        return os.getpid()

    def build_model(self, packed: bytes) -> int:
        """Build the model here, with the same seed and default dtype as in every worker. Return the process id."""
        load_model, args, kwargs, seed, dtype = unpickle(packed)
        own = torch.initial_seed()
        seed_all(seed)
        torch.set_default_dtype(dtype)
        model = load_model(*args, **kwargs)
        seed_all(own)
        return self.take_model(model)

    def answer(
        self, calls: Calls, block: Block, addresses: tuple[int, int] = (0, 0)
    ) -> tuple[list[tuple[Any, ...]], Packer]:
        """Make the calls of a message, one after another, under its modes. Return the fields of each `Answer`.

        An output is packed before the next call, which may write into it.
        """
        packer = Packer(addresses, copied=math.inf if len(calls.items) > 1 else 0)
        work = partial(self._make_calls, calls, block, packer)
        return _unpack_modes(calls.modes).run(work, self._device, self._replicas.home), packer

    def _make_calls(self, calls: Calls, block: Block, packer: Packer) -> list[tuple[Any, ...]]:
        if calls.prepare is not None and calls.prepare[1] is not None:
            self._prepare, self._sent_prepare = None, calls.prepare[1]
        return [tuple(self._make_call(calls, item, block, packer, has_keywords=mark)) for item, mark in calls.items]

    def _make_call(self, calls: Calls, item: Any, block: Block, packer: Packer, *, has_keywords: bool) -> Answer:
        start = perf_counter_ns()
        written_item, failure = None, None
        output_item: Any = None
        try:
            with torch.inference_mode(mode=False):  # a write into an inference tensor is not seen
                given = restore(item, block)
            args, kwargs = (given["args"], given["kwargs"]) if has_keywords else (given, {})
            function = None if calls.prepare is None else self._load_prepare()
            output, written = self._call(calls, function, args, kwargs, is_plain=type(item) is list)
            output_item = packer.add(output, "the output")
            written_item = None if written is None else packer.add(written, "args")
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, also SystemExit)
            failure = pack_exception(error).to_bytes(), traceback_of(error)
        warned = pack(self._warned, "a warning").to_bytes() if self._warned else None
        self._warned.clear()
        return Answer(output_item, written_item, failure, warned, start, perf_counter_ns())

    def _call(
        self,
        calls: Calls,
        function: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_plain: bool,
    ) -> tuple[Any, Written | None]:
        """Return the output of a call, and its writes into tensors of its arguments."""
        if self._device != _CPU and function is None:
            args, kwargs = self._place((args, kwargs))
        contents = None
        if is_plain:
            given, spec = list(args), None
        else:
            given, spec = flatten_call(args, kwargs)
            _refuse_generators(given)
            contents = Fingerprint(args, kwargs) if calls.is_whole else None
        versions = [*map(_version_of, given)]
        if calls.is_whole:
            output = self._run(calls.method, function, args, kwargs)
        else:
            output = self._run_part(calls.method, args, kwargs)
        self._replicas.warn()
        if contents is not None:
            contents.check()
        now = [*map(_version_of, given)]
        if now == versions:
            return output, None
        if spec is None:
            given, spec = flatten_call(args, kwargs)
        return output, find_written(given, spec, [one != other for one, other in zip(versions, now, strict=True)])

    def _run(
        self, method: str | None, function: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run one call from the model's state. What it writes into the model does not stay."""
        if function is not None:
            args, kwargs = as_call(function(*args))
            if self._device != _CPU:
                args, kwargs = self._place((args, kwargs))
        replicas = self._replicas
        if self._is_changed or self._device != _CPU:
            if replicas.is_stale():
                replicas.refresh()
            self._is_changed = False
        replica = replicas.all[0]
        replicas.prepare(replica)
        versions = [*map(version_of, replicas.params)]
        target = replica.target if method is None else getattr(replica.target, method)
        try:
            output = target(*args, **kwargs)
        except BaseException:
            replica.is_dirty = True
            raise
        _refuse_graph(output)
        replicas.settle_whole(replica, versions)
        return output

    def _run_part(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one part of a cut call.

        Raises:
            SessionError: If it wrote buffers in training mode, or drew random numbers under deterministic algorithms.
        """
        numbers = torch.get_rng_state() if torch.are_deterministic_algorithms_enabled() else None
        output = self._run(method, None, args, kwargs)
        if self._replicas.survey.trains and self._has_written_buffers():
            raise SessionError(_TRAINS)
        if numbers is not None and not torch.equal(numbers, torch.get_rng_state()):
            raise SessionError(_DRAWS)
        return output

    def _has_written_buffers(self) -> bool:
        """True if the last call wrote a buffer, perhaps without a new version, as batch norm does in C++."""
        replica = self._replicas.all[0]
        pairs = zip(self._replicas.survey.tensors, replica.tensors, strict=True)
        return replica.is_written() or any(is_written_unseen(one) and not torch.equal(one, other) for one, other in pairs)

    def _load_prepare(self) -> Callable[..., Any]:
        """Return the function that came with this message or with an earlier one."""
        if self._prepare is None:
            self._prepare = unpickle(self._sent_prepare)
        return self._prepare  # type: ignore[no-any-return]

    def _note_warning(
        self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
    ) -> None:
        """Keep a warning for the launching process. Takes the place of ``warnings.showwarning``."""
        self._warned.append(SentWarning(str(message), category, filename, lineno))

    def _place(self, value: Any) -> Any:
        leaves, spec = flatten(value)
        return unflatten(spec, [leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _refuse_graph(output: Any) -> None:
    leaves = (output,) if type(output) is torch.Tensor else flatten(output)[0]
    if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in leaves):
        raise SessionError(_GRAPH)


def _refuse_generators(leaves: Sequence[Any]) -> None:
    """Refuse a generator, because its new state would stay here."""
    if any(isinstance(leaf, torch.Generator) for leaf in leaves):
        msg = "an argument is a torch.Generator, which cannot be shared with workers. Use torch's default generator"
        raise SessionError(msg)


def _version_of(leaf: Any) -> int | None:
    return None if not isinstance(leaf, torch.Tensor) or leaf.is_inference() else version_of(leaf)


def pickle_function(function: Any, address: str) -> bytes:
    """Return the pickle of a function, or of a tuple that holds one. Raises UnsendableError with that address."""
    pickled, buffers = pickle_apart(function, address)
    return pickle.dumps((bytes(pickled), [bytearray(buffer) for buffer in buffers]))


def unpickle(data: bytes) -> Any:
    """Return what `pickle_function` pickled."""
    pickled, buffers = pickle.loads(data)
    return pickle.loads(pickled, buffers=buffers)

"""The model of a worker, in its process, and the requests that it answers."""

from __future__ import annotations

import contextvars
import functools
import os
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from parawrap.engine import ReplicaSet, as_call
from parawrap.errors import SessionError
from parawrap.lanes import Modes
from parawrap.launch import pickled_apart
from parawrap.replicas import may_be_written_unseen
from parawrap.tree import flatten, unflatten

__all__ = ["Call", "Returned", "SentModes", "Server", "WrittenBuffer", "pickled_function"]

_CPU = torch.device("cpu")
_NO_CONTEXT: Any = None

WrittenBuffer = tuple[int, str, torch.Tensor]
"""The number of a module in the list that came with the model, and a buffer's name and value."""


class _GlobalModes(NamedTuple):
    """The modes of a whole process that change what a model computes."""

    dtype: torch.dtype
    deterministic: bool
    warns_only: bool

    def enter(self) -> None:
        if self != _GlobalModes.here():
            torch.set_default_dtype(self.dtype)
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warns_only)

    @classmethod
    def here(cls) -> _GlobalModes:
        return cls(
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )


class SentModes(NamedTuple):
    """The modes of the calling thread, without its context variables, which cannot be sent."""

    of_thread: Modes
    of_process: _GlobalModes

    @classmethod
    def of(cls, modes: Modes) -> SentModes:
        return cls(modes._replace(context=_NO_CONTEXT, profiling=False), _GlobalModes.here())

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` under these modes."""
        self.of_process.enter()
        modes = self.of_thread._replace(context=contextvars.copy_context())
        return modes.run(work, device, home)


class Call(NamedTuple):
    """A call of the model.

    `modes` are pickled `SentModes`. `prepare` is a number, and the pickled function if the worker does not have it yet.
    With `rng_state`, the call draws the numbers of the caller, and returns the state that they leave.
    """

    method: str | None
    prepare: tuple[int, bytes | None] | None
    modes: bytes
    rng_state: torch.Tensor | None
    returns_buffers: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Returned(NamedTuple):
    """What a call of the model left: its output, the random state if it changed, and the buffers that the call wrote."""

    output: Any
    rng_state: torch.Tensor | None = None
    buffers: tuple[WrittenBuffer, ...] = ()


class Server:
    """The model of one worker, and its answers to requests. Used by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._replicas: ReplicaSet
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._is_changed = False  # by a message; a call changes the replica alone
        self._last_function: tuple[int, Any] = (-1, None)

    def answer(self, word: str, value: Any) -> Any:
        """Return the answer to one request. Raises what the model raises."""
        return getattr(self, f"_{word}")(value)

    def _model(self, value: tuple[Any, list[torch.Tensor], list[torch.nn.Module]]) -> int:
        """Take a model, and the lists of its tensors and modules. Return the process id."""
        target, self._tensors, self._modules = value
        return self._take(target)

    def _build(self, value: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> int:
        """Build the model here. Return the process id."""
        load_model, args, kwargs = value
        return self._take(load_model(*args, **kwargs))

    def _take(self, target: Any) -> int:
        self._target = target
        self._replicas = ReplicaSet(target, [self._device], gives_back=False)
        self._is_model = self._replicas.has_model
        self._is_changed = True
        return os.getpid()

    def _tensors_changed(self, changed: list[tuple[int, torch.Tensor]]) -> None:
        """Write new values into tensors of the model, by their position in the list that came with it."""
        with torch.no_grad():
            for index, value in changed:
                self._tensors[index].copy_(value)
        self._is_changed = True

    def _call(self, fields: tuple[Any, ...]) -> tuple[Any, ...]:
        """Call the model, and return the fields of `Returned`."""
        call = Call(*fields)
        run = partial(_unpacked_modes(call.modes).run, partial(self._output, call), self._device, self._replicas.home)
        if call.rng_state is None and not call.returns_buffers:
            return (run(),)
        kept = torch.get_rng_state()
        if call.rng_state is not None:
            torch.set_rng_state(call.rng_state)
        try:
            output = run()
            return output, _if_changed(call.rng_state), self._written_buffers() if call.returns_buffers else ()
        finally:
            torch.set_rng_state(kept)

    def _output(self, call: Call) -> Any:
        args, kwargs = call.args, call.kwargs
        if call.prepare is not None:
            args, kwargs = as_call(self._function(*call.prepare)(*args))
        if self._device != _CPU:
            args, kwargs = self._placed((args, kwargs))
        if not self._is_model:
            return _checked(self._target(*args, **kwargs))
        if self._is_changed or self._device != _CPU:
            if self._replicas.stale():
                self._replicas.refresh()
            self._is_changed = False
        replica = self._replicas.current[0]
        way = replica.module if call.method is None else getattr(replica.module, call.method)
        return _checked(replica.prepared(way)(*args, **kwargs))

    def _function(self, number: int, pickled: bytes | None) -> Callable[..., Any]:
        """Return a function that came with this call or with an earlier one. Only the last one is kept."""
        if pickled is not None:
            function, buffers = pickle.loads(pickled)
            self._last_function = number, pickle.loads(function, buffers=buffers)
        assert self._last_function[0] == number
        return self._last_function[1]  # type: ignore[no-any-return]

    def _written_buffers(self) -> tuple[WrittenBuffer, ...]:
        """Give the buffers that a call wrote to the model of this process, and return them."""
        if not self._is_model or (write_back := self._replicas.current[0].write_back) is None:
            return ()
        before = [{name: _state_of(each) for name, each in module._buffers.items()} for module in self._modules]
        write_back()
        written = tuple(
            (index, name, buffer)
            for index, (module, states) in enumerate(zip(self._modules, before, strict=True))
            for name, buffer in module._buffers.items()
            if buffer is not None and (states.get(name) != _state_of(buffer) or may_be_written_unseen(module, buffer))
        )
        self._is_changed = self._is_changed or bool(written)
        return written

    def _placed(self, value: Any) -> Any:
        leaves, spec = flatten(value)
        return unflatten(spec, [leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def _state_of(buffer: torch.Tensor | None) -> tuple[int, int | None]:
    """Return what a write into a buffer changes, unless `may_be_written_unseen`."""
    return id(buffer), None if buffer is None or buffer.is_inference() else buffer._version


@functools.lru_cache(maxsize=8)
def _unpacked_modes(packed: bytes) -> SentModes:
    """Return pickled modes of the launching process. They rarely change between calls."""
    modes: SentModes = pickle.loads(packed)
    return modes


def pickled_function(function: Callable[..., Any], address: str) -> bytes:
    """Return a pickled function for `Call.prepare`. Raises UnsendableError with that address."""
    pickled, buffers = pickled_apart(function, address)
    return pickle.dumps((bytes(pickled), [bytearray(buffer) for buffer in buffers]))


def _if_changed(before: torch.Tensor | None) -> torch.Tensor | None:
    if before is None:
        return None
    after = torch.get_rng_state()
    return None if torch.equal(before, after) else after


def _checked(output: Any) -> Any:
    """Return an output; refuse one with a gradient graph, which cannot leave the process."""
    if any(isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None for leaf in flatten(output)[0]):
        msg = "the output carries a gradient graph, which stays in the worker. Return output.detach()"
        raise SessionError(msg)
    return output

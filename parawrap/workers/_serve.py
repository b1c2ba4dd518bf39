"""The process of a worker: keep a copy of the model, and run one request after another until the connection closes."""

from __future__ import annotations

import contextvars
import functools
import os
import pickle
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from parawrap.engine import ReplicaSet, as_call
from parawrap.errors import SessionError
from parawrap.lanes import Modes
from parawrap.launch import pack_exception, traceback_of, unpack
from parawrap.replicas import may_be_written_unseen
from parawrap.tree import flatten, unflatten
from parawrap.workers._line import Line, Message

__all__ = ["Call", "SentModes", "WrittenBuffer", "serve"]

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
    def here(cls, kind: str) -> SentModes:
        return cls(Modes.capture(kind)._replace(context=_NO_CONTEXT, profiling=False), _GlobalModes.here())

    def run(self, work: Callable[[], Any], device: torch.device, home: torch.device | None) -> Any:
        """Run `work` under these modes."""
        self.of_process.enter()
        modes = self.of_thread._replace(context=contextvars.copy_context())
        return modes.run(work, device, home)


class Call(NamedTuple):
    """A call of the model. With `rng_state`, it draws the numbers of the caller, and returns the state that they leave."""

    method: str | None
    prepare: Callable[..., Any] | None
    modes: bytes
    rng_state: torch.Tensor | None
    returns_buffers: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Server:
    """The model of one worker. Used by the main thread of its process alone."""

    def __init__(self, line: Line, device: torch.device) -> None:
        self._line = line
        self._device = device
        self._replicas: ReplicaSet
        self._tensors: list[torch.Tensor] = []
        self._modules: list[torch.nn.Module] = []
        self._is_changed = False  # by a message; a call changes the replica alone

    def run(self) -> None:
        """Answer requests until the other end closes the connection."""
        while (message := self._line.receive()) is not None:
            try:
                self._line.send("returned", self._answer(message), "the output")
            except Exception as error:  # noqa: BLE001 (a model may raise anything)
                self._report(error)
                del error
            del message  # its tensors lie in a slab that the next request may use

    def _answer(self, message: Message) -> Any:
        return getattr(self, f"_{message.word}")(message)

    def _report(self, error: Exception) -> None:
        file = pack_exception(error)
        try:
            self._line.send("raised", traceback_of(error, __file__), "the traceback", file)
        finally:
            os.close(file)

    def _model(self, message: Message) -> None:
        """Take a model, and the lists of its tensors and modules."""
        assert message.file is not None
        try:
            target, self._tensors, self._modules = unpack(message.file)
        finally:
            os.close(message.file)
        self._take(target)

    def _build(self, message: Message) -> None:
        """Build the model here."""
        load_model, args, kwargs = message.value
        self._take(load_model(*args, **kwargs))

    def _take(self, target: Any) -> None:
        self._target = target
        self._replicas = ReplicaSet(target, [self._device], gives_back=False)
        self._is_model = self._replicas.has_model
        self._is_changed = True

    def _tensors_changed(self, message: Message) -> None:
        """Write new values into tensors of the model, by their position in the list that came with it."""
        with torch.no_grad():
            for index, value in message.value:
                self._tensors[index].copy_(value)
        self._is_changed = True

    def _call(self, message: Message) -> tuple[Any, torch.Tensor | None, list[WrittenBuffer]]:
        """Call the model. Return the output, the random state if it changed, and the buffers that the call wrote."""
        call = Call(**message.value)
        modes = _unpacked_modes(call.modes)
        kept = None if call.rng_state is None else torch.get_rng_state()
        if call.rng_state is not None:
            torch.set_rng_state(call.rng_state)
        try:
            output = modes.run(lambda: self._output(call), self._device, self._replicas.home)
            return output, _if_changed(call.rng_state), self._written_buffers() if call.returns_buffers else []
        finally:
            if kept is not None:
                torch.set_rng_state(kept)

    def _output(self, call: Call) -> Any:
        args, kwargs = call.args, call.kwargs
        if call.prepare is not None:
            args, kwargs = as_call(call.prepare(*args))
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

    def _written_buffers(self) -> list[WrittenBuffer]:
        """Give the buffers that a call wrote to the model of this process, and return them."""
        if not self._is_model or (write_back := self._replicas.current[0].write_back) is None:
            return []
        before = [{name: _state_of(each) for name, each in module._buffers.items()} for module in self._modules]
        write_back()
        written = [
            (index, name, buffer)
            for index, (module, states) in enumerate(zip(self._modules, before, strict=True))
            for name, buffer in module._buffers.items()
            if buffer is not None and (states.get(name) != _state_of(buffer) or may_be_written_unseen(module, buffer))
        ]
        self._is_changed = self._is_changed or bool(written)
        return written

    def _placed(self, value: Any) -> Any:
        if self._device == _CPU:
            return value
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


def serve(path: str, secret: bytes, device: str, threads: int, seed: int) -> None:
    """Connect to the launching process, and answer its requests. Runs as the only rank of a launch."""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(path)
    sock.sendall(secret)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    line = Line(sock, copies_small=False)
    try:
        line.send("hello", os.getpid(), "the process id")
        Server(line, torch.device(device)).run()
    except ConnectionError:
        pass  # the launching process has exited
    finally:
        line.close()


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

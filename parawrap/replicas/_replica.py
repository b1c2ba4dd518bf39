"""One lane's replica: a copy of the structure, with views and copies of the tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch

from parawrap.backends import backend_of, warn_caller
from parawrap.errors import ReplicaError
from parawrap.replicas._batched_copies import lasting
from parawrap.replicas._copy_structure import Copy, Node, Survey
from parawrap.replicas._lane_state import LaneState
from parawrap.replicas._private_names import buffers_of
from parawrap.replicas._replica_tensors import Tensors, is_parameter
from parawrap.replicas._torchscript import script_pairs

__all__ = ["Order", "Replica", "buffers_written_unseen", "may_be_written_unseen", "warn_of_state"]

_MOST_NAMED = 3


def may_be_written_unseen(module: torch.nn.Module, buffer: torch.Tensor) -> bool:
    """True if a forward pass may write the buffer without advancing its version.

    The kernels of batch and instance norm do so in train mode, and so do writes through ``.data``, for instance of the
    codebook of a VQ-VAE.
    """
    return getattr(module, "training", False) and buffer.ndim > 0 and buffer.is_floating_point()


def buffers_written_unseen(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    """Return the buffers of modules that a forward pass may write without advancing their versions."""
    pairs = ((module, buffer) for module in modules for buffer in buffers_of(module).values())
    return [buffer for module, buffer in pairs if buffer is not None and may_be_written_unseen(module, buffer)]


def warn_of_state(places: Sequence[str]) -> None:
    """Warn of places of the model that a call set."""
    more = "" if len(places) <= _MOST_NAMED else f" and {len(places) - _MOST_NAMED} more"
    warn_caller(
        f"the model wrote {', '.join(places[:_MOST_NAMED])}{more} during a call. Each lane wrote its own, and these writes "
        "do not come back to the model: the next call starts without them. Return the value from the call instead, or "
        "register a tensor as a buffer: the buffers of lane 0 come back"
    )


class Order:
    """The order of the lanes that copy the buffers of a model, and of lane 0, which may write them meanwhile."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copied: dict[int, torch.Event] = {}
        self.changed: list[str] = []  # the places that lanes set, for a warning

    @contextmanager
    def together(self, device: torch.device) -> Iterator[None]:
        """Copy buffers inside the block."""
        with self._lock:
            yield
            if (stream := backend_of(device.type).stream(device)) is not None:
                self._copied[threading.get_ident()] = stream.record_event()

    @contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        """Write buffers inside the block: after the copies that are queued, and before later ones."""
        stream = backend_of(device.type).stream(device)
        with self._lock:
            for event in self._copied.values():
                if stream is not None:
                    stream.wait_event(event)
            yield
            if stream is not None:
                stream.synchronize()


class Replica:
    """The target's copy for one lane. Made and renewed while the lane is idle; run only in the lane.

    Raises:
        ReplicaError: If a copy cannot be made. The message names the device and the error.
    """

    def __init__(self, survey: Survey, tensors: Tensors, order: Order) -> None:
        self.tensors = tensors
        self._order = order
        try:
            tensors.take([node.value for node in survey.tensors])
            self.copy = Copy(survey, tensors.of)
        except Exception as error:
            name = type(survey.target).__name__
            msg = f"no replica of {name} can be made on {tensors.device}: {type(error).__name__}: {error}"
            raise ReplicaError(msg) from error
        self.state = LaneState(survey, self.copy, tensors)
        self.gives_back = False  # its buffers go back to the model
        self.is_pending = False  # the lane has run since then
        self.trains_norms = False  # it may write buffers unseen
        self.is_over = False  # its block has ended
        self._buffers = [
            (module, copy, name, buffer)
            for node in survey.modules
            for module, copy in _pairs(node.value, self.copy.of(node.value))
            for name, buffer in buffers_of(module).items()
            if buffer is None or not buffer.requires_grad
        ]
        buffers = {id(buffer) for *_, buffer in self._buffers}
        own = (node.value for node in survey.tensors if not is_parameter(node.value))
        self._attributes = [tensor for tensor in own if id(tensor) not in buffers]

    def _given(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        """The copy of a buffer that the lane was given."""
        return None if buffer is None else self.tensors.of(buffer)

    @property
    def home(self) -> torch.device | None:
        """The model's device."""
        return self.tensors.home

    @property
    def target(self) -> Any:
        """The copy of the whole target."""
        return self.copy.target

    @property
    def has_own(self) -> bool:
        """True if the replica has tensors of its own, or places for buffers."""
        return bool(self._buffers or self.tensors.held())

    def __del__(self) -> None:
        if getattr(self, "is_over", False) and self.copy.survey.has_cycle:
            self.copy.clear()  # without it, the copy is freed by a garbage collection

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the model's tensor that this one is a view or a copy of; None for any other."""
        return self.tensors.original_of(tensor)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` with the replica in the model's state, as a lane's task in a cut call: no lane writes the model.

        Raises:
            ReplicaError: If the call writes a parameter.
        """
        self._prepare(renews=True)
        return self._call(function, args, kwargs)

    def run_whole(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do the same for a whole call, while lane 0 may write the model. Replicas elsewhere are renewed between calls."""
        self._prepare(renews=self.tensors.renews_in_lane)
        try:
            return self._call(function, args, kwargs)
        finally:
            if self.gives_back and self.has_own:
                self.finish()

    def _prepare(self, *, renews: bool) -> None:
        self.state.restore()
        if not self.has_own:
            return
        touched = self.touched()
        owes = self.gives_back and self.is_pending and (self.trains_norms or touched)
        if renews and not owes:
            with self._order.together(self.tensors.device):
                if touched:
                    self.renew(())  # an earlier part of the same call wrote them
                elif self.tensors.renews_in_lane:
                    self.tensors.renew_in_lane()
        self.is_pending = True

    def _call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        versions = self.tensors.versions()
        output = function(*args, **kwargs)
        written = self.tensors.written_parameter(versions)
        if written is not None:
            self._refuse_written(written)
        if not self.state.is_intact():
            self.state.refuse_grown()
            self._order.changed = self._order.changed or self.state.changed()
        return output

    def _refuse_written(self, parameter: torch.Tensor) -> NoReturn:
        survey = self.copy.survey
        msg = (
            f"the parameter {survey.path(survey.nodes[id(parameter)])!r} was written during a call, by forward or by "
            "another thread. Each lane writes it once, into the memory of the model. In forward, compute with a new tensor "
            "(self.weight * mask), make the value a buffer (register_buffer), or write it between calls"
        )
        raise ReplicaError(msg)

    def set(self, node: Node, key: Any, value: Any) -> None:
        """Set a value of a dict, or an attribute of an instance, that was set in the target."""
        self.copy.put(node, key, value)

    def touched(self) -> bool:
        """True if the lane wrote or replaced one of its tensors."""
        return bool(self.tensors.written()) or any(
            _buffer(copy, name) is not self._given(buffer) for _, copy, name, buffer in self._buffers
        )

    def renew(self, changed: Sequence[torch.Tensor]) -> int:
        """Make new copies of these originals and of all that the lane wrote; return the bytes copied."""
        replaced = []
        for _, copy, name, buffer in self._buffers:
            if _buffer(copy, name) is not self._given(buffer):
                if buffer is None:
                    _set_buffer(copy, name, None)
                else:
                    replaced.append(buffer)
        copied = self.tensors.renew([*changed, *replaced, *self.tensors.written()], self.copy.replace)
        if self._attributes:
            self.state.accept()  # new copies are among the attributes
        return copied

    def share_buffers(self) -> None:
        """Hold the model's own buffers instead of copies, as the first replica of torch.nn.parallel.replicate does."""
        for _, copy, name, buffer in self._buffers:
            if buffer is not None and buffer.device == self.tensors.device:
                _set_buffer(copy, name, buffer)

    def finish(self) -> None:
        """Give the buffers to the model as part of a lane's task, while other lanes may be copying them."""
        with self._order.alone(self.tensors.device):
            self.write_back()

    def write_back(self) -> None:
        """Give the tensors that the lane wrote in place, and the buffers that it replaced, to the model."""
        self.is_pending = False
        for module, copy, name, buffer in self._buffers:
            now = _buffer(copy, name)
            if buffer is None and now is not None:
                _set_buffer(module, name, now.detach().to(self.home or now.device))
            if buffer is None or now is None or now is buffer:
                continue
            if now is not self.tensors.of(buffer) or self.tensors.wrote(buffer):
                _give(module, name, buffer, now)
            elif may_be_written_unseen(module, buffer):
                with lasting():
                    buffer.data.copy_(now)  # like the kernels of norms, it leaves the version alone
        written = set(map(id, self.tensors.written()))
        for tensor in self._attributes:
            if id(tensor) in written:
                with lasting():
                    tensor.copy_(self.tensors.of(tensor))


def _pairs(module: torch.nn.Module, copy: torch.nn.Module) -> Iterable[tuple[torch.nn.Module, torch.nn.Module]]:
    """A module next to its copy; a scripted one is followed by the modules in it."""
    return script_pairs(module, copy) if isinstance(module, torch.jit.ScriptModule) else ((module, copy),)


def _give(module: torch.nn.Module, name: str, buffer: torch.Tensor, now: torch.Tensor) -> None:
    with lasting():
        if now.shape == buffer.shape:
            buffer.copy_(now)
        else:
            _set_buffer(module, name, now.detach().to(buffer.device))


def _buffer(module: torch.nn.Module, name: str) -> torch.Tensor | None:
    buffers = buffers_of(module)
    return buffers[name] if name in buffers else None  # noqa: SIM401  # a scripted module's has no `get`


def _set_buffer(module: torch.nn.Module, name: str, value: torch.Tensor | None) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        setattr(module, name, value)
    else:
        buffers_of(module)[name] = value

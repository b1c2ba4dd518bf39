"""One lane's replica: a copy of the structure, with views and copies of the tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from parawrap.backends import backend_of
from parawrap.errors import ReplicaError, SessionError
from parawrap.replicas._batched_copies import lasting
from parawrap.replicas._copies import Copies
from parawrap.replicas._lane_state import LaneState
from parawrap.replicas._lane_tensors import LaneTensors, is_parameter
from parawrap.replicas._ledger import may_be_written_unseen
from parawrap.replicas._parts import Kind
from parawrap.replicas._private_names import buffers_of
from parawrap.replicas._snapshot import Change
from parawrap.replicas._survey import Survey
from parawrap.replicas._torchscript import script_pairs
from parawrap.tree import flatten, unflatten

__all__ = ["Order", "Replica", "give_buffers"]


class Order:
    """The order of the lanes that copy the buffers of a model, and of lane 0, which may write them meanwhile.

    `writes` counts the calls that wrote them.
    """

    def __init__(self) -> None:
        self.writes = 0
        self._lock = threading.Lock()
        self._copied: dict[int, torch.Event] = {}

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
            self.writes += 1
            yield
            if stream is not None:
                stream.synchronize()


class Replica:
    """The target's copy for one lane. Made and renewed while the lane is idle; run only in the lane.

    Raises:
        ReplicaError: If a copy cannot be made. The message names the device and the error.
    """

    def __init__(self, survey: Survey, tensors: LaneTensors, order: Order, written: list[str]) -> None:
        self.tensors = tensors
        self._order = order
        self._survey = survey
        self._copies = _copies_of(survey, tensors)
        self.target = self._copies.target
        self.state = LaneState(self._copies, tensors, written)
        self.gives_back = False  # its buffers go back to the model
        self.is_pending = False  # the lane has run since then
        self.has_finished = False  # the lane ran its part of a cut call, whose buffers are not compared yet
        self.writes_before = 0  # into the model's buffers, when the lane copied them last
        self.has_written = False  # the lane wrote or replaced one of its tensors in the last task
        self.trains = False  # a module is in training mode
        self.trains_norms = False  # it may write buffers unseen
        self.is_over = False  # its block has ended
        self._has_cycle = survey.has_cycle
        self._find_buffers()

    @property
    def home(self) -> torch.device | None:
        """The model's device."""
        return self.tensors.home

    @property
    def has_own(self) -> bool:
        """True if the replica has its own tensors, or places for buffers."""
        return bool(self._buffers or self.tensors.held())

    def __del__(self) -> None:
        if getattr(self, "is_over", False) and self._has_cycle:
            self._copies.clear()  # without it, the copy is freed by a garbage collection

    def original_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the model's tensor that this one is a view or a copy of; None for any other."""
        return self.tensors.original_of(tensor)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` with the replica in the model's state, as a lane's task in a cut call: no lane writes the model.

        Raises:
            ReplicaError: If the call writes a parameter, or makes a layer or a parameter.
        """
        self.has_finished = False
        self._prepare(renews=True)
        output = self._call(self.tensors.versions(), function, args, kwargs)
        self.has_finished = True
        return output

    def run_whole(self, versions: list[int] | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Do the same for a whole call, while lane 0 may write the model. Replicas elsewhere are renewed between calls.

        `versions` are those of the parameters when the call was submitted. None if the lane has copies of that moment.

        Raises:
            SessionError: If a parameter was written since.
        """
        now = self.tensors.versions()
        if versions not in (None, now):
            msg = (
                "a parameter of the model was written after this call was submitted and before it ran, so its output would "
                "mix both. Read the outputs of submit and map before you change the model"
            )
            raise SessionError(msg)
        self.has_finished = False  # a cut call of another thread cannot compare what its part wrote any more
        self._prepare(renews=self.tensors.renews_in_lane)
        try:
            return self._call(now, function, args, kwargs)
        finally:
            if self.gives_back and self.has_own:
                self.finish()

    def apply(self, change: Change) -> None:
        """Set a number, a flag, or a string that was set in the target. A tensor needs a new copy then."""
        if isinstance(change.now, torch.Tensor):
            self.tensors.replace(change.before, change.now)
            self._copies.take(change.before, change.now)
            self._find_buffers()
        else:
            copy = self._copies.of(change.node.value)
            dict.__setitem__(copy if change.node.kind is Kind.DICT else vars(copy), change.key, change.now)

    def touched(self) -> bool:
        """True if the lane wrote or replaced one of its tensors."""
        return self.has_own and bool(self.tensors.written() or self._find_replaced())

    def renew(self, changed: Sequence[torch.Tensor]) -> int:
        """Make new copies of these originals and of all that the lane wrote; return the bytes copied."""
        self.has_written = False
        replaced = self._find_replaced()
        for _, copy, name, buffer in replaced:
            _set_buffer(copy, name, self._find_given(buffer))
        due = [*changed, *(buffer for *_, buffer in replaced if buffer is not None), *self.tensors.written()]
        copied = self.tensors.renew(due, self._copies.replace)
        if self._attributes or self.tensors.computed:
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
        written = set(map(id, self.tensors.written()))
        for module, copy, name, buffer in self._buffers:
            now = _buffer(copy, name)
            if buffer is None and now is not None:
                _set_buffer(module, name, now.detach().to(self.home or now.device))
            if buffer is None or now is None or now is buffer:
                continue
            if now is not self.tensors.of(buffer) or id(buffer) in written:
                _give(module, name, buffer, now)
            elif may_be_written_unseen(module, buffer):
                with lasting():
                    buffer.data.copy_(now)  # like the kernels of norms, it leaves the version alone
        for tensor in self._attributes:
            if id(tensor) in written:
                with lasting():
                    tensor.copy_(self.tensors.of(tensor))

    def states(self) -> list[tuple[torch.Tensor | None, bool]]:
        """Return the lane's buffers, and then its tensors in other places: each one, and True if the lane wrote it."""
        written = set(map(id, self.tensors.written()))
        found = [(buffer, _buffer(copy, name)) for _, copy, name, buffer in self._buffers]
        found += [(tensor, self.tensors.of(tensor)) for tensor in self._attributes]
        return [(now, id(original) in written or now is not self._find_given(original)) for original, now in found]

    def is_buffer(self, index: int) -> bool:
        """True if a state is a buffer."""
        return index < len(self._buffers)

    def path_of_state(self, index: int) -> str:
        """Return the way from the target to a state."""
        if not self.is_buffer(index):
            return self._survey.nodes[id(self._attributes[index - len(self._buffers)])].path
        module, _, name, _ = self._buffers[index]
        node = self._survey.nodes.get(id(module))
        return name if node is None else node.path_of(name)

    def _find_buffers(self) -> None:
        self._buffers = [
            (module, copy, name, buffer)
            for node in self._survey.modules
            for module, copy in _pairs(node.value, self._copies.of(node.value))
            for name, buffer in buffers_of(module).items()
            if buffer is None or not buffer.requires_grad
        ]
        buffers = {id(buffer) for *_, buffer in self._buffers}
        own = (node.value for node in self._survey.tensors if not is_parameter(node.value))
        self._attributes = [tensor for tensor in own if id(tensor) not in buffers]

    def _find_replaced(self) -> list[tuple[torch.nn.Module, torch.nn.Module, str, torch.Tensor | None]]:
        """The places of buffers where the lane has another tensor than it was given."""
        return [each for each in self._buffers if _buffer(each[1], each[2]) is not self._find_given(each[3])]

    def _find_given(self, buffer: torch.Tensor | None) -> torch.Tensor | None:
        """The copy of a buffer that the lane was given."""
        return None if buffer is None else self.tensors.of(buffer)

    def _prepare(self, *, renews: bool) -> None:
        if not self.has_own:
            return
        owes = self.gives_back and self.is_pending and (self.trains_norms or self.has_written)
        if renews and not owes:
            with self._order.together(self.tensors.device):
                self.writes_before = self._order.writes
                if self.has_written:
                    self.renew(())  # an earlier part of the same call wrote them
                elif self.tensors.renews_in_lane:
                    self.tensors.renew_in_lane()
        self.is_pending = True

    def _call(
        self, versions: list[int], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call `function`. `versions` are those of the parameters."""
        try:
            try:
                output = function(*args, **kwargs)
            except Exception as error:  # perhaps of the write: `self.weight += 1` assigns a view to the parameter
                self._refuse_written(versions, error)
                raise
            self._refuse_written(versions)
        except BaseException:
            self.tensors.put_back()
            self.state.restore()
            raise
        finally:
            self.has_written = self.touched()
        if not self.state.intact():
            leaves, spec = flatten(output)
            output = unflatten(spec, leaves)  # containers of the model would change in it
            self.state.settle()
        return output

    def _refuse_written(self, versions: list[int], error: Exception | None = None) -> None:
        """Raise ReplicaError if a parameter was written since it had those versions, before `error` was raised."""
        parameter = self.tensors.written_parameter(versions)
        if parameter is None:
            return
        msg = (
            f"the parameter {self._survey.nodes[id(parameter)].path!r} was written during a call, by forward or by "
            "another thread. Each lane writes it once, into the memory of the model. In forward, compute with a new tensor "
            "(self.weight * mask), make the value a buffer (register_buffer), or write it between calls"
        )
        raise ReplicaError(msg) from error


def give_buffers(replicas: Sequence[Replica]) -> None:
    """Give the buffers of lane 0 to the model after a cut call. All lanes are idle.

    Raises:
        ReplicaError: If lanes wrote different values into a tensor that is not a buffer, or into a buffer of a model in
            evaluation mode. The message names it.
    """
    first = replicas[0]
    # A whole call in lane 0 may have written the buffers between the starts of two parts: these are not compared.
    lanes = [each for each in replicas if each.has_finished and each.writes_before == first.writes_before]
    for replica in replicas:
        replica.has_finished = False
    states = [replica.states() for replica in lanes] if any(replica.has_written for replica in lanes) else []
    for index, each in enumerate(zip(*states, strict=True)):
        is_buffer = first.is_buffer(index)
        if (is_buffer and first.trains) or not any(was_written for _, was_written in each):
            continue
        if not all(_have_equal_values(value, each[0][0]) for value, _ in each[1:]):
            first.is_pending = False  # its buffers stay there
            what, when = ("buffer", " in evaluation mode") if is_buffer else ("tensor", "")
            msg = (
                f"the {what} {first.path_of_state(index)!r} was written during a call{when}, and each lane wrote the "
                "values of its own rows. Pass such state to the call as an argument, and return it; make scratch memory in "
                "forward. In training mode, the model keeps the buffers of lane 0"
            )
            raise ReplicaError(msg)
    first.write_back()


def _have_equal_values(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one.to(other.device), other, rtol=0, atol=0, equal_nan=True)


def _copies_of(survey: Survey, tensors: LaneTensors) -> Copies:
    name = type(survey.target).__name__
    try:
        tensors.take([node.value for node in survey.tensors])
        return Copies(survey, tensors.of)
    except ReplicaError:
        raise
    except RecursionError as error:
        msg = (
            f"no replica of {name} can be made: its objects hold each other in a chain that is too long for copy.deepcopy. "
            "Raise sys.setrecursionlimit, or keep the objects in a list"
        )
        raise ReplicaError(msg) from error
    except Exception as error:
        msg = f"no replica of {name} can be made on {tensors.device}: {type(error).__name__}: {error}"
        raise ReplicaError(msg) from error


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

"""`sync`: copy the training state of one rank to all ranks."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from parawrap.errors import GatherError
from parawrap.functional._collectives import gather_objects, require_group
from parawrap.functional._seeds_and_modules import unwrap
from parawrap.tree import address, flatten, is_dense, replace_nodes, unflatten

# The bytes of one collective. They are copied into one tensor, and a device may lack the memory for
# a copy of the whole model
_MOST_BYTES = 64 << 20
_LOAD = "Load a checkpoint in all ranks instead."


@runtime_checkable
class Stateful(Protocol):
    """An object whose state can be read and loaded, such as a scheduler.

    The protocol of this name in torch.distributed.checkpoint takes a second to import.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take the state."""
        ...


def sync(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    src: int = 0,
    *,
    stateful: Sequence[Stateful] = (),
) -> None:
    """Copy parameters, buffers, and the optimizer's state of one rank to all ranks, in place.

    Call it in all ranks after a step that failed or was interrupted: the ranks may have stopped one
    step apart. Afterwards all ranks have bit-identical values, and continue from those of `src`.
    With one rank, the function does nothing. Groups of ``Platform.ipc_groups`` do not count: all
    ranks of the launch get the values of `src`.

    - **Model**: all parameters, also frozen and tied ones, and all buffers, also those that a
      state_dict leaves out. Wrappers of DistributedDataParallel and torch.compile may stay.
    - **Optimizer**: its state and the options of its parameter groups, such as the learning rate.
      State that only some ranks have is created or removed. Parameters of the optimizer that are
      not in `model` are copied too.
    - **Other objects** in `stateful`, such as a learning rate scheduler and a GradScaler: their
      ``state_dict()`` of `src` is loaded in all ranks.
    - **Gradients**: ``.grad`` becomes None in all ranks, because ranks may hold gradients of half a
      step.
    - **Not copied**: ``model.training``, ``requires_grad``, extra state of modules, hooks,
      samplers, and random generators.

    If the failure broke the process groups, DistributedDataParallel raises an error at the next
    step. Wrap the model again before that: ``model = functional.to(functional.unwrap(model))``.

    Tensors travel in their bytes, several in one collective of ``torch.distributed``. The ranks
    first compare names, shapes, and dtypes. Unless they are equal, all ranks raise, and no value
    has changed.

    Args:
        model: The model, with the same architecture on every rank. It may have any wrapper that
            `unwrap` removes, except for FullyShardedDataParallel.
        optimizer: An optimizer, or several, in the same order on every rank.
        src: The global rank that sends its values.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()``, in the same order on
            every rank.

    Raises:
        ValueError: If `src` is not a rank of the process group.
        GatherError: If the ranks' `src`, names, shapes, dtypes, kinds of device, or optimizers
            differ. The message shows the first difference.
        TypeError: If `model` is not a module, `optimizer` is not an optimizer, an object has no
            ``state_dict``, or a tensor is sharded, sparse, quantized, or without data.
        PlatformError: If there are several ranks, but ``ipc_groups=None`` forms no process group.

    Example:
        >>> import torch
        >>> from parawrap import Platform, current_rank, functional, wrapper
        >>> @wrapper(Platform(device="cpu", n_cpus=2, seed=None))
        ... def train():
        ...     model = torch.nn.Linear(1, 1)        # other weights in each rank
        ...     optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        ...     if current_rank().global_rank == 0:  # one rank is one step ahead
        ...         model(torch.ones(1, 1)).sum().backward()
        ...         optimizer.step()
        ...     functional.sync(model, optimizer)
        ...     steps = optimizer.state[model.weight]["step"].item()
        ...     return model.weight.item(), steps
        >>> one, other = train()
        >>> one == other, one[1]
        (True, 1.0)
    """
    optimizers = _check_arguments(model, optimizer)
    _check_stateful(stateful)
    ranks = require_group("sync")
    if type(src) is not int or not 0 <= src < ranks:  # True is not a rank
        valid = "Use 0" if ranks == 1 else f"Use 0 to {ranks - 1}"
        msg = f"src={src!r} is not a rank of the process group, which has {ranks}. {valid}."
        if isinstance(src, Stateful):
            msg += " Schedulers and scalers are stateful=[scheduler]."
        raise ValueError(msg)
    if ranks == 1:
        return
    named = _name_tensors(model, optimizers)
    is_source = dist.get_rank() == src
    state_tensors = _StateTensors()

    # Compare. Errors are reported too: if one rank raised here, the others would wait for it
    report = _Report(src, _find_problem(model, optimizers, named))
    if report.problem is None:
        report.descriptions = _describe(optimizers, named)
        report.descriptions += [f"stateful: {type(each).__qualname__}" for each in stateful]
        if is_source:
            _pack_states(optimizers, stateful, state_tensors, report)
    reports = gather_objects(report)
    # No value changes before all ranks have passed this check
    _check_reports(reports)

    # Copy. From here on, an interrupt leaves this rank with values of both, until the next sync
    filled: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    if not is_source:
        states, others = pickle.loads(reports[src].states)
        for each, state in zip(optimizers, states, strict=True):
            filled.append(state_tensors.fill(each, state))
    by_id = {id(tensor): tensor for _, tensor in named}
    tensors = list(by_id.values())  # each tied parameter once
    with torch.no_grad():
        _broadcast([*tensors, *state_tensors.by_slot()], src)
    if not is_source:
        for each, state in zip(optimizers, filled, strict=True):
            _replace_state(each, state)
        for taker, state in zip(stateful, others, strict=True):
            taker.load_state_dict(state)
    for tensor in tensors:
        if tensor.is_leaf:
            tensor.grad = None


# --- the values of this rank ---


def _check_arguments(model: Any, optimizer: Any) -> list[Optimizer]:
    """Return the optimizers as a list."""
    if not isinstance(model, nn.Module):
        kind = type(model).__qualname__
        msg = f"model is a {kind}, not a torch.nn.Module. Call sync once per model."
        raise TypeError(msg)
    optimizers: list[Any] = [] if optimizer is None else [optimizer]
    if isinstance(optimizer, (list, tuple)):
        optimizers = list(optimizer)
    for each in optimizers:
        if not isinstance(each, Optimizer):
            kind = type(each).__qualname__
            msg = f"optimizer is a {kind}. Give a torch.optim.Optimizer, or a list of them."
            raise TypeError(msg)
    return optimizers


def _check_stateful(stateful: Any) -> None:
    """Raise TypeError unless it is a list of objects with a state."""
    if not isinstance(stateful, (list, tuple)):
        kind = type(stateful).__qualname__
        msg = f"stateful is a {kind}. Give a list of objects, as in stateful=[scheduler]."
        raise TypeError(msg)
    for each in stateful:
        kind = type(each).__qualname__
        if isinstance(each, (nn.Module, Optimizer)):
            msg = f"stateful holds a {kind}. Give modules as model, and optimizers as optimizer."
            raise TypeError(msg)
        if not isinstance(each, Stateful):
            msg = f"stateful holds a {kind}, which has no state_dict and load_state_dict."
            raise TypeError(msg)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _name_tensors(model: nn.Module, optimizers: Sequence[Optimizer]) -> list[tuple[str, Tensor]]:
    """Return parameters and buffers with their names, a tied parameter once for each name."""
    inner = unwrap(model)
    named: list[tuple[str, Tensor]] = list(inner.named_parameters(remove_duplicate=False))
    named += inner.named_buffers(remove_duplicate=False)
    for number, optimizer in enumerate(optimizers):
        for index, parameter in enumerate(_parameters_of(optimizer)):
            named.append((f"parameter {index} of optimizer {number}", parameter))
    return named


def _state_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the options of the groups; the state of parameters, by their numbers; and other state.

    Some optimizers keep state under other keys than parameters.
    """
    options = [dict(group) for group in optimizer.param_groups]
    for each in options:
        del each["params"]
    numbers = {id(each): number for number, each in enumerate(_parameters_of(optimizer))}
    of_parameters: dict[int, Any] = {}
    other: dict[Any, Any] = {}
    # Not ``optimizer.state[parameter]``, which creates a state
    for key, state in optimizer.state.items():
        if id(key) in numbers:
            of_parameters[numbers[id(key)]] = state
        # The state of a parameter that has left the groups is not used any more
        elif not isinstance(key, Tensor):
            other[key] = state
    return {"param_groups": options, "state": of_parameters, "other": other}


def _find_problem(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    named: Sequence[tuple[str, Tensor]],
) -> str | None:
    """Return why the values cannot be copied, and what to do; None if they can."""
    # It is slow to import, and no module can use it before it was imported
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules()):
        return f"model is sharded by FullyShardedDataParallel: each rank has other values. {_LOAD}"
    tensors = [*named]
    for number, optimizer in enumerate(optimizers):
        if hasattr(optimizer, "consolidate_state_dict"):
            kind = type(optimizer).__qualname__
            return f"the state of {kind} is sharded: each rank has other values. {_LOAD}"
        leaves, spec = flatten(_state_of(optimizer))
        for path, leaf in zip(spec.paths(), leaves, strict=True):
            if isinstance(leaf, Tensor):
                tensors.append((address(f"optimizer {number}", path), leaf))
    for name, tensor in tensors:
        problem = _find_problem_of(tensor)
        if problem is not None:
            return f"{name} {problem}"
    return None


def _find_problem_of(tensor: Tensor) -> str | None:
    """Return why the values of one tensor cannot be copied, and what to do; None if they can."""
    kind = type(tensor).__qualname__
    if is_lazy(tensor):
        return "has no shape yet. Run the model once in all ranks before."
    if hasattr(tensor, "full_tensor"):
        return f"is a {kind}, a shard of the values: each rank has others. {_LOAD}"
    holds_tensors = hasattr(tensor, "__tensor_flatten__")  # its values are in other tensors
    has_data = not (holds_tensors or tensor.is_quantized or tensor.is_meta)
    if is_dense(tensor) and has_data:
        return None
    form = f"{kind} on {tensor.device} with {tensor.layout} and {tensor.dtype}"
    return f"is a {form}. sync copies dense tensors with data. {_LOAD}"


def _describe(optimizers: Sequence[Optimizer], named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Describe what must be equal in all ranks."""
    first_names: dict[int, str] = {}
    found = []
    for name, tensor in named:
        shape = tuple(tensor.shape)
        text = f"{name}: {tensor.dtype} {shape} on {tensor.device.type}"
        stored = tuple(_without_repeats(tensor, tensor).shape)
        if stored != shape:
            text += f", expanded from {stored}"
        first = first_names.setdefault(id(tensor), name)
        if first != name:
            text += f", the same tensor as {first}"
        found.append(text)
    for number, optimizer in enumerate(optimizers):
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        kind = type(optimizer).__qualname__
        found.append(f"optimizer {number}: {kind} with groups of {sizes} parameters")
    return found


# --- what the ranks compare ---


@dataclass
class _Report:
    """The values of one rank, without those of tensors, as the ranks exchange them.

    Attributes:
        src: The argument of `sync`.
        problem: The reason why the values cannot be copied; None if they can.
        descriptions: Texts that must be equal in all ranks.
        states: Of the source, the pickled states of its optimizers, with a slot for each tensor,
            and of its other objects. Empty for other ranks.
    """

    src: int
    problem: str | None
    descriptions: list[str] = field(default_factory=list)
    states: bytes = b""


def _check_reports(reports: Sequence[_Report]) -> None:
    """Raise the same error in all ranks if a rank has a problem, or ranks differ."""
    for rank, report in enumerate(reports):
        if report.problem is not None:
            msg = f"sync: in rank {rank}, {report.problem}"
            raise TypeError(msg)
    expected = reports[0]
    for rank, report in enumerate(reports):
        if report.src != expected.src:
            found = f"rank 0 has src={expected.src}, but rank {rank} has src={report.src}"
            msg = f"sync: {found}. Give all ranks the same src"
            raise GatherError(msg)
        if report.descriptions != expected.descriptions:
            one, other = _first_difference(expected.descriptions, report.descriptions)
            msg = (
                f"sync: rank 0 has {one}; but rank {rank} has {other}. No value has changed. Give "
                "all ranks the same model and optimizers"
            )
            raise GatherError(msg)


def _first_difference(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """Return the first descriptions that differ; "nothing more" stands for the end of a list."""
    pairs = zip_longest(one, other, fillvalue="nothing more")
    return next((left, right) for left, right in pairs if left != right)


# --- the state of optimizers ---


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor of the source in the pickled states. The tensor is sent separately."""

    number: int
    shape: torch.Size
    dtype: torch.dtype
    device_type: str

    def fits(self, tensor: object) -> bool:
        """True if a tensor of this rank can take the values."""
        if not isinstance(tensor, Tensor):
            return False
        form = tensor.shape, tensor.dtype, tensor.device.type
        if form != (self.shape, self.dtype, self.device_type):
            return False
        # An expanded tensor stores too few elements
        stored = _without_repeats(tensor, tensor)
        return stored.shape == tensor.shape

    def new_tensor(self, parameter: Tensor) -> Tensor:
        """Return a new tensor for the values, with the strides of a parameter of the same shape."""
        is_same_kind = parameter.device.type == self.device_type
        device = parameter.device if is_same_kind else torch.device(self.device_type)
        if self.shape == parameter.shape:
            return torch.empty_like(parameter, dtype=self.dtype, device=device).detach()
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def _pack_states(
    optimizers: Sequence[Optimizer],
    stateful: Sequence[Stateful],
    tensors: _StateTensors,
    report: _Report,
) -> None:
    """Add the source's states to the report, and the tensors of its optimizers to `tensors`.

    A state that cannot be pickled is a problem of the report.
    """
    states = [_state_of(each) for each in optimizers]
    try:
        others = [
            replace_nodes(each.state_dict(), torch.is_tensor, Tensor.cpu) for each in stateful
        ]
        with_slots = replace_nodes(states, torch.is_tensor, tensors.slot_of)
        report.states = pickle.dumps((with_slots, others))
    except Exception as error:  # noqa: BLE001 (classes of the user may raise anything)
        cure = "Keep only tensors and values that pickle supports in it"
        report.problem = f"a state cannot be sent: {error}. {cure}"


def _is_slot(value: object) -> bool:
    return isinstance(value, _Slot)


class _StateTensors:
    """The tensors of optimizer states, by the number of the slot.

    They are those that the source sends. Another rank receives into tensors that its optimizers
    have, if they fit, because a CUDA graph may use them; otherwise into new tensors.
    """

    def __init__(self) -> None:
        self._tensors: dict[int, Tensor] = {}
        self._slots: dict[int, _Slot] = {}  # by the id of the source's tensor

    def by_slot(self) -> list[Tensor]:
        """Return the tensors in the order of their slots, which is the same in all ranks."""
        return [self._tensors[number] for number in sorted(self._tensors)]

    def slot_of(self, tensor: Tensor) -> _Slot:
        """Return the slot of a tensor of the source, also if it has one from another place."""
        if id(tensor) not in self._slots:
            number = len(self._slots)
            form = tensor.shape, tensor.dtype, tensor.device.type
            self._slots[id(tensor)] = _Slot(number, *form)
            self._tensors[number] = tensor
        return self._slots[id(tensor)]

    def fill(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Return the source's state with a tensor of this rank in each slot."""
        parameters = _parameters_of(optimizer)
        own_leaves, own_spec = flatten(_state_of(optimizer))
        own = dict(zip(own_spec.paths(), own_leaves, strict=True))
        leaves, spec = flatten(state, _is_slot)  # `flatten` would open a slot, a dataclass
        for index, path in enumerate(spec.paths()):
            slot = leaves[index]
            if not _is_slot(slot):
                continue
            # Options, and state of no parameter, get the device of the first parameter
            parameter = parameters[0]
            part_of_state, number, *_ = path  # keys of `_state_of`
            if part_of_state == "state":
                parameter = parameters[number]
            leaves[index] = self._take(slot, own.get(path), parameter)
        return unflatten(spec, leaves)  # type: ignore[no-any-return]

    def _take(self, slot: _Slot, own: Any, parameter: Tensor) -> Tensor:
        """Return the tensor of this rank for a slot: `own`, from the same place, or a new one."""
        if slot.number not in self._tensors:
            # This rank may have one tensor in two places where the source has two tensors
            is_taken = any(own is each for each in self._tensors.values())
            if is_taken or not slot.fits(own):
                own = slot.new_tensor(parameter)
            self._tensors[slot.number] = own
        return self._tensors[slot.number]


def _replace_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Give an optimizer the options and the state of the source."""
    for group, options in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for name in group.keys() - options.keys() - {"params"}:
            del group[name]
        group.update(options)
    parameters = _parameters_of(optimizer)
    optimizer.state.clear()
    for number, of_parameter in state["state"].items():
        optimizer.state[parameters[number]] = of_parameter
    optimizer.state.update(state["other"])


# --- tensors on their way ---


def _broadcast(tensors: Sequence[Tensor], src: int) -> None:
    """Copy the values of the source's tensors into those of the other ranks.

    All ranks have tensors of the same shapes, dtypes, and kinds of device, in the same order.
    """
    backends = dist.get_backend_config(dist.group.WORLD)  # as in "cpu:gloo,cuda:nccl"
    devices = [each.partition(":")[0] for each in backends.split(",")]
    for bucket in _buckets(tensors):
        kind = bucket[0].device.type
        if kind not in devices:  # no backend sends from there
            kind = "cpu" if "cpu" in devices else devices[0]
        # NCCL needs the device of the rank, which is the current device of its kind
        parts = [_bytes_of(tensor).to(kind) for tensor in bucket]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        dist.broadcast(packed, src)
        if dist.get_rank() == src:
            continue
        values = packed.split([len(part) for part in parts])
        for tensor, part in zip(bucket, values, strict=True):
            value = part.view(tensor.dtype).view(tensor.shape)
            stored = _without_repeats(tensor, tensor)
            stored.copy_(_without_repeats(value, tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors of each collective: of one kind of device, the largest dtypes first.

    In this order, the bytes of a tensor start at a multiple of the size of its elements, as a view
    of its dtype requires.
    """
    filled = [tensor for tensor in tensors if tensor.numel() > 0]
    filled.sort(key=lambda tensor: (tensor.device.type, -tensor.element_size()))
    bucket: list[Tensor] = []
    size = 0
    for tensor in filled:
        if bucket:
            is_full = size + tensor.nbytes > _MOST_BYTES
            if is_full or bucket[0].device.type != tensor.device.type:
                yield bucket
                bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor: every backend can send these, whatever the dtype."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.contiguous().view(-1).view(torch.uint8)


def _without_repeats(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that an expanded tensor `like` of the same shape stores.

    An expanded tensor cannot be written as a whole: its elements share memory along dims of
    stride 0.
    """
    part = tensor.detach()
    for dim, (length, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if length > 1 and stride == 0:
            part = part.narrow(dim, 0, 1)
    return part

"""Writes of forward into the replicas.

A write is given back to the model, or the replica is restored with a warning, or the call is
refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from parawrap._private_names import (
    BUFFERS,
    CHILDREN,
    HOOK_TABLES,
    PARAMETERS,
    PRE_HOOKS,
    copy_all,
    pruned_name_of,
)
from parawrap.backends import record_use, warn_caller
from parawrap.engine.batched_copies import lasting
from parawrap.engine.model_state import Change
from parawrap.engine.places import SIMPLE, Place
from parawrap.engine.possible_writes import PossibleWrites, is_written_unseen
from parawrap.engine.replica import Replica
from parawrap.engine.survey import Survey
from parawrap.errors import ReplicaError
from parawrap.tree import ABSENT


class UnkeptWrites:
    """The names of entries that forward wrote and the model does not get. Each has one warning.

    Lanes add names, and the caller's thread warns: a warning in a lane would not point at the
    user's line. No lock is needed, since each operation on the two containers is one step. A name
    that a lane adds while a thread warns waits for the next warning. If two threads warn at the
    same time, each name goes to one of them.

    Attributes:
        waiting: The names without a warning yet, each by its part before the first key. A cache by
            shape gets another key at each call, and one warning is enough.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}
        self._warned: set[str] = set()

    def add(self, names: Sequence[str]) -> None:
        """Add names of entries, for the next warning."""
        for name in names:
            attribute = name.partition("[")[0]
            if attribute not in self._warned:
                self.waiting.setdefault(attribute, name)

    def take(self) -> list[str]:
        """Return the names that were added since the last warning, and count them as warned of."""
        names = []
        for attribute in [*self.waiting]:
            self._warned.add(attribute)  # first: from here on, no lane adds the name again
            name = self.waiting.pop(attribute, None)
            if name is not None:  # else another thread warns of it
                names.append(name)
        return names

    def warn(self) -> None:
        """Warn of the names that were added since the last warning. For the caller's thread."""
        if not self.waiting:  # of most calls and streams
            return
        names = self.take()
        if not names:  # another thread has taken them
            return
        warn_caller(
            f"the model wrote {', '.join(map(repr, names))} during a call. Each lane wrote its "
            "own, and these writes do not come back to the model: the next call starts without "
            "them. Return the value from the call instead. In training mode, buffers that forward "
            "writes in place come back, as from torch.nn.DataParallel. If the model prepares "
            "itself in its first call, call it once before the block"
        )


def settle_writes(
    possible_writes: PossibleWrites, used: Sequence[Replica], *, is_cut: bool
) -> list[str]:
    """Give back or refuse what forward wrote into the replicas of a call.

    Return the names of the entries that forward wrote and the model does not get. In training mode,
    the model gets the buffers that lane 0 of a cut call wrote in place. In evaluation mode, it gets
    nothing.

    This function does not restore the replicas. A written replica has the flag `is_dirty`, or
    buffers with other versions. So `ModelState.is_current` is False before the next cut call, and
    `Replicas.refresh` brings the replica to the model's state. Before a whole call,
    `Replicas.prepare` does so.

    Raises:
        ReplicaError: If lanes wrote different values into a buffer in evaluation mode, if a module
            in training wrote a buffer and an attribute, or if forward made a layer.
    """
    survey = possible_writes.survey
    names: dict[str, None] = {}  # a set that keeps the order
    written_attributes = _settle_entries(possible_writes, used, names)
    gives_back = is_cut and possible_writes.trains
    written = _find_written(used)
    for index in sorted(written):
        tensor = survey.tensors[index]
        is_buffer = survey.is_buffer(tensor)
        if gives_back and is_buffer:
            if written_attributes:
                _refuse_split_update(survey, tensor, written_attributes)
            continue
        name = survey.paths[id(tensor)]
        names[name] = None
        if is_cut and is_buffer:
            _refuse_different(name, [replica.tensors[index] for replica in used])
    # Last: a refused call leaves the model's buffers as they are
    if gives_back:
        _give_back(survey, written, used[0])
    return [*names]


def _settle_entries(
    possible_writes: PossibleWrites, used: Sequence[Replica], names: dict[str, None]
) -> dict[str, str]:
    """Refuse entries of containers that forward must not write, and add the others to `names`.

    Return the name of the last attribute that forward wrote in each module, by the module's path.
    """
    written_attributes: dict[str, str] = {}
    for replica in used:
        if not replica.is_dirty:  # its snapshot was the same after the call
            continue
        for change in replica.snapshot.list_changes():
            place, key = change.place, change.key
            if place.kind in HOOK_TABLES:
                # Such as the hooks of transformers for `output_hidden_states`. The replica loses
                # them when it is restored, and the model has no use for them
                continue
            name = place.name(key)
            _refuse_layers(change, name, replica)
            if place.kind == BUFFERS:
                if not possible_writes.trains:
                    _refuse_different(name, [each.snapshot.read(place).get(key) for each in used])
                names[name] = None
            elif _is_real_change(change.before, change.now) and not _is_computed(place, key):
                names[name] = None
                written_attributes[possible_writes.survey.module_path_of(place)] = name
    return written_attributes


def _refuse_layers(change: Change, name: str, replica: Replica) -> None:
    """Refuse layers and parameters that forward made or replaced."""
    parts = [change.now]
    if change.key is None:  # of a whole list, the new items
        ids_before = set(map(id, change.before))
        parts = [part for part in change.now if id(part) not in ids_before]
    for part in parts:
        is_layer = isinstance(part, (torch.nn.Module, torch.nn.Parameter))
        if is_layer and replica.original_of(part) is None:
            msg = (
                f"forward makes {name!r}, and each lane made its own, which learns nothing. Make "
                "it before the block, for instance by a call of the model"
            )
            raise ReplicaError(msg)
    if change.place.kind in (PARAMETERS, CHILDREN):
        msg = f"forward replaces {name!r}, and each lane replaced its own. Do so between calls"
        raise ReplicaError(msg)


def _find_written(used: Sequence[Replica]) -> set[int]:
    """Return the indices of the tensors of replicas that lanes wrote in place."""
    found: set[int] = set()
    for replica in used:
        ids = replica.find_written()
        if not ids:
            continue
        for index, tensor in enumerate(replica.tensors):
            if id(tensor) in ids:
                found.add(index)
    return found


def _refuse_split_update(survey: Survey, tensor: torch.Tensor, attributes: dict[str, str]) -> None:
    """Refuse a module that wrote a buffer, which the model gets, and an attribute, which it loses.

    `attributes` has the name of a written attribute by the path of its module.
    """
    for place in survey.places_of(tensor):
        # The path of a table is that of its module
        if place.kind == BUFFERS and place.path in attributes:
            msg = (
                f"forward writes the buffer {survey.paths[id(tensor)]!r} and "
                f"{attributes[place.path]!r} in one module. In training mode the buffer comes back "
                "to the model and the attribute does not, so they would part. Make the attribute a "
                'buffer: self.register_buffer("name", torch.tensor(value)), written in place'
            )
            raise ReplicaError(msg)


def _refuse_different(name: str, values: Sequence[Any]) -> None:
    """Refuse a buffer with other values in another lane, in evaluation mode. `values` has all."""
    first, *others = values
    if not all(_are_equal(first, other) for other in others):
        msg = (
            f"forward writes the buffer {name!r} in evaluation mode, and the lanes wrote different "
            "values. State per row belongs in the arguments and the output"
        )
        raise ReplicaError(msg)


def _are_equal(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return one is other
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    # Not `torch.equal`, for which NaN differs from NaN
    return torch.allclose(one, other.to(one.device), 0, 0, equal_nan=True)


def _give_back(survey: Survey, written: set[int], first: Replica) -> None:
    """Copy the buffers that lane 0 wrote into the model's, as `torch.nn.DataParallel` does.

    `written` has the indices of the tensors with other versions.
    """
    targets: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    with lasting():
        for index, tensor in enumerate(survey.tensors):
            has_other_version = index in written
            may_differ = has_other_version or survey.writes_data or is_written_unseen(tensor)
            if not may_differ or not survey.is_buffer(tensor):
                continue
            value = first.tensors[index]
            if value.device != tensor.device:  # the copy below reads it on the caller's stream
                record_use([value])
            values.append(value)
            # If forward left the version alone, the copy must too: `data` has its own version
            targets.append(tensor if has_other_version else tensor.data)
        if targets:
            copy_all(targets, values)


def _is_computed(place: Place, key: Any) -> bool:
    """True for an attribute that torch computes from parameters at each call.

    Hooks of the module compute it, or an RNN, for its flat weights.
    """
    module = place.owner
    if place.kind != "vars" or not isinstance(module, torch.nn.Module):
        return False
    if isinstance(module, torch.nn.RNNBase) and str(key).startswith("_flat_weight"):
        return True
    # A list, made in one step: another thread may register a hook
    for hook in [*dict.values(vars(module).get(PRE_HOOKS, {}))]:
        name = None
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            name = hook.name
        elif isinstance(hook, BasePruningMethod):
            name = pruned_name_of(hook)
        if name == key:
            return True
    return False


def _is_real_change(before: Any, now: Any) -> bool:
    """True unless a value was replaced by an equal one, or an empty container by an empty one."""
    if before is now:
        return False
    if type(before) is type(now) and type(now) in SIMPLE:
        return bool(before != now)
    if isinstance(now, (dict, list, set)) and not now:
        return not _is_empty(before)
    return True


def _is_empty(value: Any) -> bool:
    """True for ABSENT, None, zero, and an empty container."""
    if value is None or value is ABSENT:
        return True
    # By class first: a tensor or an array is neither true nor false
    return isinstance(value, (*SIMPLE, Mapping, Sequence, set, frozenset)) and not value


# Parameters, which all lanes share


def parameter_error(survey: Survey, tensor: torch.Tensor) -> ReplicaError:
    """Return the error for a parameter that was written during a call."""
    name = survey.path_of(tensor)
    if survey.scripts and not isinstance(tensor, torch.nn.Parameter):
        msg = (
            f"{name!r} of a scripted module was written during a call. Lanes share scripted "
            "modules, so each lane would write it once. Use the module before torch.jit.script, or "
            "call model.eval()"
        )
        return ReplicaError(msg)
    msg = (
        f"the parameter {name!r} was written during a call, by forward or by another thread. Lanes "
        "share parameters, so each lane would write it once. Compute with a new tensor, make it a "
        "buffer, or write it between calls"
    )
    return ReplicaError(msg)


def may_renormalize(survey: Survey, tensor: torch.Tensor) -> bool:
    """True for the weight of an embedding with ``max_norm``, whose lanes run in turns."""
    return any(
        getattr(place.owner, "max_norm", None) is not None for place in survey.places_of(tensor)
    )


def contents_of(tensor: torch.Tensor) -> Any:
    """Return the address, the flag ``requires_grad``, and the sum of a tensor, to compare them.

    They also show writes through ``.data``. None for a tensor without an address.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    # The widest dtype, so that a small change of one element still changes the sum
    dtype = None
    if tensor.is_floating_point():
        dtype = torch.float64
    elif tensor.is_complex():
        dtype = torch.complex128
    total = tensor.detach().sum(dtype=dtype).item()
    # As a text, because NaN differs from itself
    return tensor.data_ptr(), tensor.requires_grad, repr(total)

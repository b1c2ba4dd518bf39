"""Writes of forward into the replicas: given back, put back with a warning, or refused."""

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
from parawrap.engine.edition import Edition, is_written_unseen
from parawrap.engine.model_state import Change
from parawrap.engine.places import SIMPLE, Place
from parawrap.engine.replica import Replica
from parawrap.engine.survey import Survey
from parawrap.errors import ReplicaError
from parawrap.tree import ABSENT


class UnkeptWrites:
    """The names of what forward wrote and the model does not get, each for one warning.

    Lanes add names, and the caller's thread warns: a warning of a lane would not point at the
    user's line. Each operation on the two containers is one step, and both stay the same objects,
    so no lock is needed: a name that comes while another thread warns waits for the next warning,
    and of two threads that warn at the same time one gets each name.

    Attributes:
        waiting: The names without a warning yet.
    """

    def __init__(self) -> None:
        # By the name without its key: a cache by shape gets another key at each call
        self.waiting: dict[str, str] = {}
        self._warned: set[str] = set()

    def add(self, names: Sequence[str]) -> None:
        """Add names of entries."""
        for name in names:
            stem = name.partition("[")[0]
            if stem not in self._warned:
                self.waiting.setdefault(stem, name)

    def warn(self) -> None:
        """Warn of the names that were added since the last warning. For the caller's thread."""
        names = []
        for stem in [*self.waiting]:
            self._warned.add(stem)  # first: from here on, no lane adds the name again
            name = self.waiting.pop(stem, None)
            if name is not None:
                names.append(name)
        if not names:
            return
        warn_caller(
            f"the model wrote {', '.join(map(repr, names))} during a call. Each lane wrote its "
            "own, and these writes do not come back to the model: the next call starts without "
            "them. Return the value from the call instead. In training mode, buffers that forward "
            "writes in place come back, as from torch.nn.DataParallel. If the model prepares "
            "itself in its first call, call it once before the block"
        )


def settle_writes(edition: Edition, used: Sequence[Replica], *, is_cut: bool) -> list[str]:
    """Judge what forward wrote in these replicas; return the names that the model does not get.

    In evaluation mode nothing comes back to the model. In training mode, the buffers that lane 0 of
    a cut call wrote in place do.

    This function puts nothing back into the replicas. A written replica has the flag `is_dirty`, or
    buffers with other versions. So `ModelState.is_current` is False before the next cut call, and
    `Replicas.refresh` brings the replica to the model's state. Before a whole call,
    `Replicas.prepare` does so.

    Raises:
        ReplicaError: If lanes wrote different values into a buffer in evaluation mode, if a module
            in training wrote a buffer and an attribute, or if forward made a layer.
    """
    survey = edition.survey
    names: dict[str, None] = {}  # a set that keeps the order
    written_attributes = _settle_entries(edition, used, names)
    written = _find_written(used)
    gives_back = is_cut and edition.trains
    for index in sorted(written):
        tensor = survey.tensors[index]
        name = survey.paths[id(tensor)]
        is_buffer = survey.is_buffer(tensor)
        if gives_back and is_buffer:
            if written_attributes:
                _refuse_split_update(survey, tensor, written_attributes)
            continue
        names[name] = None
        if is_cut and is_buffer:
            _refuse_different(name, [replica.tensors[index] for replica in used])
    # Last: a refused call leaves the model's buffers as they are
    if gives_back:
        _give_back(survey, written, used[0])
    return [*names]


def _settle_entries(
    edition: Edition, used: Sequence[Replica], names: dict[str, None]
) -> dict[str, str]:
    """Judge entries of containers that forward replaced; add those that the model does not get.

    Return the name of the last attribute that was written in each module, by the module's path.
    """
    written_attributes: dict[str, str] = {}
    for replica in used:
        if not replica.is_dirty:  # a look after the call has found nothing
            continue
        for change in replica.snapshot.list_changes():
            place, key = change.place, change.key
            if place.kind in HOOK_TABLES:
                # Such as those of transformers for `output_hidden_states`. They are put back, and
                # the model loses nothing
                continue
            name = place.name(key)
            _refuse_layers(change, name, replica)
            if place.kind == BUFFERS:
                if not edition.trains:
                    _refuse_different(name, [each.snapshot.read(place).get(key) for each in used])
                names[name] = None
            elif _is_real_change(change.before, change.now) and not _is_computed(place, key):
                names[name] = None
                written_attributes[place.module_path] = name
    return written_attributes


def _refuse_layers(change: Change, name: str, replica: Replica) -> None:
    """Refuse layers and parameters that forward made or replaced."""
    known: set[int] = set()
    parts = [change.now]
    if change.key is None:  # a whole list, and some of its items may have been in it before
        known = set(map(id, change.before))
        parts = change.now
    for part in parts:
        is_layer = isinstance(part, (torch.nn.Module, torch.nn.Parameter))
        if is_layer and id(part) not in known and replica.original_of(part) is None:
            msg = (
                f"forward makes {name!r}, and each lane made its own, which learns nothing. Make "
                "it before the block, for instance by a call of the model"
            )
            raise ReplicaError(msg)
    if change.place.kind in (PARAMETERS, CHILDREN):
        msg = f"forward replaces {name!r}, and each lane replaced its own. Do so between calls"
        raise ReplicaError(msg)


def _find_written(used: Sequence[Replica]) -> set[int]:
    """Return the indices of the tensors that lanes wrote in place."""
    found: set[int] = set()
    for replica in used:
        ids = replica.find_written()
        if not ids:  # the usual case: no look at each tensor
            continue
        for index, tensor in enumerate(replica.tensors):
            if id(tensor) in ids:
                found.add(index)
    return found


def _refuse_split_update(survey: Survey, tensor: torch.Tensor, attributes: dict[str, str]) -> None:
    """Refuse a module that wrote a buffer, which comes back, and an attribute, which does not."""
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
    """Refuse a buffer that lanes wrote differently in evaluation mode."""
    if not all(_are_equal(values[0], other) for other in values[1:]):
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
    # `torch.equal` takes two that are not a number for different values
    return torch.allclose(one, other.to(one.device), 0, 0, equal_nan=True)


def _give_back(survey: Survey, written: set[int], first: Replica) -> None:
    """Copy the buffers that lane 0 wrote to the model, as `torch.nn.DataParallel` does."""
    targets: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    with lasting():
        for index, tensor in enumerate(survey.tensors):
            is_seen = index in written
            may_differ = is_seen or survey.writes_data or is_written_unseen(tensor)
            if not may_differ or not survey.is_buffer(tensor):
                continue
            value = first.tensors[index]
            if value.device != tensor.device:  # the copy below reads it on the caller's stream
                record_use([value])
            values.append(value)
            # A write through `data` gives no new version, as the write in C++ gave none
            targets.append(tensor if is_seen else tensor.data)
        if targets:
            copy_all(targets, values)


def _is_computed(place: Place, key: Any) -> bool:
    """True for an attribute that torch computes from parameters at each call.

    Hooks of the module do so, and RNNs for their flat weights.
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
    """True for None, an entry that does not exist, zero, and an empty container."""
    if value is None or value is ABSENT:
        return True
    # Not tensors and arrays, which are neither true nor false
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
    """Return the memory, the flag ``requires_grad``, and a sum of a tensor.

    They also show writes through ``.data``. None for a tensor without such memory.
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
    # As a text, because a sum that is not a number differs from itself
    return tensor.data_ptr(), tensor.requires_grad, repr(total)

"""One replica: the copy of the target that a lane runs, its tensors, and what it owns.

The memo of `copy_target` maps the id of each part of the target to the object that the lane uses in
its place. The replica owns the objects that the copy made: it may write and empty them. Objects
that deepcopy got from a registry or a cache belong to the process, and the replica leaves them
alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch

from parawrap._private_names import copy_all, version_of
from parawrap.engine.batched_copies import lasting
from parawrap.engine.copy_checks import Key, PlainPart, set_plain_values
from parawrap.engine.copy_target import copy_target, find_parts_of_process
from parawrap.engine.model_state import Snapshot
from parawrap.engine.parameter_copies import VersionedCopies
from parawrap.engine.survey import Survey, storage_of, vars_of

_form_of = attrgetter("shape", "dtype", "device")

Writers = list[list[Callable[[torch.Tensor], None]]]
"""For each of several tensors, the functions that put another tensor into its places."""


class Replica:
    """The copy of the target that one lane runs. One thread at a time uses it.

    `params` are the parameters that the lane uses: the model's own, or copies that the lanes of a
    device share. The replica borrows them, and owns `tensors`. `known` has copies of further parts,
    by the id of the original.

    Attributes:
        target: The copy of the whole target.
        params: The lane's parameters, in the order of the survey's.
        tensors: The lane's own copies of the survey's other tensors, in the same order.
        versioned: The lane's own tensors that have versions: all but inference tensors.
        copies_of_scripts: The copies of tensors of TorchScript modules on the lane's device.
        snapshot: What the containers of the copy must hold before a call.
        is_dirty: True if a call may have left something that the next call must not find.
        has_graph: True if a graph may lead here: checkpointing calls the modules again in a
            backward pass.
        is_in_output: True if an output may call a layer of the copy later.
        are_tensors_held: True if a graph, an output, or code of the user's may hold one of the
            lane's own tensors. A call that may lead to this sets it; new tensors reset it.
        writes_unseen: True if forward may write the lane's own tensors, and leave their versions
            alone.
    """

    def __init__(
        self,
        survey: Survey,
        device: torch.device,
        params: Sequence[torch.Tensor],
        tensors: list[torch.Tensor],
        known: Mapping[int, Any],
    ) -> None:
        self.survey = survey
        self.device = device
        self.is_dirty = self.has_graph = self.is_in_output = False
        self.are_tensors_held = self.writes_unseen = False
        self.params = [*params]
        self.tensors = tensors
        # The keys are ids. The survey keeps the originals alive, so no other object gets their ids
        self._memo: dict[int, Any] = {id(each): each for each in survey.shared}
        self._memo.update(known)
        originals = [*survey.params, *survey.tensors]
        copies = [*params, *tensors]
        self._memo.update(zip(map(id, originals), copies, strict=True))
        # The first call may be in inference mode. A tensor that a `__deepcopy__` makes there could
        # never require gradients
        with lasting(grad=torch.is_grad_enabled()):
            self.copies_of_scripts = VersionedCopies(copy_target(survey, self._memo, device))
            self._of_process = find_parts_of_process(survey, self._memo)
        self.target: Any = self.of(survey.target)
        self.snapshot = Snapshot(survey.places, self._own_copy)
        self.note_versions()

    def of(self, value: Any) -> Any:
        """Return the copy of a part of the target, or the part itself if all lanes use it."""
        return self._memo.get(id(value), value)

    def copy_other(self, survey: Survey) -> Any:
        """Return a copy of another target for this lane, with the lane's parts of the model."""
        others = [tensor for tensor in survey.tensors if id(tensor) not in self._memo]
        copies = dict(self._memo)
        copies.update(zip(map(id, others), clone_all(others), strict=True))
        tensors = [copies[id(tensor)] for tensor in survey.tensors]
        params = [*map(self.of, survey.params)]
        # The other replica is dropped at once: no call looks for writes of the copy
        return Replica(survey, self.device, params, tensors, copies).target

    def set_plain_values(self, parts: Sequence[PlainPart]) -> Key | None:
        """Set numbers, flags, and texts to those of the model.

        Return the key of the first place that holds another object; None if there is no such place.
        """
        return set_plain_values(self.snapshot, parts, self._memo.get)

    # The lane's own tensors

    def note_versions(self) -> None:
        """Note the versions of the lane's own tensors."""
        self.versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = [*map(version_of, self.versioned)]
        # Computed at the first use, since most calls need none of these
        self._forms: list[Any] | None = None  # shapes, dtypes, and devices of the lane's tensors
        self._memory: set[int] | None = None  # addresses of their memory
        self._origins: dict[int, Any] | None = None  # by the id of a copy, its original

    def write_tensors(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Write the values of the model's tensors into the lane's own.

        Return False if a tensor has another shape, dtype, or device, after ``buffer.data = ...``.
        The caller ensures that nothing but the replica holds the lane's own tensors.
        """
        if self._forms is None:
            self._forms = [*map(_form_of, self.tensors)]
        if [*map(_form_of, tensors)] != self._forms:
            return False
        if self.tensors:
            with lasting():
                copy_all(self.tensors, [*tensors])
        self._versions = [*map(version_of, self.versioned)]
        return True

    def is_written(self) -> bool:
        """True if a call wrote one of the lane's own tensors in place."""
        return [*map(version_of, self.versioned)] != self._versions

    def find_written(self) -> set[int]:
        """Return the ids of the lane's own tensors that a call wrote in place."""
        pairs = zip(self.versioned, self._versions, strict=True)
        return {id(tensor) for tensor, before in pairs if version_of(tensor) != before}

    def shares_memory(self, tensor: torch.Tensor) -> bool:
        """True if a tensor is one of the lane's own, or a view of one."""
        if self._memory is None:
            self._memory = set(map(storage_of, self.tensors)) - {0}
        return bool(self._memory) and storage_of(tensor) in self._memory

    def is_buffer_of_model(self, tensor: torch.Tensor) -> bool:
        """True for a tensor of the model itself that is not a parameter, such as a buffer."""
        return any(map(is_, self.survey.tensors, repeat(tensor)))

    def replace_params(self, new: Sequence[torch.Tensor]) -> bool:
        """Use new parameters. Return False if a place cannot be written, such as one in a tuple."""
        return self._replace(self.survey.params, self.params, self._writers_of_params, new)

    def replace_tensors(self, new: Sequence[torch.Tensor]) -> bool:
        """Use new tensors as the lane's own. Return False if a place cannot be written."""
        return self._replace(self.survey.tensors, self.tensors, self._writers_of_tensors, new)

    def _replace(
        self,
        originals: Sequence[torch.Tensor],
        replaced: list[torch.Tensor],
        writers: Writers | None,
        new: Sequence[torch.Tensor],
    ) -> bool:
        if writers is None:
            return False
        for tensor, writers_of_tensor in zip(new, writers, strict=True):
            for write in writers_of_tensor:
                write(tensor)
        self._memo.update(zip(map(id, originals), new, strict=True))
        replaced[:] = new
        self._origins = None  # `original_of` makes it again
        self.snapshot.note()  # from here on, the new tensors are expected
        return True

    # The places of tensors are found once, as the survey does not change

    @cached_property
    def _writers_of_params(self) -> Writers | None:
        return self._find_writers(self.survey.params)

    @cached_property
    def _writers_of_tensors(self) -> Writers | None:
        return self._find_writers(self.survey.tensors)

    def _find_writers(self, originals: Sequence[torch.Tensor]) -> Writers | None:
        """Return, for each tensor, the functions that put a new tensor in its places in the copy.

        None if a place cannot be written, such as one in a tuple.
        """
        found: Writers = []
        for original in originals:
            writers: list[Callable[[torch.Tensor], None]] = []
            for holder in self.survey.holders.get(id(original), ()):
                if holder is None:
                    return None
                writers += self.snapshot.writers_of(holder.place, holder.key)
            found.append(writers)
        return found

    # What the replica owns

    def original_of(self, value: Any) -> Any:
        """Return the model's own object that a part of this replica is a copy of.

        None for any other object, and for a tensor with other values, which forward has written.
        """
        if self._origins is None:
            self._origins = {}
            for key, copied in self._memo.items():
                original = self.survey.objects.get(key)
                if original is not None and key not in self._of_process:
                    self._origins[id(copied)] = original
        found = self._origins.get(id(value))
        if found is None or id(value) in self.find_written():
            return None
        # Some writes leave the version alone, and only the values show them
        may_differ = self.writes_unseen and isinstance(value, torch.Tensor)
        if may_differ and self._has_other_values(value, found):
            return None
        return found

    def _has_other_values(self, tensor: torch.Tensor, original: torch.Tensor) -> bool:
        """True for one of the lane's own tensors with other values than the model's."""
        is_own = any(map(is_, self.tensors, repeat(tensor)))
        if not is_own or tensor.layout is not torch.strided:
            return False
        if tensor.shape != original.shape or tensor.dtype != original.dtype:
            return True
        return not torch.allclose(tensor, original.to(tensor.device), 0, 0, equal_nan=True)

    def owns(self, value: Any) -> bool:
        """True for an object that the copy made."""
        original = self.original_of(value)
        return original is not None and original is not value

    def _own_copy(self, value: Any) -> Any:
        """Return the copy of a part of the target that this replica owns; None if it owns none."""
        copied = self.of(value)
        return None if copied is value or id(value) in self._of_process else copied

    def restore(self) -> None:
        """Put back what the containers held before calls wrote into them."""
        self.snapshot.restore()
        self.is_dirty = False  # last: after Ctrl-C above, the next call restores again

    def clear(self) -> None:
        """Let go of everything that the replica holds, also of cycles among its own objects."""
        self.snapshot.clear()
        # A frame of a traceback, or a callback, may hold this object for long
        vars(self).clear()


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on their device, with the attributes of the tensors.

    Copies of tensors that share memory share memory too.
    """
    memory = [*filter(None, map(storage_of, tensors))]
    has_aliases = len(set(memory)) < len(memory)
    with lasting():
        found = [tensor.detach() for tensor in tensors]
        # deepcopy copies each memory once, but is slower
        found = copy.deepcopy(found) if has_aliases else [tensor.clone() for tensor in found]
    for tensor, copied in zip(tensors, found, strict=True):
        vars(copied).update(vars_of(tensor) or {})
    return found

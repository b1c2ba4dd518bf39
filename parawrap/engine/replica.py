"""One replica: the copy of the target that a lane runs, its tensors, and what it owns.

The memo of `copy_target` has what the lane uses in the place of each part. What the copy made, the
replica owns: it may write and empty that. What deepcopy got from elsewhere, such as a registry or a
cache, belongs to the process, and the replica leaves it alone.
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

Writers = list[list[Callable[[Any], None]]]
"""For each of some tensors, the functions that put another one into its places."""


class Replica:
    """The copy of the target that one lane runs.

    `known` has further copies, by the id of the original.

    Attributes:
        target: The copy of the whole target.
        params: What the lane has in place of the survey's parameters, in the same order.
        tensors: The lane's own copies of the survey's other tensors, in the same order.
        versioned: Those that have versions: all but inference tensors.
        copies_of_scripts: The copies of tensors of TorchScript modules on the lane's device.
        snapshot: What the containers of the copy must hold before a call.
        is_dirty: True if a call may have left something that the next call must not find.
        has_graph: True if a graph may lead here: checkpointing calls the modules again in a
            backward pass.
        is_lent: True if an output may call a layer of the copy later.
        are_tensors_held: True if a graph, an output, or code of the user's may hold one of the
            lane's own tensors. Each run of the copy sets it that does not exclude all three; new
            tensors reset it.
        writes_unseen: True if forward may write the lane's own tensors without a new version.
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
        self.is_dirty = self.has_graph = self.is_lent = False
        self.are_tensors_held = self.writes_unseen = False
        self.params = [*params]
        self.tensors = tensors
        # The memo has ids, and the survey keeps the originals alive: no later object gets one
        self._memo: dict[int, Any] = {id(each): each for each in survey.shared}
        self._memo.update(known)
        originals = [*survey.params, *survey.tensors]
        copies = [*params, *tensors]
        self._memo.update(zip(map(id, originals), copies, strict=True))
        # The first call may be in inference mode, and what a copy makes there could never learn
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
        """Return a copy of another target for this lane.

        Parts of the model in it are the lane's.
        """
        own = [tensor for tensor in survey.tensors if id(tensor) not in self._memo]
        copies = dict(self._memo)
        copies.update(zip(map(id, own), clone_all(own), strict=True))
        tensors = [copies[id(tensor)] for tensor in survey.tensors]
        params = [*map(self.of, survey.params)]
        # The copy outlives its replica, which nothing else needs: it has no calls that write
        return Replica(survey, self.device, params, tensors, copies).target

    def set_plain_values(self, parts: Sequence[PlainPart]) -> Key | None:
        """Set numbers, flags, and texts to those of the model.

        Return the key of a place that holds something else; None if there is none.
        """
        return set_plain_values(self.snapshot, parts, self._memo.get)

    # The lane's own tensors

    def note_versions(self) -> None:
        """Note the versions of the lane's own tensors."""
        self.versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self._versions = [*map(version_of, self.versioned)]
        # Most calls need none of these, so they are read from the tensors at the first use: their
        # shapes, dtypes, and devices; the addresses of their memory; and the originals by the id of
        # the copy
        self._forms: list[Any] | None = None
        self._memory: set[int] | None = None
        self._origins: dict[int, Any] | None = None

    def write_tensors(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Write the values of the survey's tensors into the lane's own. False if they do not fit.

        The caller ensures that nothing else holds the lane's own.
        """
        if self._forms is None:
            self._forms = [*map(_form_of, self.tensors)]
        if [*map(_form_of, tensors)] != self._forms:
            return False  # the model has other data: ``buffer.data = ...``
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
        """True for a buffer, or another tensor that does not learn, of the model itself."""
        return any(map(is_, self.survey.tensors, repeat(tensor)))

    def replace_params(self, new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of the parameters. False if a place cannot change."""
        return self._replace(self.survey.params, self.params, self._writers_of_params, new)

    def replace_tensors(self, new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of the lane's own. False if a place cannot change."""
        return self._replace(self.survey.tensors, self.tensors, self._writers_of_tensors, new)

    def _replace(
        self,
        originals: Sequence[torch.Tensor],
        mine: list[torch.Tensor],
        writers: Writers | None,
        new: Sequence[torch.Tensor],
    ) -> bool:
        if writers is None:
            return False
        for tensor, write_each in zip(new, writers, strict=True):
            for write in write_each:
                write(tensor)
        self._memo.update(zip(map(id, originals), new, strict=True))
        mine[:] = new
        self._origins = None
        self.snapshot.note()
        return True

    # The places are looked up once: the survey has the same for as long as it lives

    @cached_property
    def _writers_of_params(self) -> Writers | None:
        return self._find_writers(self.survey.params)

    @cached_property
    def _writers_of_tensors(self) -> Writers | None:
        return self._find_writers(self.survey.tensors)

    def _find_writers(self, originals: Sequence[torch.Tensor]) -> Writers | None:
        """Return, for each tensor, the functions that write its entries in the copy.

        None if a place cannot change, such as one in a tuple.
        """
        found: Writers = []
        for original in originals:
            writers: list[Callable[[Any], None]] = []
            for holder in self.survey.holders.get(id(original), ()):
                if holder is None:
                    return None
                writers += self.snapshot.writers_of(holder.place, holder.key)
            found.append(writers)
        return found

    # What the replica owns

    def original_of(self, value: Any) -> Any:
        """Return the model's own object that a part of this replica is a copy of, or None.

        A tensor that the lane has written is not the model's.
        """
        if self._origins is None:
            self._origins = {}
            for key, copied in self._memo.items():
                original = self.survey.owned.get(key)
                if original is not None and key not in self._of_process:
                    self._origins[id(copied)] = original
        found = self._origins.get(id(value))
        if found is None or id(value) in self.find_written():
            return None
        # A write without a new version shows in the values alone
        may_differ = self.writes_unseen and isinstance(value, torch.Tensor)
        if may_differ and self._has_other_values(value, found):
            return None
        return found

    def _has_other_values(self, tensor: torch.Tensor, original: torch.Tensor) -> bool:
        """True for one of the lane's own tensors with other values than the model's."""
        is_own = any(tensor is each for each in self.tensors)
        if not is_own or tensor.layout is not torch.strided:
            return False
        same_form = tensor.shape == original.shape and tensor.dtype == original.dtype
        here = original.to(tensor.device)
        return not (same_form and torch.allclose(tensor, here, 0, 0, equal_nan=True))

    def owns(self, value: Any) -> bool:
        """True for an object that the copy made."""
        original = self.original_of(value)
        return original is not None and original is not value

    def _own_copy(self, value: Any) -> Any:
        """Return the copy of a part of the target that this replica owns; None if it owns none."""
        copied = self._memo.get(id(value), value)
        return None if copied is value or id(value) in self._of_process else copied

    def restore(self) -> None:
        """Put back the containers as they were."""
        self.snapshot.restore()
        self.is_dirty = False

    def clear(self) -> None:
        """Let go of everything: no cycle and no reference to this replica keeps tensors alive."""
        self.snapshot.clear()
        # A frame of a traceback, or a callback, may hold this object for long
        vars(self).clear()


def clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return lasting copies of tensors on their device.

    Those that share memory are copied together.
    """
    memory = [*filter(None, map(storage_of, tensors))]
    with lasting():
        if len(set(memory)) == len(memory):
            found = [tensor.detach().clone() for tensor in tensors]
        else:
            found = copy.deepcopy([tensor.detach() for tensor in tensors])
    for tensor, each in zip(tensors, found, strict=True):
        if own := vars_of(tensor):
            vars(each).update(own)
    return found

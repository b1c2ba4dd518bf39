"""The replicas of a target, one per lane, and what brings them up to date with it.

A replica (`replica.py`) is `copy.deepcopy` of the target with a seeded memo. Lanes on the model's
device hold the model's own parameters, so gradients, optimizer steps, and ``p.data = ...`` need no
care there. Lanes on another device hold copies.

object            | holds                                  | made again
----------------- | -------------------------------------- | ---------------------------------------
`Survey`          | what the target leads to               | when the structure changed
`PossibleWrites`  | what forward may write                 | when a training flag changed
`ModelState`      | the state of the model at the last     | by each refresh
                  | refresh                                |
`ParameterCopies` | copies that the lanes of a device      | when parameters changed; with
                  | share                                  | gradients, by each call
`Replica`         | the containers and the buffers of one  | when the structure changed; its buffers
                  | lane                                   | when one was written

`ModelState.is_current` compares the model with its state before each call. If they differ, a
refresh brings the replicas up to date. It does as little as is enough:

word    | meaning
------- | ------------------------------------------------------------------------------------------
update  | set numbers, flags, and texts in the replicas; give them new copies of parameters
renew   | give a lane new copies of the model's tensors besides parameters
build   | make all replicas again
restore | put back attributes that forward has written into a replica
doubt   | a reason to refresh that no comparison shows, such as the user's `p.refresh()`

After a call, the writes of forward are read from each replica, once:

read from                       | shows                          | then
------------------------------- | ------------------------------ | --------------------------------
the snapshot of the replica     | attributes that forward wrote  | restored, with a warning
versions of the lane's buffers  | buffers that forward wrote     | given back in training; renewed
versions of parameters, and of  | weights that forward wrote     | refused: lanes share them
copies                          |                                |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from parawrap._private_names import copy_all, version_of
from parawrap.backends import record_use
from parawrap.engine.batched_copies import bytes_of_all, copies_on
from parawrap.engine.copy_checks import Key, read_plain_parts, was_disturbed
from parawrap.engine.forward_writes import (
    UnkeptWrites,
    contents_of,
    may_renormalize,
    parameter_error,
    settle_writes,
)
from parawrap.engine.model_state import (
    NEVER_CURRENT,
    NO_CHANGES,
    Doubts,
    ModelChanges,
    ModelState,
    Snapshot,
    read_versions,
)
from parawrap.engine.parameter_copies import NO_COPIES, ParameterCopies
from parawrap.engine.places import MOST_COPIES, SIMPLE
from parawrap.engine.possible_writes import PossibleWrites
from parawrap.engine.refused_models import (
    refuse_cuda_graphs,
    refuse_devices,
    refuse_shared_modules,
)
from parawrap.engine.replica import Replica, clone_all
from parawrap.engine.survey import Survey, home_of_survey, home_of_target

ReplicasState = ModelState[Replica]
"""The state of the model that the replicas have."""

CopiesOfParts = Callable[[Survey], Sequence[dict[int, Any]]]
"""Returns, for each lane, its copies of some parts of the target, by the id of the part."""

# A survey reads these attributes: with `max_norm`, forward writes the weight of an embedding, so
# lanes take turns
_READ_BY_SURVEY = frozenset({"max_norm"})

_is_dirty = attrgetter("is_dirty")

# Of a target that is not read yet: before the first refresh, and after a failed one
_NO_WRITES = PossibleWrites(Survey(None))
_NO_SNAPSHOT = Snapshot((), lambda _: None)


class CopyOptions(NamedTuple):
    """How replicas of a target are made.

    Attributes:
        methods: The methods that calls enter, besides forward.
        detach: True if no gradients flow from the replicas to the target.
        shares_hooks: True if all lanes use the model's own hooks, as in torch.nn.DataParallel.
            Otherwise, each lane has copies of the hooks that capture parts of the model.
        copies_of_parts: Makes each lane's own copies of parts that replicas would share, such as
            compiled models. None if there are no such parts.
    """

    methods: Sequence[str] = ()
    detach: bool = False
    shares_hooks: bool = False
    copies_of_parts: CopiesOfParts | None = None


class Replicas:
    """The replicas of one target.

    The caller ensures that no lane runs during `refresh`, `settle_call`, and `forget`.

    Attributes:
        state: The state of the model that the replicas have. A refresh stores another one when it
            is complete.
        doubts: Reasons to refresh that no comparison shows.
        unkept: Names of what forward wrote and the model does not get.
        refreshes: How often parameters were copied to other devices.
        copied_bytes: The number of bytes that were copied there.
    """

    def __init__(
        self, target: Any, devices: Sequence[torch.device], options: CopyOptions | None = None
    ) -> None:
        self.target = target
        self.devices = tuple(devices)
        self.doubts = Doubts()
        self.unkept = UnkeptWrites()
        self.refreshes = self.copied_bytes = 0
        self._options = CopyOptions() if options is None else options
        # Protects `copied_bytes`: several lanes may renew their tensors at the same time
        self._lock = threading.Lock()
        # Places where a copy differs from the model by a rule of its class
        self._never_alike: set[Key] = set()
        self.state = self._make_unread_state(0)

    def is_at_home(self, device: torch.device) -> bool:
        """True if the model lies on that device now, or has no tensors."""
        return home_of_target(self.target) in (None, device)

    def mark_dirty(self, lane: int) -> None:
        """Note that a call of a lane ended early, and may have left writes in the replica."""
        replicas = self.state.replicas
        if lane < len(replicas):  # without replicas, the call has failed before it ran forward
            replicas[lane].is_dirty = True

    def doubt_buffers(self) -> None:
        """Let the next refresh renew the lanes' own tensors.

        A plain call in training mode may have written the model's, and left their versions alone.
        """
        self.doubts.buffers = object()

    def doubt_everything(self) -> None:
        """Let the next refresh build all replicas. The public `refresh` of a block calls this."""
        self.doubts.everything = object()

    def refresh(self) -> None:
        """Bring the replicas up to date with the model.

        If that fails, the next refresh builds all replicas.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        before = self.state
        # This state stays if an error, or Ctrl-C between any two lines below, ends the refresh:
        # only some of the replicas may be up to date
        self.state = self._make_unread_state(before.generation)
        for replica in before.replicas:
            if replica.is_dirty:
                replica.restore()
        # Before the model is read: a doubt that comes from here on counts for the next call
        known_doubts = copy(self.doubts)
        must_drop = self._follow_streams(before)
        changes = self._find_changes(before)
        if must_drop or before.must_rebuild() or changes is None:
            state = self._build(before, known_doubts, before.generation + 1)
        else:
            state = self._update(before, known_doubts, changes)
        # Lanes get their copies of tensors one after another. If another thread has written a
        # tensor in between, all lanes get copies again
        for _ in range(MOST_COPIES):
            is_stale = state.has_written_tensors() or state.sources.have_changed()
            if not state.replicas or not is_stale:
                break
            state = self._update(state, known_doubts, NO_CHANGES)
        self.state = state

    def forget(self) -> None:
        """Drop the replicas, and all facts about the target."""
        before = self.state
        # First: after Ctrl-C in between, no call uses a replica without its entries
        self.state = self._make_unread_state(before.generation + 1)
        self._drop(before)

    # Build and update

    def _make_unread_state(self, generation: int) -> ReplicasState:
        """Return the state of a target that is not read yet. It has no replicas."""
        return ModelState(
            _NO_WRITES, _NO_SNAPSHOT, self.doubts, NEVER_CURRENT, generation=generation
        )

    def _next_generation(self, before: ReplicasState, changes: ModelChanges) -> int:
        """Return another generation if the model has changed since the state `before`.

        A refresh also renews buffers that forward may have written unseen. That alone does not
        change the model, so it does not end streams.
        """
        if changes.entries or before.sources.have_changed() or before.has_written_tensors():
            return before.generation + 1
        return before.generation

    def _build(self, before: ReplicasState, known_doubts: Doubts, generation: int) -> ReplicasState:
        """Make all replicas for the present structure of the target.

        The old replicas are dropped first: parameters remember the shapes of the graphs that lead
        to them.
        """
        self._drop(before)
        options = self._options
        # Another thread may change the model while the walk and `copy.deepcopy` read its dicts.
        # Then they raise, or lanes get copies of different moments. Each turn copies once more
        for copies in range(1, MOST_COPIES + 1):
            snapshot = None
            try:
                survey = Survey(self.target, options.methods, shares_hooks=options.shares_hooks)
                snapshot = Snapshot(survey.places, lambda owner: owner, is_model=True)
                # After the snapshot, which shows if a training flag changes from here on
                possible_writes = PossibleWrites(survey)
                if survey.is_lazy:
                    # A parameter gets its shape in a call, which runs plainly. The next call
                    # refreshes again
                    return ModelState(
                        possible_writes,
                        snapshot,
                        self.doubts,
                        NEVER_CURRENT,
                        generation=generation,
                    )
                state = self._copy_model(
                    possible_writes, snapshot, before, known_doubts, generation
                )
            except Exception as error:
                if not was_disturbed(error, snapshot, copies):
                    raise
                continue
            if self._accept_plain_changes(state):
                differences = self._set_plain_values(state)
                if not differences:
                    return state
                if _is_alone():
                    # No other thread has changed the model: its copies differ by rules of classes
                    self._never_alike |= differences
                    return state
            self._drop(state)
        # Another thread changes the model all the time. Without replicas, calls run plainly
        return self._make_unread_state(generation)

    def _accept_plain_changes(self, state: ReplicasState) -> bool:
        """Accept changes of numbers, flags, and texts since the snapshot of the model.

        Return False if the model has changed otherwise. The replicas do not get the new values
        here: `_set_plain_values` compares all values.
        """
        changes = self._find_changes(state)
        if changes is None or _changes_training(changes):
            return False
        if changes.entries:
            state.snapshot.accept(changes)
        return True

    def _set_plain_values(self, state: ReplicasState) -> set[Key]:
        """Set the numbers, flags, and texts of all replicas to those of the model.

        Return the first place of each replica that still holds another object than it should.
        """
        parts = read_plain_parts(state.snapshot, self._never_alike)
        found = {replica.set_plain_values(parts) for replica in state.replicas}
        return {key for key in found if key is not None}

    def _copy_model(
        self,
        possible_writes: PossibleWrites,
        snapshot: Snapshot,
        before: ReplicasState,
        known_doubts: Doubts,
        generation: int,
    ) -> ReplicasState:
        """Make all replicas of the surveyed model."""
        survey = possible_writes.survey
        versions = read_versions(survey)  # before the copies, as in `_update`
        home = home_of_survey(survey)
        refuse_devices(survey, home)
        refuse_cuda_graphs(survey, self.devices)
        away = self._find_away(survey, home, before, known_doubts)
        known: Sequence[Mapping[int, Any]] = [{}] * len(self.devices)
        if self._options.copies_of_parts is not None:
            known = self._options.copies_of_parts(survey)
        replicas: list[Replica] = []
        for device, known_parts in zip(self.devices, known, strict=True):
            params = self._params_on(device, survey, away)
            tensors = self._copy_tensors(device, survey, home)
            replicas.append(Replica(survey, device, params, tensors, known_parts))
        refuse_shared_modules(survey, replicas)
        return self._note_state(
            possible_writes, snapshot, known_doubts, replicas, away, versions, generation
        )

    def _find_away(
        self,
        survey: Survey,
        home: torch.device | None,
        before: ReplicasState,
        known_doubts: Doubts,
    ) -> ParameterCopies:
        """Return copies of the parameters on other devices.

        The former copies are kept if they are up to date, and no doubt has come since.
        """
        if home is None:
            return NO_COPIES
        devices = frozenset(self.devices) - {home}
        at_home = [tensor for tensor in survey.params if tensor.device == home]
        away = before.away
        has_copies = bool(away.by_device) and away.devices == devices
        has_same_length = len(at_home) == len(away.originals)
        if has_copies and has_same_length and all(map(is_, at_home, away.originals)):
            is_in_doubt = known_doubts.everything is not before.known_doubts.everything
            if not is_in_doubt and before.has_same_sources():
                return away
        return self._copy_parameters(devices, at_home)

    def _update(
        self, before: ReplicasState, known_doubts: Doubts, changes: ModelChanges
    ) -> ReplicasState:
        """Bring the replicas up to date, and return the new state.

        Build all replicas if a place in one of them cannot be written.
        """
        survey, possible_writes, away = before.survey, before.possible_writes, before.away
        # First: what other threads write into the model from here on shows at the next call
        versions = read_versions(survey)
        must_renew = before.must_renew_tensors()
        if changes.entries:
            self._set_changed_values(before, changes)
            if _changes_training(changes):
                possible_writes = PossibleWrites(survey)
                must_renew = True  # training may have written statistics without a new version
        is_complete = True  # False once a place of a replica cannot be written
        if not before.has_same_sources():
            away = self._copy_parameters(away.devices, away.originals)
            # TorchScript modules on other devices have their own parameters, which are not replaced
            is_complete = not survey.scripts
        is_complete = is_complete and self._give_parameters(before, away)
        if is_complete and must_renew:
            is_complete = all(self._renew_tensors_of(each, before) for each in before.replicas)
        # Last: if another thread has written while lanes got their copies, open streams must end
        generation = self._next_generation(before, changes)
        if not is_complete:
            return self._build(before, known_doubts, generation)
        return self._note_state(
            possible_writes,
            before.snapshot,
            known_doubts,
            before.replicas,
            away,
            versions,
            generation,
        )

    def _set_changed_values(self, before: ReplicasState, changes: ModelChanges) -> None:
        """Set changed numbers, flags, and texts in the replicas, and accept the changes."""
        before.snapshot.accept(changes)
        for replica in before.replicas:
            for place, key, _, now in changes.entries:
                replica.snapshot.put(place, key, now)
            replica.snapshot.note()

    def _give_parameters(self, before: ReplicasState, away: ParameterCopies) -> bool:
        """Put copies of parameters into the replicas. Return False if a place cannot be written."""
        for replica in before.replicas:
            if replica.device not in away.by_device:
                continue  # it has the model's own
            params = self._params_on(replica.device, before.survey, away)
            has_these = all(map(is_, params, replica.params))
            if not has_these and not replica.replace_params(params):
                return False
        return True

    def _note_state(
        self,
        possible_writes: PossibleWrites,
        snapshot: Snapshot,
        known_doubts: Doubts,
        replicas: Sequence[Replica],
        away: ParameterCopies,
        versions: Sequence[int],
        generation: int,
    ) -> ReplicasState:
        """Return the new state of the model. Tell the replicas whether versions show all writes."""
        for replica in replicas:
            replica.writes_unseen = possible_writes.writes_unseen
        return ModelState(
            possible_writes,
            snapshot,
            self.doubts,
            known_doubts,
            devices=self.devices,
            replicas=replicas,
            away=away,
            versions=versions,
            generation=generation,
        )

    def _find_changes(self, before: ReplicasState) -> ModelChanges | None:
        """Return the changes of the model if all are changes of numbers, flags, and texts.

        Replicas take these without new copies. None for other changes: all replicas must be built.
        """
        if before.snapshot.is_same():
            return NO_CHANGES
        changes = before.snapshot.read_changes()
        # If no entry has changed, the class of an object has
        if changes.held is None or not before.replicas or not changes.entries:
            return None
        for place, key, then, now in changes.entries:
            is_whole_list = key is None
            are_simple = type(then) in SIMPLE and type(now) in SIMPLE
            if is_whole_list or key in _READ_BY_SURVEY or not are_simple:
                return None
            if not all(replica.snapshot.has(place, key) for replica in before.replicas):
                return None
        return changes

    def _renew_tensors_of(self, replica: Replica, state: ReplicasState) -> bool:
        """Give a lane the values of the model's tensors. Return False if a place cannot be written.

        The lane gets new tensors, since a graph may hold the old ones. There is one exception: the
        values are written into the old tensors if the replica alone holds them. That is so if the
        lane has run nothing but layers of torch.nn since it got the tensors, without gradients,
        hooks, or arguments with code of their own (`are_tensors_held`). Such layers keep no buffer
        elsewhere, and return none. The lane may still use the tensors on a stream; `Lanes.run_idle`
        orders the write after that work.
        """
        is_held = replica.are_tensors_held or replica.is_in_output
        has_statistics = state.possible_writes.writes_statistics
        may_write = has_statistics and replica.device == state.home and not is_held
        if may_write and replica.write_tensors(state.survey.tensors):
            return True
        tensors = self._copy_tensors(replica.device, state.survey, state.home)
        has_places = replica.replace_tensors(tensors)
        replica.note_versions()
        replica.are_tensors_held = False
        return has_places

    def _copy_parameters(
        self, devices: frozenset[torch.device], at_home: Sequence[torch.Tensor]
    ) -> ParameterCopies:
        """Return new copies of parameters, and count them."""
        if not devices:
            return NO_COPIES
        away = ParameterCopies(devices, at_home, detach=self._options.detach)
        self.copied_bytes += away.nbytes  # without the lock: no lane runs during a refresh
        if away.nbytes:
            self.refreshes += 1
        return away

    def _params_on(
        self, device: torch.device, survey: Survey, away: ParameterCopies
    ) -> list[torch.Tensor]:
        """Return the parameters that lanes on a device use, in the order of the survey's.

        These are copies; on the model's device, the model's own, or tensors with their memory.
        """
        if device in away.by_device:
            copies = dict(zip(map(id, away.originals), away.by_device[device], strict=True))
            return [copies.get(id(tensor), tensor) for tensor in survey.params]
        if self._options.detach:
            return [*map(_detach, survey.params)]
        return survey.params

    def _copy_tensors(
        self, device: torch.device, survey: Survey, home: torch.device | None
    ) -> list[torch.Tensor]:
        """Return new copies of the model's tensors besides parameters, for a lane to own.

        Copies of tensors that share memory share memory too, on the model's device.
        """
        tensors = survey.tensors
        if device == home or home is None:
            return clone_all(tensors)
        at_home = [tensor for tensor in tensors if tensor.device == home]
        moved = copies_on([device], at_home)[device]
        with self._lock:
            self.copied_bytes += bytes_of_all(at_home)
        for tensor, copied in zip(at_home, moved, strict=True):
            vars(copied).update(vars(tensor))  # attributes that code of the user's has set
        copies = {id(tensor): copied for tensor, copied in zip(at_home, moved, strict=True)}
        # Tensors on other devices than the model's stay there
        others = [tensor for tensor in tensors if id(tensor) not in copies]
        for tensor, copied in zip(others, clone_all(others), strict=True):
            copies[id(tensor)] = copied
        return [copies[id(tensor)] for tensor in tensors]

    def _drop(self, state: ReplicasState) -> None:
        """Empty replicas that neither a backward pass nor an output may use."""
        # After a move of the model, graphs lead to memory that the parameters have left, and no
        # gradient would reach them
        has_moved = state.sources.have_moved()
        for replica in state.replicas:
            if has_moved or not (replica.has_graph or replica.is_in_output):
                replica.clear()
        if has_moved:
            state.away.clear()

    def share_buffers(self) -> None:
        """Lend the first replica the model's own buffers, if it is on the model's device.

        For `replicate`, after which calls of the first replica update the model, as in torch.
        """
        state, first = self.state, self.state.replicas[0]
        if first.device == state.home:
            first.replace_tensors([*state.survey.tensors])
            first.are_tensors_held = True  # so the replica never writes them: they are borrowed

    def copy_for_lanes(self, value: Any) -> tuple[list[Any], bool]:
        """Return one copy of a callable per lane, and True if the callable draws random numbers.

        Lanes share a callable without state. The caller owns the list.

        Raises:
            ReplicaError: If it cannot be copied.
        """
        survey = Survey(value)
        draws = bool(survey.generators)
        if not (survey.places or survey.opaque or survey.closures):
            return [value] * len(self.devices), draws
        for replica in self.state.replicas:
            replica.are_tensors_held = True  # perhaps by the copies
        return [replica.copy_other(survey) for replica in self.state.replicas], draws

    def _follow_streams(self, state: ReplicasState) -> bool:
        """If the caller has changed its streams, keep freed memory of replicas until they are idle.

        Return True if the replicas must be built again.
        """
        if not state.has_other_streams():
            return False
        record_use([copied for _, copied in state.away.pairs()])
        for replica in state.replicas:
            record_use(replica.tensors)
        must_drop = bool(state.away.by_device) and torch.is_grad_enabled()
        if must_drop:
            # While a graph leads to a parameter, torch adds up its gradient on the stream of that
            # graph. So all references to old graphs go: `_drop` empties these replicas
            for replica in state.replicas:
                replica.has_graph = False
            state.away.clear()
        return must_drop

    # The writes of calls

    def settle_call(self, used: Sequence[Replica], versions: Sequence[int]) -> None:
        """Give back, note, or refuse what the lanes of a cut call wrote. For the caller's thread.

        `versions` are those of the parameters before the call.

        Raises:
            ReplicaError: If forward wrote a parameter; as for `settle_writes`.
        """
        state = self.state
        if [*map(version_of, state.params)] != versions:
            self.refuse_write(versions, state)
        if state.away.by_device:
            self._refuse_writes_away(used)
        if True in map(_is_dirty, used) or state.must_renew_tensors():
            self.unkept.add(settle_writes(state.possible_writes, used, is_cut=True))
        if self.unkept.waiting:
            self.unkept.warn()

    def settle_whole(self, replica: Replica, versions: Sequence[int]) -> None:
        """Note or refuse what a whole call wrote. For the thread of its lane.

        Raises:
            ReplicaError: If forward made a layer; if it wrote a parameter.
        """
        state = self.state
        replica.is_dirty = not replica.snapshot.is_same()
        # In a lane on another device, forward cannot reach the model's own parameters
        is_at_home = replica.device not in state.away.by_device
        if is_at_home and [*map(version_of, state.params)] != versions:
            self.refuse_write(versions, state)
        if state.away.by_device:
            self._refuse_writes_away([replica])
        if replica.is_dirty or replica.is_written():
            self.unkept.add(settle_writes(state.possible_writes, [replica], is_cut=False))

    def prepare(self, replica: Replica) -> None:
        """Bring a replica to the model's state before a whole call, in the thread of its lane."""
        if replica.is_dirty:
            replica.restore()
        state = self.state
        must_renew = state.renews_always or replica.is_written()
        if must_renew and not self._renew_tensors_of(replica, state):
            # A place cannot be written, such as one in a tuple. So the old tensors get the values.
            # If a graph holds them, torch refuses its backward pass
            tensors = self._copy_tensors(replica.device, state.survey, state.home)
            with torch.no_grad():
                copy_all(replica.tensors, tensors)
            replica.note_versions()
        # Last, as new tensors reset it. No code checks whether a whole call keeps a tensor
        replica.are_tensors_held = True

    def refuse_write(self, versions: Sequence[int], state: ReplicasState) -> None:
        """Raise an error that names the first parameter with another version than before the call.

        Raises:
            ReplicaError: If forward may not write the parameter, as it may with `max_norm`.
        """
        for tensor, before in zip(state.params, versions, strict=True):
            if version_of(tensor) != before and not may_renormalize(state.survey, tensor):
                raise parameter_error(state.survey, tensor)

    def _refuse_writes_away(self, used: Sequence[Replica]) -> None:
        """Raise an error if forward wrote a copy of a parameter on another device."""
        found = [self.state.away.versions.find_written()]
        found += [replica.copies_of_scripts.find_written() for replica in used]
        for written in found:
            if written is not None:
                self.doubt_everything()  # the lanes need copies without the write
                raise parameter_error(self.state.survey, written)

    def read_contents(self) -> list[Any]:
        """Return the address, `requires_grad`, and the sum of each parameter and copy.

        These also show writes through ``.data``.
        """
        copies = [copied for _, copied in self.state.away.pairs()]
        with torch.no_grad():
            return [*map(contents_of, [*self.state.params, *copies])]

    def check_contents(self, before: list[Any]) -> None:
        """Refuse a write into a parameter. `before` is what `read_contents` returned.

        Raises:
            ReplicaError: If a parameter has other contents now. The message names the first one.
        """
        state = self.state
        # In the order of `read_contents`, with the parameter for each copy, for the message
        originals = [original for original, _ in state.away.pairs()]
        tensors = [*state.params, *originals]
        for tensor, then, now in zip(tensors, before, self.read_contents(), strict=True):
            if then != now and not may_renormalize(state.survey, tensor):
                raise parameter_error(state.survey, tensor)


def _changes_training(changes: ModelChanges) -> bool:
    """True if a training flag is among the changes."""
    return any(change.key == "training" for change in changes.entries)


def _is_alone() -> bool:
    """True if this thread and lanes of blocks are the only threads of Python."""
    others = [each for each in threading.enumerate() if each is not threading.current_thread()]
    # As `Lane.start` names its thread
    return all(each.name.startswith("parawrap-lane ") for each in others)


def _detach(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the same memory, without a way of gradients back."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()

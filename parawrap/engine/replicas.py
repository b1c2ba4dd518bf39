"""The replicas of a target, one per lane, and what brings them up to date with it.

A replica (`replica.py`) is `copy.deepcopy` of the target with a seeded memo. Lanes on the model's
device hold the model's own parameters, so gradients, optimizer steps, and ``p.data = ...`` need no
care there. Lanes on another device hold copies.

object            | holds                                  | made again
----------------- | -------------------------------------- | ---------------------------------------
`Survey`          | what the target leads to               | when the structure changed
`Edition`         | what forward may write                 | when a training flag changed
`ModelState`      | how the model was at the last refresh  | by each refresh
`ParameterCopies` | copies that the lanes of a device      | when parameters changed; with
                  | share                                  | gradients, by each call
`Replica`         | the containers and the buffers of one  | when the structure changed; its buffers
                  | lane                                   | when one was written

Before a call, `ModelState.is_current` looks at the model. After it, each replica is looked at once:

look                            | shows                          | then
------------------------------- | ------------------------------ | --------------------------------
the snapshot of the replica     | attributes that forward wrote  | put back, with a warning
versions of the lane's buffers  | buffers that forward wrote     | given back in training; renewed
versions of parameters, and of  | weights that forward wrote     | refused: lanes share them
copies                          |                                |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch

from parawrap._private_names import copy_all, version_of
from parawrap.backends import record_use
from parawrap.engine.batched_copies import bytes_of_all, copies_on, lasting
from parawrap.engine.copy_checks import Key, read_plain_parts, was_disturbed
from parawrap.engine.edition import Edition
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
    Asked,
    Doubts,
    ModelChanges,
    ModelState,
    Snapshot,
    read_versions,
)
from parawrap.engine.parameter_copies import NO_COPIES, ParameterCopies
from parawrap.engine.places import MOST_COPIES, SIMPLE
from parawrap.engine.refused_models import (
    refuse_cuda_graphs,
    refuse_devices,
    refuse_shared_modules,
)
from parawrap.engine.replica import Replica, clone_all
from parawrap.engine.survey import Survey, home_of_survey, home_of_target

CopiesOfParts = Callable[[Survey], Sequence[dict[int, Any]]]
"""Returns, for each lane, the copies that it uses of parts of the target, by the id of the part."""

# Attributes whose new value changes how lanes run: with `max_norm`, forward writes the weight of an
# embedding, so lanes take turns
_NEED_NEW_REPLICAS = frozenset({"max_norm"})

_is_dirty = attrgetter("is_dirty")

# No model, before the first refresh and after a failed one
_NOTHING = Edition(Survey(None))
_NO_SNAPSHOT = Snapshot((), lambda _: None)


class CopyOptions(NamedTuple):
    """How replicas of a target are made.

    Attributes:
        methods: The methods that calls enter, besides forward.
        detach: True if no gradients flow from the replicas to the target.
        shares_hooks: True if hooks that capture parts of the model keep the model's own in all
            lanes, as in torch.nn.DataParallel. Otherwise, each lane has its copies of them.
        copies_of_parts: Gives lanes their own copies of parts that replicas would share, such as
            compiled models.
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
        doubts: Reasons to refresh that a look at the model would not show.
        unkept: What forward wrote and the model does not get.
        refreshes: How often parameters were copied to other devices.
        copied_bytes: The bytes that were copied there.
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
        # Of `copied_bytes`: several lanes may renew their tensors at once
        self._lock = threading.Lock()
        self._differs_always: set[Key] = set()  # places that copies never have alike
        self.state = self._know_nothing(0)

    def is_at_home(self, device: torch.device) -> bool:
        """True if the model lies on that device now, or has no tensors."""
        return home_of_target(self.target) in (None, device)

    def mark_dirty(self, lane: int) -> None:
        """Note that a call of a lane ended early, and may have left something."""
        replicas = self.state.replicas
        if lane < len(replicas):
            replicas[lane].is_dirty = True

    def suspect_buffers(self) -> None:
        """Renew the lanes' own tensors at the next refresh.

        A plain call in training mode may have written the model's in C++.
        """
        self.doubts.buffers = object()

    def renew(self) -> None:
        """Make everything again at the next refresh. The public `refresh` of a block calls this."""
        self.doubts.everything = object()

    def refresh(self) -> None:
        """Bring the replicas up to date with the model.

        If that fails, the next refresh makes them again.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        before = self.state
        # This one stays if an error, or Ctrl-C between any two lines below, ends the refresh: half
        # of the replicas may be up to date
        self.state = self._know_nothing(before.generation)
        for replica in before.replicas:
            if replica.is_dirty:
                replica.restore()
        asked = self.doubts.read()  # a doubt that comes from here on counts for the next call
        must_drop = self._follow_streams(before)
        changes = self._find_changes(before)
        if must_drop or before.must_rebuild() or changes is None:
            state = self._build(before, asked, before.generation + 1)
        else:
            state = self._update(before, asked, changes)
        for _ in range(MOST_COPIES):
            # Lanes get their copies of tensors one after another, and another thread may have
            # written in between. Then they get them again
            is_old = state.has_written_tensors() or state.sources.have_changed()
            if not (state.replicas and is_old):
                break
            state = self._update(state, asked, NO_CHANGES)
        self.state = state

    def forget(self) -> None:
        """Drop the replicas, and everything that is known of the target."""
        before = self.state
        # First: after Ctrl-C in between, no call meets a replica without its entries
        self.state = self._know_nothing(before.generation + 1)
        self._drop(before)

    # Making and renewing

    def _know_nothing(self, generation: int) -> ModelState[Replica]:
        """Return the state before the first refresh, which is not that of any model."""
        return ModelState(_NOTHING, _NO_SNAPSHOT, self.doubts, NEVER_CURRENT, generation=generation)

    def _next_generation(self, before: ModelState[Replica], changes: ModelChanges) -> int:
        """Return the next number if the model has changed since, else that of before.

        A model that may write buffers unseen is made again for each call. That alone is not a
        change: whole calls go on.
        """
        if changes.entries or before.sources.have_changed() or before.has_written_tensors():
            return before.generation + 1
        return before.generation

    def _build(
        self, before: ModelState[Replica], asked: Asked, generation: int
    ) -> ModelState[Replica]:
        """Make all replicas for the structure of now.

        Copies of parameters on other devices are kept if they are up to date, unless a doubt
        demands new ones. The old replicas are dropped first: parameters remember the shapes of the
        graphs that lead to them.
        """
        self._drop(before)
        options = self._options
        for copies in range(1, MOST_COPIES + 1):
            # The walk and `copy.deepcopy` read dicts of the model, which another thread may be
            # changing. Then they raise, or lanes get copies of different moments: copy once more
            snapshot = None
            try:
                survey = Survey(self.target, options.methods, shares_hooks=options.shares_hooks)
                snapshot = Snapshot(survey.places, lambda owner: owner, is_model=True)
                # After the snapshot, which shows if a training flag changes from here on
                edition = Edition(survey)
                if survey.is_lazy:  # a parameter waits for its first call, which runs plainly
                    return ModelState(
                        edition,
                        snapshot,
                        self.doubts,
                        NEVER_CURRENT,  # the next call looks again
                        generation=generation,
                    )
                state = self._copy_model(edition, snapshot, before, asked, generation)
            except Exception as error:
                if not was_disturbed(error, snapshot, copies):
                    raise
                continue
            if self._accept_changes(state):
                differences = self._set_plain_values(state)
                if differences and _is_alone():
                    # No other thread has changed the model: its copies differ by rules of classes
                    self._differs_always |= differences
                    return state
                if not differences:
                    return state
            self._drop(state)
        # A thread that never pauses leaves no moment to copy, but a plain call is right
        return self._know_nothing(generation)

    def _accept_changes(self, state: ModelState[Replica]) -> bool:
        """Accept changes of numbers and the like since the snapshot; False if others have come."""
        changes = self._find_changes(state)
        if changes is None or _changes_training(changes):
            return False
        if changes.entries:
            # The replicas get the values from `_set_plain_values`, which compares all of them
            state.snapshot.accept(changes)
        return True

    def _set_plain_values(self, state: ModelState[Replica]) -> set[Key]:
        """Set the numbers, flags, and texts of all replicas to those of the model.

        Return the first place of each replica that still holds something else.
        """
        parts = read_plain_parts(state.snapshot, self._differs_always)
        found = {replica.set_plain_values(parts) for replica in state.replicas}
        return {key for key in found if key is not None}

    def _copy_model(
        self,
        edition: Edition,
        snapshot: Snapshot,
        before: ModelState[Replica],
        asked: Asked,
        generation: int,
    ) -> ModelState[Replica]:
        """Make all replicas of the surveyed model."""
        survey = edition.survey
        versions = read_versions(survey)  # before the copies, as in `_update`
        home = home_of_survey(survey)
        refuse_devices(survey, home)
        refuse_cuda_graphs(survey, self.devices)
        away = self._find_away(survey, home, before, asked)
        known: Sequence[Mapping[int, Any]] = [{}] * len(self.devices)
        if self._options.copies_of_parts is not None:
            known = self._options.copies_of_parts(survey)
        replicas: list[Replica] = []
        for device, parts in zip(self.devices, known, strict=True):
            params = self._params_on(device, survey, away)
            tensors = self._copy_tensors(device, survey, home)
            replicas.append(Replica(survey, device, params, tensors, parts))
        refuse_shared_modules(survey, replicas)
        return self._note_state(edition, snapshot, asked, replicas, away, versions, generation)

    def _find_away(
        self,
        survey: Survey,
        home: torch.device | None,
        before: ModelState[Replica],
        asked: Asked,
    ) -> ParameterCopies:
        """Return the copies of parameters on other devices: those of before, or new ones."""
        if home is None:
            return NO_COPIES
        devices = frozenset(self.devices) - {home}
        at_home = [tensor for tensor in survey.params if tensor.device == home]
        away = before.away
        is_asked = asked.everything is not before.asked.everything
        has_copies = bool(away.by_device) and away.devices == devices
        is_same_length = len(at_home) == len(away.originals)
        are_of_these = is_same_length and all(map(is_, at_home, away.originals))
        if has_copies and are_of_these and not is_asked and before.has_same_sources():
            return away
        return self._copy_parameters(devices, at_home)

    def _update(
        self, before: ModelState[Replica], asked: Asked, changes: ModelChanges
    ) -> ModelState[Replica]:
        """Give the replicas what changed, and return the new state.

        Make them again if that is not enough.
        """
        survey, edition, away = before.survey, before.edition, before.away
        # Before all looks and copies: what other threads write from here on shows at the next call
        versions = read_versions(survey)
        must_renew = before.must_renew_tensors()
        if changes.entries:
            self._apply(before, changes)
            if _changes_training(changes):
                edition = Edition(survey)
                must_renew = True  # training may have written statistics without a new version
        is_enough = True  # False once a replica cannot take what changed
        if not before.has_same_sources():
            away = self._copy_parameters(away.devices, away.originals)
            # TorchScript modules on other devices have their own parameters, which are not replaced
            is_enough = not survey.scripts
        is_enough = is_enough and self._give_parameters(before, away)
        if is_enough and must_renew:
            is_enough = all(self._renew_tensors_of(replica, before) for replica in before.replicas)
        # Last: streams that are open must see each change that the copies may have met
        generation = self._next_generation(before, changes)
        if not is_enough:
            return self._build(before, asked, generation)
        return self._note_state(
            edition, before.snapshot, asked, before.replicas, away, versions, generation
        )

    def _apply(self, before: ModelState[Replica], changes: ModelChanges) -> None:
        """Set changed numbers, flags, and texts in the replicas."""
        before.snapshot.accept(changes)
        for replica in before.replicas:
            for place, key, _, now in changes.entries:
                replica.snapshot.put(place, key, now)
            replica.snapshot.note()

    def _give_parameters(self, before: ModelState[Replica], away: ParameterCopies) -> bool:
        """Put copies of parameters into their lanes. False if a place cannot change.

        Such a place is a tuple, or the like.
        """
        survey = before.survey
        for replica in before.replicas:
            if replica.device not in away.by_device:
                continue  # it has the model's own
            params = self._params_on(replica.device, survey, away)
            has_these = all(map(is_, params, replica.params))
            if not has_these and not replica.replace_params(params):
                return False
        return True

    def _note_state(
        self,
        edition: Edition,
        snapshot: Snapshot,
        asked: Asked,
        replicas: Sequence[Replica],
        away: ParameterCopies,
        versions: Sequence[int],
        generation: int,
    ) -> ModelState[Replica]:
        """Return the state of the model that the replicas have from here on."""
        for replica in replicas:
            replica.writes_unseen = edition.writes_unseen
        return ModelState(
            edition,
            snapshot,
            self.doubts,
            asked,
            devices=self.devices,
            replicas=replicas,
            away=away,
            versions=versions,
            generation=generation,
        )

    def _find_changes(self, before: ModelState[Replica]) -> ModelChanges | None:
        """Return the changes that replicas can follow; None if they must be made again.

        They follow changes of numbers, flags, and texts, which need no new copies.
        """
        if before.snapshot.is_same():
            return NO_CHANGES
        changes = before.snapshot.read_changes()
        # Without a change of an entry, an object has another class
        if changes.mark is None or not before.replicas or not changes.entries:
            return None
        for place, key, then, now in changes.entries:
            are_simple = type(then) in SIMPLE and type(now) in SIMPLE
            if key is None or key in _NEED_NEW_REPLICAS or not are_simple:
                return None
            if not all(replica.snapshot.has(place, key) for replica in before.replicas):
                return None
        return changes

    def _renew_tensors_of(self, replica: Replica, state: ModelState[Replica]) -> bool:
        """Give a lane the values of the model's tensors. False if a place cannot change.

        It gets new tensors, since a graph may hold the old ones. The exception is a lane that has
        run nothing but layers of torch.nn since it got its tensors, without gradients, hooks, or
        arguments with code of their own (`are_tensors_held`). Such layers keep no buffer, and they
        return none: every output is a new tensor, or an argument. So the lane's modules alone hold
        the tensors, and a write is seen by the next call alone, which it is for. The lane may be
        at work on them on a stream; `Lanes.run_idle` orders the write after that work.
        """
        may_write = (
            state.edition.writes_statistics
            and replica.device == state.home
            and not replica.are_tensors_held
            and not replica.is_lent
        )
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
        """Return the parameters as lanes on a device hold them."""
        params = survey.params
        if device not in away.by_device and self._options.detach:
            return [*map(_detach, params)]
        if device not in away.by_device:
            return params
        copies = dict(zip(map(id, away.originals), away.by_device[device], strict=True))
        return [copies.get(id(tensor), tensor) for tensor in params]

    def _copy_tensors(
        self, device: torch.device, survey: Survey, home: torch.device | None
    ) -> list[torch.Tensor]:
        """Return new copies of the model's other tensors for a lane.

        Tensors that share memory have copies that do.
        """
        tensors = survey.tensors
        if device == home or home is None:
            return clone_all(tensors)
        at_home = [tensor for tensor in tensors if tensor.device == home]
        moved = dict(zip(map(id, at_home), copies_on([device], at_home)[device], strict=True))
        found: list[torch.Tensor] = []
        with lasting():
            for tensor in tensors:
                # A tensor elsewhere than the model stays on its device
                is_at_home = id(tensor) in moved
                found.append(moved[id(tensor)] if is_at_home else tensor.detach().clone())
        with self._lock:
            self.copied_bytes += bytes_of_all(at_home)
        for tensor, copied in zip(tensors, found, strict=True):
            vars(copied).update(vars(tensor))  # attributes that code of the user's has set
        return found

    def _drop(self, state: ModelState[Replica]) -> None:
        """Empty replicas that neither a backward pass nor an output may use."""
        has_moved = state.sources.have_moved()  # then their graphs are of no use
        for replica in state.replicas:
            if has_moved or not (replica.has_graph or replica.is_lent):
                replica.clear()
        if has_moved:
            state.away.clear()

    def share_buffers(self) -> None:
        """Give the first replica the model's own buffers, if it is on the model's device.

        For `replicate`: there, calls of the first replica update the model, as in torch.
        """
        state, first = self.state, self.state.replicas[0]
        if first.device == state.home:
            first.replace_tensors([*state.survey.tensors])
            first.are_tensors_held = True

    def copy_for_lanes(self, value: Any) -> tuple[list[Any], bool]:
        """Return one copy of a callable per lane, and True if it holds a random generator.

        A callable without state is shared.

        Raises:
            ReplicaError: If it cannot be copied.
        """
        survey = Survey(value)
        draws = bool(survey.generators)
        if not (survey.places or survey.opaque or survey.twins):
            return [value] * len(self.devices), draws
        for replica in self.state.replicas:
            replica.are_tensors_held = True
        return [replica.copy_other(survey) for replica in self.state.replicas], draws

    def _follow_streams(self, state: ModelState[Replica]) -> bool:
        """Keep the memory of replicas, once freed, until the caller's new streams are done with it.

        Return True if the replicas must be made again.
        """
        if not state.has_other_streams():
            return False
        record_use([copied for _, copied in state.away.pairs()])
        for replica in state.replicas:
            record_use(replica.tensors)
        must_drop = bool(state.away.by_device) and torch.is_grad_enabled()
        if must_drop:
            # Parameters remember the stream of the graphs that lead to them, so these must end
            for replica in state.replicas:
                replica.has_graph = False
            state.away.clear()
        return must_drop

    # The writes of calls

    def settle_call(self, used: Sequence[Replica], versions: Sequence[int]) -> None:
        """Settle the writes of the lanes of a cut call, in the caller's thread.

        `versions` are those that the parameters had before it.

        Raises:
            ReplicaError: As for `settle_writes`; if forward wrote a parameter.
        """
        state = self.state
        if [*map(version_of, state.params)] != versions:
            self.refuse_write(versions, state)
        if state.away.by_device:
            self._refuse_writes_away(used)
        if True in map(_is_dirty, used) or state.must_renew_tensors():
            self.unkept.add(settle_writes(state.edition, used, is_cut=True))
        if self.unkept.waiting:
            self.unkept.warn()

    def settle_whole(self, replica: Replica, versions: Sequence[int]) -> None:
        """Settle the writes of a whole call, in the thread of its lane.

        Raises:
            ReplicaError: If forward made a layer; if it wrote a parameter.
        """
        state = self.state
        replica.is_dirty = not replica.snapshot.is_same()
        # A lane elsewhere has copies, so forward cannot have written the parameters themselves
        is_at_home = replica.device not in state.away.by_device
        if is_at_home and [*map(version_of, state.params)] != versions:
            self.refuse_write(versions, state)
        if state.away.by_device:
            self._refuse_writes_away([replica])
        if replica.is_dirty or replica.is_written():
            self.unkept.add(settle_writes(state.edition, [replica], is_cut=False))

    def prepare(self, replica: Replica) -> None:
        """Bring a replica to the model's state before a whole call, in the thread of its lane."""
        if replica.is_dirty:
            replica.restore()
        state = self.state
        must_renew = state.renews_always or replica.is_written()
        if must_renew and not self._renew_tensors_of(replica, state):
            # A tuple, or the like, holds one of them, so the old ones stay and get the values. If a
            # graph holds them, torch refuses its backward pass
            tensors = self._copy_tensors(replica.device, state.survey, state.home)
            with torch.no_grad():
                copy_all(replica.tensors, tensors)
            replica.note_versions()
        # Last, as new tensors reset it: what a whole call runs and returns is not looked at
        replica.are_tensors_held = True

    def refuse_write(self, versions: Sequence[int], state: ModelState[Replica]) -> None:
        """Raise an error that names the first parameter with another version than it had.

        Raises:
            ReplicaError: If there is one that forward may not write.
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
                self.renew()  # the model does not have the write
                raise parameter_error(self.state.survey, written)

    def read_contents(self) -> list[Any]:
        """Return the memory and a sum of each parameter and copy.

        They also show writes through ``.data``.
        """
        copies = [copied for _, copied in self.state.away.pairs()]
        with torch.no_grad():
            return [*map(contents_of, [*self.state.params, *copies])]

    def check_contents(self, before: list[Any]) -> None:
        """Raise an error if the parameters have other contents than `read_contents` returned.

        Raises:
            ReplicaError: If so. The message names the first one.
        """
        state = self.state
        # In the order of `read_contents`; an error names the parameter in place of its copy
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

"""The replicas of a target, one per lane, and what keeps them up to date with it.

A replica is `copy.deepcopy` of the target with a seeded memo. Lanes on the model's device hold the model's own
parameters, so gradients, optimizer steps, and ``p.data = ...`` need no care there. Lanes on another device hold copies
(`away.py`). Each lane has its own buffers and attributes. Before a call, one comparison shows whether the replicas are
still the model; after it, one comparison per lane shows what forward wrote.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch

from parawrap._private_names import (
    BUFFERS,
    CHILDREN,
    COMPILED_CALL,
    PARAMETERS,
    check_modules,
    compiled_original,
    copy_all,
    is_compiled_module,
    recompile_copy,
    uses_cuda_graphs,
)
from parawrap._private_names import version_of as version_of
from parawrap.backends import Stream, backend_of, record_use, warn_caller
from parawrap.engine.away import Away
from parawrap.engine.batched_copies import bytes_of, copies_at, lasting
from parawrap.engine.holdings import ABSENT, Change, Holdings, Place
from parawrap.engine.survey import Survey, storage_of, vars_of
from parawrap.errors import ReplicaError

CopiesOfParts = Callable[[Survey], Sequence[dict[int, Any]]]
"""Returns, for each lane, the copies that it uses of parts of the target, by the id of the part."""

_SIMPLE = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
_CURE = "Let its __deepcopy__ copy all attributes with copy.deepcopy(value, memo), or remove the method"
_device_of = attrgetter("device")
is_dirty = attrgetter("is_dirty")
_requires_grad = attrgetter("requires_grad")


class Replica:
    """The copy of the target that one lane runs.

    Attributes:
        target: The copy of the whole target.
        tensors: The lane's own copies of the survey's tensors, in the same order.
        is_dirty: True if a call may have left something that the next call must not find.
    """

    def __init__(
        self,
        survey: Survey,
        device: torch.device,
        params: Sequence[torch.Tensor],
        tensors: list[torch.Tensor],
        known: dict[int, Any] | None = None,
    ) -> None:
        self.device = device
        self.survey = survey
        self.is_dirty = False
        self.has_graph = False  # True if a graph may lead here: checkpointing calls the modules again in a backward pass
        self.tensors = tensors
        self.params = list(params)
        self._memo: dict[int, Any] = {**{id(each): each for each in survey.shared}, **(known or {})}
        self._memo |= {id(original): each for original, each in zip(survey.params, params, strict=True)}
        self._memo |= {id(original): each for original, each in zip(survey.tensors, tensors, strict=True)}
        self._copy_target()
        self.target: Any = self.of(survey.target)
        self.holdings = Holdings(survey.places, partial(_own_copy, self._memo), owns_dicts=True)  # no cycle through self
        self._origins: dict[int, Any] | None = None
        self._versions_by_id: dict[int, int] = {}
        self.note_versions()

    def of(self, value: Any) -> Any:
        """Return the copy of a part of the target, or the part itself if all lanes use it."""
        return self._memo.get(id(value), value)

    def copy(self, value: Any) -> Any:
        """Return a copy of another object for this lane. Parts of the model in it are the lane's."""
        return copy.deepcopy(value, self._memo)

    def copy_other(self, survey: Survey) -> Any:
        """Return a copy of another target for this lane. Parts of the model in it are the lane's."""
        own = [tensor for tensor in survey.tensors if id(tensor) not in self._memo]
        with lasting():
            copies = dict(zip(map(id, own), _clone_all(own), strict=True))
        tensors: list[torch.Tensor] = [
            copies[id(tensor)] if id(tensor) in copies else self.of(tensor) for tensor in survey.tensors
        ]
        return Replica(survey, self.device, [*map(self.of, survey.params)], tensors, self._memo).target

    def note_versions(self) -> None:
        """Note the versions of the lane's own tensors."""
        self.versioned = [tensor for tensor in self.tensors if not tensor.is_inference()]
        self.versions = [*map(version_of, self.versioned)]
        self._origins = None

    def is_written(self) -> bool:
        """True if a call wrote one of the lane's own tensors in place."""
        return [*map(version_of, self.versioned)] != self.versions

    def original_of(self, value: Any) -> Any:
        """Return the model's own object that a part of this replica is a copy of; None for any other."""
        if self._origins is None:
            owned = self.survey.owned
            self._versions_by_id = dict(zip(map(id, self.versioned), self.versions, strict=True))
            self._origins = {id(copied): owned[key] for key, copied in self._memo.items() if key in owned}
        before = self._versions_by_id.get(id(value))
        if before is not None and version_of(value) != before:
            return None  # forward wrote it, so it is not the model's any more
        return self._origins.get(id(value))

    def replace(self, originals: Sequence[torch.Tensor], mine: list[torch.Tensor], new: Sequence[torch.Tensor]) -> bool:
        """Put new tensors into the places of those in `mine`. Return False if a place cannot change."""
        places: list[tuple[Place, Any, torch.Tensor]] = []
        for original, tensor in zip(originals, new, strict=True):
            for holder in self.survey.holders.get(id(original), ()):
                if holder is None:
                    return False
                places.append((*holder, tensor))
        for place, key, tensor in places:
            self.holdings.put(place, key, tensor)
        for original, tensor in zip(originals, new, strict=True):
            self._memo[id(original)] = tensor
        mine[:] = new
        self._origins = None
        self.holdings.note()
        return True

    def restore(self) -> None:
        """Put back the containers as they were."""
        self.holdings.restore()
        self.is_dirty = False

    def clear(self) -> None:
        """Empty the containers, so that cycles among them keep nothing alive."""
        self.holdings.clear()
        self._memo = {}
        self._origins = None
        self.target = None
        self.tensors = self.params = []

    # The copy

    def _copy_target(self) -> None:
        survey, memo = self.survey, self._memo
        if survey.scripts and any(self.of(each) is not each for each in survey.params):
            msg = (
                f"no replica of {survey.path_of(survey.scripts[0])!r} can be made on {self.device}: a TorchScript module "
                "cannot be copied there. Use the module that it was made from, or lanes on the device of the model alone"
            )
            raise ReplicaError(msg)
        twins = [function for function in survey.twins if id(function) not in memo]
        for function in twins:
            self._start_twin(function)
        compiled = [module for module in survey.modules if is_compiled_module(module) and id(module) not in memo]
        for module in compiled:
            memo[id(module)] = object.__new__(type(module))
        try:
            for module in reversed(survey.modules):  # the deepest first, so that depth costs no recursion
                copy.deepcopy(module, memo)
            copy.deepcopy(survey.target, memo)
            for module in compiled:
                recompile_copy(memo[id(module)], module, copy.deepcopy(compiled_original(module), memo))
            for function in twins:
                self._finish_twin(function)
        except ReplicaError:
            raise
        except Exception as error:
            raise self._why_uncopied(error) from error
        known = set(map(id, memo.values()))
        for module in survey.modules:
            self._check_module(module, known)

    def _start_twin(self, function: types.FunctionType) -> None:
        """Make the lane's own function for one that captures parts of the model, with cells that are filled later."""
        cells = function.__closure__
        own = {id(cell) for cell in cells or () if self._holds_parts(cell)}
        for cell in cells or ():
            if id(cell) in own:
                self._memo.setdefault(id(cell), types.CellType())
        closure = None if cells is None else tuple(map(self.of, cells))
        twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, closure)
        self._memo[id(function)] = twin

    def _holds_parts(self, cell: types.CellType) -> bool:
        """True if a closure cell holds something that the lane has a copy of."""
        with contextlib.suppress(ValueError):  # an empty cell
            part = cell.cell_contents
            part = part.__self__ if isinstance(part, types.MethodType) else part
            is_shared = any(part is each for each in self.survey.shared) and self.of(part) is part
            return id(part) in self.survey.owned and not is_shared
        return False

    def _finish_twin(self, function: types.FunctionType) -> None:
        twin = self._memo[id(function)]
        for cell, own in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
            if own is not cell:
                with contextlib.suppress(ValueError):
                    own.cell_contents = self.copy(cell.cell_contents)
        twin.__defaults__ = self._copy_if_owned(function.__defaults__)
        twin.__kwdefaults__ = self._copy_if_owned(function.__kwdefaults__)
        twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
        twin.__annotations__ = function.__annotations__
        vars(twin).update({name: self._copy_if_owned(part) for name, part in vars(function).items()})
        for holder in self.survey.holders.get(id(function), ()):  # Python 3.14 copies functions without a look at the memo
            if holder is not None and (owner := _own_copy(self._memo, holder[0].owner)) is not None:
                holder[0].container(owner)[holder[1]] = twin

    def _copy_if_owned(self, value: Any) -> Any:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        return self.copy(value) if any(id(part) in self._memo for part in parts) else value

    def _why_uncopied(self, error: Exception) -> ReplicaError:
        """Return the error that names the part that deepcopy cannot copy."""
        if isinstance(error, RecursionError):
            msg = "the model is nested too deeply to be copied. Raise the limit with sys.setrecursionlimit"
            return ReplicaError(msg)
        for value in self.survey.opaque:
            try:
                copy.deepcopy(value, dict(self._memo))
            except Exception:  # noqa: BLE001  # code of the user's
                msg = (
                    f"no replica can be made: {self.survey.path_of(value)!r} is a {type(value).__name__}, which cannot be "
                    f"copied ({type(error).__name__}: {error}). Make it in forward, or give its class a __deepcopy__"
                )
                return ReplicaError(msg)
        msg = f"no replica can be made: copy.deepcopy raises {type(error).__name__}: {error}"
        return ReplicaError(msg)

    def _check_module(self, module: torch.nn.Module, known: set[int]) -> None:
        """Refuse modules that a ``__deepcopy__`` shares, and modules and parameters that it made."""
        copied, path = self._memo.get(id(module)), self.survey.paths[id(module)]
        what = f"no replica of {repr(path) if path else 'the module'} can be made: "
        if copied is None or copied is module:
            msg = f"{what}its copy is the module itself. {_CURE}"
            raise ReplicaError(msg)
        if not isinstance(copied, torch.nn.Module) or is_compiled_module(module):
            return
        if vars(copied).get(COMPILED_CALL) is not None:
            vars(copied)[COMPILED_CALL] = None  # compiled code of the original
        for table, kind in ((CHILDREN, "submodule"), (PARAMETERS, "parameter")):
            for name, part in vars(copied)[table].items():
                if part is not None and id(part) not in known and not _is_bare(part, known):
                    msg = f"{what}its copy has another {kind} {name!r}. {_CURE}"
                    raise ReplicaError(msg)


class Replicas:
    """The replicas of one target. The caller ensures that no lane runs in `refresh`, `settle`, and `forget`.

    With `detach`, no gradients flow from the replicas to the target. `shares_hooks` is as in `Survey`. `copies_of_parts`
    gives lanes their own copies of parts that replicas would share, such as compiled models.

    Attributes:
        all: One replica per lane; empty before the first refresh.
        home: The device of the model; None if it has no tensors.
        is_lazy: True if a parameter waits for its first call to get a shape. The call must run plainly.
    """

    def __init__(
        self,
        target: Any,
        devices: Sequence[torch.device],
        methods: Sequence[str] = (),
        *,
        detach: bool = False,
        shares_hooks: bool = False,
        copies_of_parts: CopiesOfParts | None = None,
    ) -> None:
        check_modules()
        self.target = target
        self.devices = tuple(devices)
        self.all: list[Replica] = []
        self.home: torch.device | None = _home_of(target)
        self.is_lazy = False
        self.is_quiet = False
        self.in_turns = False
        self.is_new = True  # until a call has run on these replicas
        self.generators: list[torch.Generator] = []
        self.params: list[torch.Tensor] = []  # that have versions
        self.learners: list[torch.Tensor] = []
        self.refreshes = self.copied_bytes = 0
        self.survey = Survey(None)
        self._methods = methods
        self._detach = detach
        self._shares_hooks = shares_hooks
        self._copies_of_parts = copies_of_parts
        self.generation = 0  # how often a refresh found the model changed
        self.must_refresh = True  # whatever a look at the model would show
        self.renews_always = False
        self._is_forced = True  # everything is made at the next refresh
        self._suspects_buffers = False  # a plain call may have written them without a new version
        self.tracked: list[torch.Tensor] = []
        self.versions: list[int] = []
        self._first: torch.Tensor | None = None  # of the model: its device is the model's
        self._away: dict[torch.device, Away] = {}
        self._streams: dict[torch.device, Stream] = {}
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self.model = Holdings((), _itself)
        self._writing = threading.Lock()
        self._written: dict[str, None] = {}
        self._warned: set[str] = set()

    def is_at_home(self, device: torch.device) -> bool:
        """True if the model lies on that device now, or has no tensors."""
        return _home_of(self.target) in (None, device)

    def is_stale(self) -> bool:
        """True if the model or the state of the lanes changed since the last refresh.

        `Calls.call` makes the same look in place, without this call.
        """
        return (
            self.must_refresh
            or not self.model.is_same()
            or [*map(version_of, self.tracked)] != self.versions
            or True in map(_requires_grad, self.tracked)
            or True in map(is_dirty, self.all)
            or self.has_moved()
        )

    def mark_dirty(self, lane: int) -> None:
        """Note that a call of a lane ended early, and may have left something."""
        if lane < len(self.all):
            self.all[lane].is_dirty = True

    def suspect_buffers(self) -> None:
        """Renew the lanes' own tensors at the next refresh: a plain call in training mode may have written them in C++."""
        self._suspects_buffers = self.must_refresh = True

    def renew(self) -> None:
        """Make everything again at the next refresh."""
        self._is_forced = self.must_refresh = True
        for away in self._away.values():
            away.invalidate()

    def refresh(self) -> None:
        """Bring the replicas up to date with the model. If that fails, the next refresh makes them again.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        try:
            self.put_back()
            self._follow_streams()
            # A `renew` from here on counts for the next call
            is_forced, self._is_forced, self.must_refresh = self._is_forced, False, False
            has_moved = self._first is not None and self._first.device != self.home
            has_moved = has_moved or any(away.has_moved() for away in self._away.values())
            has_moved = has_moved or True in map(_requires_grad, self.survey.tensors)  # one of them learns now
            if is_forced or has_moved or not (self.model.is_same() or self._apply_changes()):
                self._build()
            elif not self.is_lazy:
                self._renew()
        except BaseException:
            self.renew()
            raise

    def put_back(self) -> None:
        """Put back what calls left in the containers of the replicas."""
        for replica in self.all:
            if replica.is_dirty:
                replica.restore()

    def forget(self) -> None:
        """Drop the replicas, and everything that is known of the target."""
        self._drop()
        self.renew()
        self._away, self.model, self.survey = {}, Holdings((), _itself), Survey(None)
        self.tracked, self.params, self.learners, self.generators = [], [], [], []
        self._first = None

    # Making and renewing

    def _build(self) -> None:
        """Make all replicas for the structure of now. Copies of parameters on other devices are kept.

        The old replicas are dropped first: parameters remember the shapes of the graphs that lead to them.
        """
        self.survey = survey = Survey(self.target, self._methods, shares_hooks=self._shares_hooks)
        self.generation += 1
        self._drop()
        home = _home_of(self.target) or next(map(_device_of, (*survey.params, *survey.tensors)), None)
        self.home, self.is_lazy = home, survey.is_lazy
        registered = (tensor for tensor in (*survey.params, *survey.tensors) if tensor.device == home)
        self._first = next(registered, None)
        self._note_survey()
        if survey.is_lazy:
            self.renew()
            return
        _refuse_devices(survey, home)
        _refuse_cuda_graphs(survey, self.devices)
        self._refresh_away()
        copies = [self._try_to_copy_tensors(device) for device in self.devices]
        known = [{}] * len(self.devices) if self._copies_of_parts is None else self._copies_of_parts(survey)
        self.all = [
            Replica(survey, device, self._params_on(device), tensors, parts)
            for device, tensors, parts in zip(self.devices, copies, known, strict=True)
        ]
        self.is_new = True
        self._streams = self._read_streams()
        self._note_versions()

    def _note_survey(self) -> None:
        survey = self.survey
        self.generators = survey.generators
        self.learners = [*survey.params]
        self.params = [tensor for tensor in survey.params if not (survey.is_lazy or tensor.is_inference())]
        self.is_quiet, self.in_turns = survey.is_quiet, survey.in_turns
        self.model = Holdings(survey.places, _itself)

    def _renew(self) -> None:
        """Give lanes new copies of what changed: of all buffers, if one of them was written."""
        streams = self._read_streams()
        self._refresh_away()
        for replica in self.all:
            away = self._away.get(replica.device)
            if away is None or all(map(is_, away.copies, replica.params)):
                continue
            if not replica.replace(self.survey.params, replica.params, self._params_on(replica.device)):
                self._build()
                return
        count = len(self.survey.tensors)
        self.generation += [*map(version_of, self.tracked[:count])] != self.versions[:count]
        if self.renews_always or self._suspects_buffers or [*map(version_of, self.tracked)] != self.versions:
            self._renew_tensors()
        self._streams = streams
        self._note_versions()

    def _renew_tensors(self) -> None:
        """Give each lane new copies of its own tensors: a graph that waits for its backward pass may hold the old ones."""
        if not all(map(self._renew_tensors_of, self.all)):
            self._build()  # a tuple, or the like, holds one of them

    def renew_in_lane(self, replica: Replica) -> None:
        """Do the same for one lane, in its thread, between two whole calls."""
        if not self._renew_tensors_of(replica):
            with lasting():
                copy_all(replica.tensors, self._copy_tensors(replica.device))
            replica.note_versions()

    def _renew_tensors_of(self, replica: Replica) -> bool:
        with lasting():
            has_places = replica.replace(self.survey.tensors, replica.tensors, self._copy_tensors(replica.device))
        replica.note_versions()
        return has_places

    def _refresh_away(self) -> None:
        params = self.survey.params
        devices = {device for device in self.devices if self.home is not None and device != self.home}
        at_home = [tensor for tensor in params if tensor.device == self.home]
        for device in devices:
            away = self._away.get(device)
            if away is None or [*map(id, away.originals)] != [*map(id, at_home)]:
                self._away[device] = away = Away(device, at_home)
            self.generation += away.has_changed()
            copied = away.refresh(detach=self._detach)
            self.copied_bytes += copied
            self.refreshes += bool(copied)
        self._away = {device: away for device, away in self._away.items() if device in devices}

    def _params_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the parameters as lanes on a device hold them."""
        away = self._away.get(device)
        if away is None:
            if not self._detach:
                return self.survey.params
            return [_detached(tensor) for tensor in self.survey.params]
        copies = {id(original): each for original, each in zip(away.originals, away.copies, strict=True)}
        return [copies.get(id(tensor), tensor) for tensor in self.survey.params]

    def _try_to_copy_tensors(self, device: torch.device) -> list[torch.Tensor]:
        try:
            with lasting():
                return self._copy_tensors(device)
        except Exception as error:
            name = type(self.target).__name__
            msg = f"no replica of {name} can be made on {device}: {type(error).__name__}: {error}"
            raise ReplicaError(msg) from error

    def _copy_tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Return new copies of the model's other tensors for a lane. Tensors that share memory have copies that do."""
        tensors = self.survey.tensors
        if device == self.home or self.home is None:
            return _clone_all(tensors)
        values = [tensor.detach() for tensor in tensors if tensor.device == self.home]
        moved = iter(copies_at(device, values))
        with self._writing:  # several lanes may renew their tensors at once
            self.copied_bytes += sum(map(bytes_of, values))
        found = [next(moved) if tensor.device == self.home else tensor.detach().clone() for tensor in tensors]
        for tensor, each in zip(tensors, found, strict=True):
            vars(each).update(vars(tensor))
        return found

    def _apply_changes(self) -> bool:
        """Set replaced numbers, flags, and texts in the replicas; return False if these must be made again."""
        held = self.model.read_held()
        changes = self.model.changes()
        if not (self.all and changes):  # without a change of an entry, an object has another class
            return False
        for place, key, before, now in changes:
            if key is None or type(before) not in _SIMPLE or type(now) not in _SIMPLE:
                return False
            if not all(replica.holdings.has(place, key) for replica in self.all):
                return False
        self.generation += 1
        self.model.accept_changes(changes, held)
        for replica in self.all:
            for place, key, _, now in changes:
                replica.holdings.put(place, key, now)
            replica.holdings.note()
        if any(change.key == "training" for change in changes):
            self.survey.note_modes()
            self.is_quiet, self.is_new = self.survey.is_quiet, True
            self._renew_tensors()  # training may have written statistics without a new version
        return True

    def _note_versions(self) -> None:
        """Note the versions of the model's other tensors, and of the lanes' copies."""
        tensors = self.survey.tensors
        every = [*tensors, *(tensor for replica in self.all for tensor in replica.tensors)]
        self.tracked = [tensor for tensor in every if not tensor.is_inference()]
        self.versions = [*map(version_of, self.tracked)]
        unseen = self.survey.trains and any(map(is_written_unseen, filter(self._is_buffer, tensors)))
        self.renews_always = unseen or any(tensor.is_inference() for tensor in tensors)
        if self.renews_always:
            self.must_refresh = True
        self._suspects_buffers = False

    def has_moved(self) -> bool:
        """True if the model is on another device, copies on other devices are stale, or the caller has other streams."""
        if self._first is not None and self._first.device != self.home:
            return True
        if self._on_cpu and not self._away:
            return False
        has_other_streams = bool(self._streams) and self._streams != self._read_streams()
        return has_other_streams or any(away.is_stale() for away in self._away.values())

    def _drop(self, *, empties: bool = False) -> None:
        """Drop the replicas. Those that a backward pass may call again stay whole, unless it `empties` them."""
        has_moved = any(away.has_moved() for away in self._away.values())
        for replica in self.all:
            if not replica.has_graph or empties or has_moved:
                replica.clear()
        self.all = []
        for away in self._away.values():
            if away.has_moved():
                away.drop()

    def share_buffers(self) -> None:
        """Give the first replica the model's own buffers, if it is on the model's device."""
        first = self.all[0]
        if first.device == self.home:
            first.replace(self.survey.tensors, first.tensors, [*self.survey.tensors])

    def copy_for_lanes(self, value: Any) -> tuple[list[Any], bool]:
        """Return one copy of a callable per lane, as of the target, and True if it holds a generator of random numbers.

        A callable without state of its own is shared.

        Raises:
            ReplicaError: If it cannot be copied.
        """
        survey = Survey(value)
        if not (survey.places or survey.opaque or survey.twins):
            return [value] * len(self.devices), False
        return [replica.copy_other(survey) for replica in self.all], bool(survey.generators)

    # Streams

    def _read_streams(self) -> dict[torch.device, Stream]:
        """Return the caller's current streams on the devices of the model and the lanes."""
        devices = {each for each in (self.home, *self.devices) if each is not None and each.type != "cpu"}
        found = {device: backend_of(device.type).stream(device) for device in devices}
        return {device: stream for device, stream in found.items() if stream is not None}

    def _follow_streams(self) -> None:
        """Keep the memory of the replicas, once it is freed, until the caller's new streams are done with it."""
        if not self._streams or self._streams == self._read_streams():
            return
        for away in self._away.values():
            record_use(away.copies)
        for replica in self.all:
            record_use(replica.tensors)
        if self._away and torch.is_grad_enabled():  # parameters remember the stream of the graphs that lead to them
            self._drop(empties=True)
            for away in self._away.values():
                away.drop()
            self.renew()

    # The writes of calls

    def settle_call(self, used: Sequence[Replica], versions: Sequence[int]) -> None:
        """Judge what the lanes of a cut call wrote. `versions` are those that the parameters had before it.

        Raises:
            ReplicaError: As for `settle`; if forward wrote a parameter.
        """
        if [*map(version_of, self.params)] != versions:
            self.refuse_write(versions)
        self._refuse_writes_away()
        if self.renews_always or any(replica.is_dirty or replica.is_written() for replica in used):
            self.settle(used, is_cut=True)
        if self._written:
            self.warn()

    def settle_whole(self, replica: Replica, versions: Sequence[int]) -> None:
        """Judge what a whole call wrote, in the thread of its lane.

        Raises:
            ReplicaError: If forward made a layer; if it wrote a parameter.
        """
        replica.is_dirty = not replica.holdings.is_same()
        if replica.device not in self._away and [*map(version_of, self.params)] != versions:
            self.refuse_write(versions)
        self._refuse_writes_away()
        if replica.is_dirty or replica.is_written():
            self.settle([replica], is_cut=False)

    def prepare(self, replica: Replica) -> None:
        """Bring a replica to the model's state before a whole call, in the thread of its lane."""
        if replica.is_dirty:
            replica.restore()
        if self.renews_always or replica.is_written():
            self.renew_in_lane(replica)

    def settle(self, used: Sequence[Replica], *, is_cut: bool) -> None:
        """Judge what forward wrote in these replicas. Lanes start their next calls from the model's state.

        In evaluation mode nothing comes back to the model. In training mode, the buffers that lane 0 of a cut call wrote in
        place do. The rest is put back, with one warning.

        Raises:
            ReplicaError: If lanes wrote different values into a buffer in evaluation mode, if a module in training wrote a
                buffer and an attribute, or if forward made a layer.
        """
        names: dict[str, None] = {}
        attributes: dict[str, str] = {}
        for replica in used:
            if not replica.is_dirty:
                continue
            for change in replica.holdings.changes():
                self._judge(change, replica, used, names, attributes)
        written = self._find_written(used)
        comes_back = is_cut and self.survey.trains
        if comes_back:
            self._refuse_parted(written, attributes)
        for index in written:
            name = self.survey.paths[id(self.survey.tensors[index])]
            is_buffer = self._is_buffer(self.survey.tensors[index])
            if not (comes_back and is_buffer):
                names[name] = None
            if is_buffer and is_cut and not self.survey.trains:
                _refuse_different(name, [replica.tensors[index] for replica in used])
        if comes_back:
            self._give_back(written, used[0])
        self.note_written(names)

    def note_written(self, names: Iterable[str]) -> None:
        """Remember names for the warning. Any thread may call it."""
        with self._writing:
            self._written.update(dict.fromkeys(names))

    def warn(self) -> None:
        """Warn once of what calls wrote and the model does not get. For the caller's thread."""
        names = [name for name in [*self._written] if _container_of(name) not in self._warned]
        if not names:
            return
        self._warned.update(map(_container_of, names))
        warn_caller(
            f"the model wrote {', '.join(map(repr, names))} during a call. Each lane wrote its own, and these "
            "writes do not come back to the model: the next call starts without them. Return the value from the call "
            "instead. In training mode, buffers that forward writes in place come back, as from torch.nn.DataParallel. If "
            "the model prepares itself in its first call, call it once before the block"
        )

    def refuse_write(self, versions: Sequence[int]) -> None:
        """Raise an error that names the first parameter with another version than it had.

        Raises:
            ReplicaError: If there is one whose writes are not allowed.
        """
        for tensor, before in zip(self.params, versions, strict=True):
            if version_of(tensor) != before and not self._may_renormalize(tensor):
                self._refuse_parameter(tensor)

    def _refuse_writes_away(self) -> None:
        """Raise an error if forward wrote a copy of a parameter on another device."""
        for away in self._away.values():
            written = away.find_written()
            if written is not None:
                away.invalidate()
                self._refuse_parameter(written)

    def read_contents(self) -> list[Any]:
        """Return the memory and a sum of each parameter and copy, which also show writes through ``.data``."""
        copies = (copied for away in self._away.values() for copied in away.copies)
        with torch.no_grad():
            return [_contents_of(tensor) for tensor in (*self.params, *copies)]

    def check_contents(self, before: list[Any]) -> None:
        """Raise an error if the parameters have other contents than `read_contents` returned.

        Raises:
            ReplicaError: If so. The message names the first one.
        """
        originals = (original for away in self._away.values() for original in away.originals)
        for tensor, then, now in zip((*self.params, *originals), before, self.read_contents(), strict=True):
            if then != now and not self._may_renormalize(tensor):
                self._refuse_parameter(tensor)

    def _refuse_parameter(self, tensor: torch.Tensor) -> None:
        name = self.survey.path_of(tensor)
        if self.survey.scripts and not isinstance(tensor, torch.nn.Parameter):
            msg = (
                f"{name!r} of a scripted module was written during a call. Lanes share scripted modules, so each lane "
                "would write it once. Use the module before torch.jit.script, or call model.eval()"
            )
            raise ReplicaError(msg)
        msg = (
            f"the parameter {name!r} was written during a call, by forward or by another thread. Lanes share "
            "parameters, so each lane would write it once. Compute with a new tensor, make it a buffer, or write it "
            "between calls"
        )
        raise ReplicaError(msg)

    def _may_renormalize(self, tensor: torch.Tensor) -> bool:
        """True for the weight of an embedding with ``max_norm``, whose lanes run in turns."""
        holders = self.survey.holders.get(id(tensor), ())
        return any(holder is not None and getattr(holder[0].owner, "max_norm", None) is not None for holder in holders)

    def _judge(
        self,
        change: Change,
        replica: Replica,
        used: Sequence[Replica],
        names: dict[str, None],
        attributes: dict[str, str],
    ) -> None:
        """Enter the names of one change of a replica; `attributes` are those by the path of their module."""
        place, key, before, now = change
        name = place.name(key)
        known = {id(part) for part in before} if key is None else ()
        for part in now if key is None else (now,):
            is_layer = isinstance(part, (torch.nn.Module, torch.nn.Parameter)) and id(part) not in known
            if is_layer and replica.original_of(part) is None:
                msg = (
                    f"forward makes {name!r}, and each lane made its own, which learns nothing. Make it before the "
                    "block, for instance by a call of the model"
                )
                raise ReplicaError(msg)
        if place.kind in (PARAMETERS, CHILDREN):
            msg = f"forward replaces {name!r}, and each lane replaced its own. Do so between calls"
            raise ReplicaError(msg)
        if place.kind == BUFFERS:
            if not self.survey.trains:
                _refuse_different(name, [each.holdings.read(place).get(key) for each in used])
            names[name] = None
        elif _counts(before, now) and not _is_computed(place, key):
            names[name] = None
            attributes[place.module_path] = name

    def _find_written(self, used: Sequence[Replica]) -> list[int]:
        """Return the indices of the tensors that lanes wrote in place."""
        found: set[int] = set()
        for replica in used:
            if replica.is_written():
                before = {id(tensor): version for tensor, version in zip(replica.versioned, replica.versions, strict=True)}
                moved = (
                    index
                    for index, tensor in enumerate(replica.tensors)
                    if id(tensor) in before and version_of(tensor) != before[id(tensor)]
                )
                found.update(moved)
        return sorted(found)

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        holders = self.survey.holders.get(id(tensor), ())
        return any(holder is not None and holder[0].kind == BUFFERS for holder in holders)

    def _refuse_parted(self, written: Sequence[int], attributes: dict[str, str]) -> None:
        """Refuse a module that wrote a buffer, which comes back, and an attribute, which does not."""
        for index in written:
            tensor = self.survey.tensors[index]
            for holder in self.survey.holders.get(id(tensor), ()):
                if holder is not None and holder[0].kind == BUFFERS and holder[0].path in attributes:
                    msg = (
                        f"forward writes the buffer {self.survey.paths[id(tensor)]!r} and "
                        f"{attributes[holder[0].path]!r} in one module. In training mode the buffer comes back to the "
                        "model and the attribute does not, so they would part. Make the attribute a buffer: "
                        'self.register_buffer("name", torch.tensor(value)), written in place'
                    )
                    raise ReplicaError(msg)

    def _give_back(self, written: Sequence[int], first: Replica) -> None:
        """Copy the buffers that lane 0 wrote to the model."""
        indices = [index for index in written if self._is_buffer(self.survey.tensors[index])]
        known = set(indices)
        unseen = [
            index
            for index, tensor in enumerate(self.survey.tensors)
            if index not in known and is_written_unseen(tensor) and self._is_buffer(self.survey.tensors[index])
        ]
        pairs = [(self.survey.tensors[index], first.tensors[index]) for index in indices]
        pairs += [(self.survey.tensors[index].data, first.tensors[index]) for index in unseen]  # as quietly as C++ wrote it
        with lasting():
            for tensor, value in pairs:
                if value.device != tensor.device:
                    record_use([value])
                tensor.copy_(value)


def _itself(owner: Any) -> Any:
    return owner


def _own_copy(memo: dict[int, Any], value: Any) -> Any:
    """Return the lane's copy of a part of the target; None if all lanes use the part itself."""
    copied = memo.get(id(value), value)
    return None if copied is value else copied


def _home_of(target: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module; None without one."""
    module = target.__self__ if isinstance(target, types.MethodType) else target
    if not isinstance(module, torch.nn.Module):
        return None
    first = _first_tensor(module, PARAMETERS)
    if first is None:
        first = _first_tensor(module, BUFFERS)
    return None if first is None else first.device


def _first_tensor(module: torch.nn.Module, table: str) -> torch.Tensor | None:
    """Return the first tensor in such tables of a module and its parts. Plain calls of one lane wait for this walk."""
    waiting: list[torch.nn.Module | None] = [module]
    seen: set[int] = set()
    while waiting:
        part = waiting.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        for tensor in getattr(part, table).values():
            if tensor is not None:
                return tensor  # type: ignore[no-any-return]
        waiting.extend(reversed(getattr(part, CHILDREN).values()))
    return None


def home_of(module: torch.nn.Module) -> torch.device | None:
    """Return the one device that the tensors of a module are on; None for a module without tensors.

    Raises:
        ReplicaError: If they are on several devices. The message names two of them.
    """
    home = _home_of(module)
    _refuse_devices(Survey(module), home)
    return home


def _refuse_devices(survey: Survey, home: torch.device | None) -> None:
    """Refuse a model on several devices, or on the meta device."""
    if home is None:
        return
    registered = [tensor for tensor in (*survey.params, *survey.tensors) if _is_registered(survey, tensor)]
    for tensor in registered:
        if tensor.device != home:
            msg = (
                f"the model lies on several devices: {survey.paths[id(registered[0])]!r} on {home} and "
                f"{survey.paths[id(tensor)]!r} on {tensor.device}. A replica of it would need as many devices again; "
                "put the model on one device, or make its parts parallel one by one"
            )
            raise ReplicaError(msg)
    if home.type == "meta":
        msg = f"no replica can be made: {survey.paths[id(registered[0])]!r} is on the meta device and has no data to copy"
        raise ReplicaError(msg)


def _is_registered(survey: Survey, tensor: torch.Tensor) -> bool:
    holders = survey.holders.get(id(tensor), ())
    return any(holder is not None and holder[0].kind in (PARAMETERS, BUFFERS) for holder in holders)


def _refuse_cuda_graphs(survey: Survey, devices: Iterable[torch.device]) -> None:
    """Refuse models that torch.compile runs as CUDA graphs: torch keeps these for one thread and one stream."""
    for module in survey.modules:
        if is_compiled_module(module) and uses_cuda_graphs(module) and any(each.type == "cuda" for each in devices):
            msg = (
                f"{survey.path_of(module)!r} is compiled to run as CUDA graphs, which only one thread can use, and each "
                'lane has its own. Compile it with torch.compile(model), or with mode="max-autotune-no-cudagraphs"'
            )
            raise ReplicaError(msg)


def _clone_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of tensors on their device. Those that share memory are copied together."""
    memory: dict[int, int] = {}
    for tensor in tensors:
        if storage := storage_of(tensor):
            memory[storage] = memory.get(storage, 0) + 1
    if all(count == 1 for count in memory.values()):
        found = [tensor.detach().clone() for tensor in tensors]
    else:
        found = copy.deepcopy([tensor.detach() for tensor in tensors])
    for tensor, each in zip(tensors, found, strict=True):
        if own := vars_of(tensor):
            vars(each).update(own)
    return found


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the same memory, without a way of gradients back."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()


def is_written_unseen(tensor: torch.Tensor) -> bool:
    """True for a tensor that forward may write in training mode without a new version, as batch norm does in C++."""
    return tensor.ndim > 0 and tensor.is_floating_point()


def _contents_of(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    dtype = torch.float64 if tensor.is_floating_point() else torch.complex128 if tensor.is_complex() else None
    return tensor.data_ptr(), tensor.requires_grad, repr(tensor.detach().sum(dtype=dtype).item())


def _refuse_different(name: str, values: Sequence[Any]) -> None:
    """Refuse a buffer that lanes wrote differently in evaluation mode."""
    first = values[0]
    for other in values[1:]:
        if not _are_equal(first, other):
            msg = (
                f"forward writes the buffer {name!r} in evaluation mode, and the lanes wrote different values. State "
                "per row belongs in the arguments and the output"
            )
            raise ReplicaError(msg)


def _are_equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        other = other.to(one.device)
        return one.shape == other.shape and one.dtype == other.dtype and torch.allclose(one, other, 0, 0, equal_nan=True)
    return one is other


def _is_bare(part: Any, known: set[int]) -> bool:
    """True for a module that only holds the copies of submodules: torchvision's graphs make such modules anew."""
    if type(part) is not torch.nn.Module or vars(part)[PARAMETERS] or vars(part)[BUFFERS]:
        return False
    return all(id(each) in known or _is_bare(each, known) for each in vars(part)[CHILDREN].values())


def _container_of(name: str) -> str:
    """Return the name of an attribute without keys: a cache by shape gets another key at each call."""
    return name.partition("[")[0]


def _is_computed(place: Place, key: Any) -> bool:
    """True for an attribute that a hook of torch computes from parameters at each call, as weight norm does."""
    params = vars(place.owner).get(PARAMETERS, {}) if place.kind == "vars" else {}
    is_of_rnn = isinstance(place.owner, torch.nn.RNNBase) and str(key).startswith("_flat_weight")
    return is_of_rnn or f"{key}_orig" in params or f"{key}_v" in params


def _counts(before: Any, now: Any) -> bool:
    """True unless a value was replaced by an equal one, or an empty container by an empty one."""
    if before is now or (type(before) is type(now) and type(now) in _SIMPLE and before == now):
        return False
    return not (isinstance(now, (dict, list, set)) and not now and (before in (None, ABSENT) or not before))

"""The replicas of a target, one per lane, and what keeps them up to date with it.

A replica (`replica.py`) is `copy.deepcopy` of the target with a seeded memo. Lanes on the model's device hold the model's
own parameters, so gradients, optimizer steps, and ``p.data = ...`` need no care there. Lanes on another device hold copies
(`parameter_copies.py`). Each lane has its own buffers and attributes. Before a call, one comparison shows whether the
replicas are still the model; after it, one comparison per lane shows what forward wrote (`forward_writes.py`).
"""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any

import torch

from parawrap._private_names import (
    BUFFERS,
    PARAMETERS,
    copy_all,
    is_compiled_module,
    uses_cuda_graphs,
    version_of,
)
from parawrap.backends import Stream, backend_of, record_use, warn_caller
from parawrap.engine.batched_copies import bytes_of, copies_at, lasting
from parawrap.engine.forward_writes import (
    SIMPLE,
    contents_of,
    is_written_unseen,
    may_renormalize,
    parameter_error,
    settle_writes,
)
from parawrap.engine.holdings import Holdings
from parawrap.engine.parameter_copies import ParameterCopies
from parawrap.engine.replica import Replica, clone_all, is_dirty
from parawrap.engine.survey import Survey, first_tensor
from parawrap.errors import ReplicaError

CopiesOfParts = Callable[[Survey], Sequence[dict[int, Any]]]
"""Returns, for each lane, the copies that it uses of parts of the target, by the id of the part."""

_requires_grad = attrgetter("requires_grad")


class Replicas:
    """The replicas of one target. The caller ensures that no lane runs in `refresh`, `settle_call`, and `forget`.

    With `detach`, no gradients flow from the replicas to the target. `shares_hooks` is as in `Survey`. `copies_of_parts`
    gives lanes their own copies of parts that replicas would share, such as compiled models.

    Attributes:
        all: One replica per lane; empty before the first refresh.
        home: The device of the model; None if it has no tensors.
        params: The parameters that have versions.
        learners: All parameters.
        is_lazy: True if a parameter waits for its first call to get a shape. The call must run plainly.
        is_new: True until a call has run on these replicas.
        must_refresh: True if the next call must refresh, whatever a look at the model would show.
        renews_always: True if forward may write buffers without a new version.
        generation: How often a refresh found the model changed.
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
        self.target = target
        self.devices = tuple(devices)
        self.refreshes = self.copied_bytes = self.generation = 0
        self._methods = methods
        self._detach = detach
        self._shares_hooks = shares_hooks
        self._copies_of_parts = copies_of_parts
        self._on_cpu = all(device.type == "cpu" for device in self.devices)
        self._lock = threading.Lock()  # of what lanes write here
        self._written: dict[str, None] = {}
        self._warned: set[str] = set()
        self.all: list[Replica] = []
        self._away = ParameterCopies((), ())
        self._streams: dict[torch.device, Stream] = {}
        self.forget()

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

    def has_moved(self) -> bool:
        """True if the model is on another device, copies on other devices are stale, or the caller has other streams."""
        if self._first is not None and self._first.device != self.home:
            return True
        if self._on_cpu and not self._away.devices:
            return False
        return self._away.is_stale() or (bool(self._streams) and self._streams != self._read_streams())

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
        self._away.invalidate()

    def refresh(self) -> None:
        """Bring the replicas up to date with the model. If that fails, the next refresh makes them again.

        Raises:
            ReplicaError: If the model cannot be copied.
        """
        try:
            for replica in self.all:
                if replica.is_dirty:
                    replica.restore()
            self._follow_streams()
            # A `renew` from here on counts for the next call
            is_forced, self._is_forced, self.must_refresh = self._is_forced, False, False
            has_moved = (self._first is not None and self._first.device != self.home) or self._away.has_moved()
            has_moved = has_moved or True in map(_requires_grad, self.survey.tensors)  # one of them learns now
            if is_forced or has_moved or not (self.model.is_same() or self._apply_changes()):
                self._build()
            elif not self.is_lazy:
                self._renew()
        except BaseException:
            self.renew()
            raise

    def forget(self) -> None:
        """Drop the replicas, and everything that is known of the target."""
        self._drop()
        self._away, self._streams = ParameterCopies((), ()), {}
        self._note_survey(Survey(None))
        self._note_versions()
        self.is_quiet = False
        self.renew()

    # Making and renewing

    def _build(self) -> None:
        """Make all replicas for the structure of now. Copies of parameters on other devices are kept.

        The old replicas are dropped first: parameters remember the shapes of the graphs that lead to them.
        """
        survey = Survey(self.target, self._methods, shares_hooks=self._shares_hooks)
        self.generation += 1
        self._drop()
        self._note_survey(survey)
        if survey.is_lazy:
            self.renew()
            return
        _refuse_devices(survey, self.home)
        self._refuse_cuda_graphs()
        devices = {device for device in self.devices if self.home is not None and device != self.home}
        at_home = [tensor for tensor in survey.params if tensor.device == self.home]
        if self._away.devices != devices or [*map(id, self._away.originals)] != [*map(id, at_home)]:
            self._away = ParameterCopies(devices, at_home)
        self._refresh_away()
        known = [{}] * len(self.devices) if self._copies_of_parts is None else self._copies_of_parts(survey)
        self.all = [
            Replica(survey, device, self._params_on(device), self._copy_tensors(device), parts)
            for device, parts in zip(self.devices, known, strict=True)
        ]
        self._streams = self._read_streams()
        self._note_versions()

    def _note_survey(self, survey: Survey) -> None:
        self.survey = survey
        tensors = [*survey.params, *survey.tensors]
        self.home = _home_of(self.target) or next((tensor.device for tensor in tensors), None)
        self._first = next((tensor for tensor in tensors if tensor.device == self.home), None)
        self.is_lazy, self.is_quiet, self.in_turns = survey.is_lazy, survey.is_quiet, survey.in_turns
        self.generators = survey.generators
        self.learners = [*survey.params]
        self.params = [tensor for tensor in survey.params if not (survey.is_lazy or tensor.is_inference())]
        self.model = Holdings(survey.places, lambda owner: owner, compares_names=True)
        self.is_new = True

    def _renew(self) -> None:
        """Give lanes new copies of what changed: of all buffers, if one of them was written."""
        streams = self._read_streams()
        self._refresh_away()
        for replica in self.all:
            params = self._params_on(replica.device)
            has_others = replica.device in self._away.copies and not all(map(is_, params, replica.params))
            if has_others and not replica.replace(self.survey.params, replica.params, params):
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

    def _renew_tensors_of(self, replica: Replica) -> bool:
        has_places = replica.replace(self.survey.tensors, replica.tensors, self._copy_tensors(replica.device))
        replica.note_versions()
        return has_places

    def _refresh_away(self) -> None:
        self.generation += self._away.has_changed()
        copied = self._away.refresh(detach=self._detach)
        self.copied_bytes += copied
        self.refreshes += bool(copied)

    def _params_on(self, device: torch.device) -> list[torch.Tensor]:
        """Return the parameters as lanes on a device hold them."""
        params = self.survey.params
        if device not in self._away.copies:
            return [*map(_detached, params)] if self._detach else params
        copies = dict(zip(map(id, self._away.originals), self._away.copies[device], strict=True))
        return [copies.get(id(tensor), tensor) for tensor in params]

    def _copy_tensors(self, device: torch.device) -> list[torch.Tensor]:
        """Return new copies of the model's other tensors for a lane. Tensors that share memory have copies that do."""
        tensors = self.survey.tensors
        if device == self.home or self.home is None:
            return clone_all(tensors)
        at_home = [tensor for tensor in tensors if tensor.device == self.home]
        moved = iter(copies_at(device, at_home))
        with lasting():
            found = [next(moved) if tensor.device == self.home else tensor.detach().clone() for tensor in tensors]
        with self._lock:  # several lanes may renew their tensors at once
            self.copied_bytes += sum(map(bytes_of, at_home))
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
            if key is None or type(before) not in SIMPLE or type(now) not in SIMPLE:
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
        unseen = self.survey.trains and any(map(is_written_unseen, filter(self.survey.is_buffer, tensors)))
        through_data = self.survey.in_turns and bool(tensors)
        self.renews_always = unseen or through_data or any(tensor.is_inference() for tensor in tensors)
        if self.renews_always:
            self.must_refresh = True
        self._suspects_buffers = False

    def _drop(self) -> None:
        """Drop the replicas. Those that a backward pass may call again stay whole, unless the parameters have moved."""
        has_moved = self._away.has_moved()
        for replica in self.all:
            if has_moved or not replica.has_graph:
                replica.clear()
        self.all = []
        if has_moved:
            self._away.drop()

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
            return [value] * len(self.devices), bool(survey.generators)
        return [replica.copy_other(survey) for replica in self.all], bool(survey.generators)

    def _refuse_cuda_graphs(self) -> None:
        """Refuse models that torch.compile runs as CUDA graphs: torch keeps these for one thread and one stream."""
        for module in self.survey.modules if self.devices[0].type == "cuda" else ():
            if is_compiled_module(module) and uses_cuda_graphs(module):
                msg = (
                    f"{self.survey.path_of(module)!r} is compiled to run as CUDA graphs, which only one thread can use, "
                    "and each lane has its own. Compile it with torch.compile(model), or with "
                    'mode="max-autotune-no-cudagraphs"'
                )
                raise ReplicaError(msg)

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
        record_use([copied for _, copied in self._away.pairs()])
        for replica in self.all:
            record_use(replica.tensors)
        if self._away.copies and torch.is_grad_enabled():  # parameters remember the stream of the graphs that lead to them
            for replica in self.all:
                replica.has_graph = False  # it is emptied
            self._drop()
            self._away.drop()
            self.renew()

    # The writes of calls

    def settle_call(self, used: Sequence[Replica], versions: Sequence[int]) -> None:
        """Judge what the lanes of a cut call wrote. `versions` are those that the parameters had before it.

        Raises:
            ReplicaError: As for `settle_writes`; if forward wrote a parameter.
        """
        if [*map(version_of, self.params)] != versions:
            self.refuse_write(versions)
        if self._away.copies:
            self._refuse_writes_away()
        if self.renews_always or any(replica.is_dirty or replica.is_written() for replica in used):
            self._settle(used, is_cut=True)
        if self._written:
            self.warn()

    def settle_whole(self, replica: Replica, versions: Sequence[int]) -> None:
        """Judge what a whole call wrote, in the thread of its lane.

        Raises:
            ReplicaError: If forward made a layer; if it wrote a parameter.
        """
        replica.is_dirty = not replica.holdings.is_same()
        if replica.device not in self._away.copies and [*map(version_of, self.params)] != versions:
            self.refuse_write(versions)
        if self._away.copies:
            self._refuse_writes_away()
        if replica.is_dirty or replica.is_written():
            self._settle([replica], is_cut=False)

    def prepare(self, replica: Replica) -> None:
        """Bring a replica to the model's state before a whole call, in the thread of its lane."""
        if replica.is_dirty:
            replica.restore()
        if (self.renews_always or replica.is_written()) and not self._renew_tensors_of(replica):
            with torch.no_grad():  # a tuple holds one of them
                copy_all(replica.tensors, self._copy_tensors(replica.device))
            replica.note_versions()

    def _settle(self, used: Sequence[Replica], *, is_cut: bool) -> None:
        names = settle_writes(self.survey, used, is_cut=is_cut)
        with self._lock:
            self._written.update(dict.fromkeys(names))

    def warn(self) -> None:
        """Warn once of what calls wrote and the model does not get. For the caller's thread."""
        # A name without keys: a cache by shape gets another key at each call
        names = [name for name in [*self._written] if name.partition("[")[0] not in self._warned]
        if not names:
            return
        self._warned.update(name.partition("[")[0] for name in names)
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
            if version_of(tensor) != before and not may_renormalize(self.survey, tensor):
                raise parameter_error(self.survey, tensor)

    def _refuse_writes_away(self) -> None:
        """Raise an error if forward wrote a copy of a parameter on another device."""
        written = self._away.find_written()
        if written is not None:
            self._away.invalidate()
            raise parameter_error(self.survey, written)

    def read_contents(self) -> list[Any]:
        """Return the memory and a sum of each parameter and copy, which also show writes through ``.data``."""
        with torch.no_grad():
            return [contents_of(tensor) for tensor in (*self.params, *[copied for _, copied in self._away.pairs()])]

    def check_contents(self, before: list[Any]) -> None:
        """Raise an error if the parameters have other contents than `read_contents` returned.

        Raises:
            ReplicaError: If so. The message names the first one.
        """
        tensors = [*self.params, *[original for original, _ in self._away.pairs()]]
        for tensor, then, now in zip(tensors, before, self.read_contents(), strict=True):
            if then != now and not may_renormalize(self.survey, tensor):
                raise parameter_error(self.survey, tensor)


def _home_of(target: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer of a module; None without one."""
    module = target.__self__ if isinstance(target, types.MethodType) else target
    first = first_tensor(module) if isinstance(module, torch.nn.Module) else None
    return None if first is None else first.device


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
    tables = {PARAMETERS, BUFFERS}
    tensors = [*survey.params, *survey.tensors]
    registered = [each for each in tensors if not tables.isdisjoint(place.kind for place in survey.places_of(each))]
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


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter with the same memory, without a way of gradients back."""
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(tensor.detach(), requires_grad=False)
    return tensor.detach()
